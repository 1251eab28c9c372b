"""A rank's training state as digests: two runs that agree on them agree on every bit.

It reads the tensors from the engine itself, by a way of its own, so that it can convict the checkpointer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash

__all__ = ["state_digest"]

# Where DeepSpeed's optimizers keep the full-precision values (ZeRO 1 and 2, 3, BF16, and stage 0 in bf16).
MASTER_ATTRIBUTES = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)


def state_digest(engine: Any) -> dict[str, str]:
    """XXH3 over names, dtypes, shapes and bytes of this rank's ``parameters``, ``masters`` and ``optimizer`` state.

    Under ZeRO-3 the parameters are the rank's partitions; the two ranks' digests together cover every element.
    """
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    masters = list(master_tensors(engine))
    return {
        "parameters": digest(
            (name, getattr(parameter, "ds_tensor", parameter)) for name, parameter in engine.module.named_parameters()
        ),
        "masters": digest((f"master{index}", master) for index, master in enumerate(masters)),
        "optimizer": digest(
            (f"master{index}.{name}", value)
            for index, master in enumerate(masters)
            for name, value in sorted(inner.state[master].items())
        ),
    }


def master_tensors(engine: Any) -> Iterator[torch.Tensor]:
    for attribute in MASTER_ATTRIBUTES:
        if groups := getattr(engine.optimizer, attribute, None):
            for group in groups:
                yield from [group] if isinstance(group, torch.Tensor) else group
            return
    yield from engine.module.parameters()


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    state = xxhash.xxh3_128()
    for name, tensor in tensors:
        flat = torch.as_tensor(tensor).detach().cpu().contiguous()
        state.update(f"{name} {flat.dtype} {tuple(flat.shape)}\n".encode())
        state.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return str(state.hexdigest())

"""A rank's training state as digests: two runs that agree on them agree on every bit.

It reads the tensors from the engine itself, by a way of its own, so that it can convict the checkpointer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import xxhash

__all__ = ["digest", "master_tensors", "state_digest", "whole_digest"]

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

    Under ZeRO-3 the parameters are the rank's partitions; the two ranks' digests together cover every element. What
    pads a partition is left out: nobody initialises it, so that it differs from one process to the next.
    """
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    masters = list(master_tensors(engine))
    partitioned = getattr(engine.optimizer, "fp16_groups", None) if is_partitioned(engine) else None
    pieces = partitioned or [None] * len(masters)
    return {
        "parameters": digest(
            (name, without_padding(parameter.ds_tensor, [parameter]) if is_partition(parameter) else parameter)
            for name, parameter in engine.module.named_parameters()
        ),
        "masters": digest(
            (f"master{index}", without_padding(master, pieces[index])) for index, master in enumerate(masters)
        ),
        "optimizer": digest(
            (f"master{index}.{name}", without_padding(value, pieces[index]))
            for index, master in enumerate(masters)
            for name, value in sorted(inner.state[master].items())
        ),
    }


def whole_digest(engine: Any) -> dict[str, str]:
    """XXH3 over ``masters`` and ``optimizer`` state of the whole model, put together from all ranks, and over the
    ``schedule``: the same whatever the number of ranks is. Collective."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    masters: list[tuple[str, torch.Tensor]] = []
    optimizer: list[tuple[str, torch.Tensor]] = []
    for index, master in enumerate(master_tensors(engine)):
        sizes = whole_sizes(engine, index, master)
        masters += pieces_joined(f"master{index}", master, sizes)
        for name, value in sorted(inner.state[master].items()):
            optimizer += pieces_joined(f"master{index}.{name}", value, sizes)
    schedule = {**engine.lr_scheduler.state_dict(), "lr": engine.get_lr(), "step": engine.global_steps}
    return {"masters": digest(masters), "optimizer": digest(optimizer), "schedule": str(sorted(schedule.items()))}


def whole_sizes(engine: Any, index: int, master: torch.Tensor) -> list[tuple[int, int]]:
    """Of each piece of a rank's flat partition: its elements, and those of what it is a part of, without padding.
    Empty if each rank has the whole master."""
    if is_partitioned(engine):
        return [(each.ds_tensor.numel(), each.ds_numel) for each in engine.optimizer.fp16_groups[index]]
    groups = getattr(engine.optimizer, "bit16_groups", None) or getattr(engine.optimizer, "bf16_groups", None)
    return [(master.numel(), sum(each.numel() for each in groups[index]))] if groups else []


def pieces_joined(name: str, value: Any, sizes: list[tuple[int, int]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors that the ranks' flat partitions are cut from. What is not cut (a step's count) as it is."""
    flat = torch.as_tensor(value).detach().reshape(-1)
    if flat.numel() != sum(elements for elements, _ in sizes):
        yield name, torch.as_tensor(value)
        return
    for piece, (own, (_, whole)) in enumerate(
        zip(torch.split_with_sizes(flat, [size for size, _ in sizes]), sizes, strict=True)
    ):
        parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, own.contiguous())
        yield f"{name}.{piece}", torch.cat(parts)[:whole]


def is_partition(parameter: torch.nn.Parameter) -> bool:
    """Whether ZeRO-3 has cut it up."""
    return hasattr(parameter, "ds_tensor")


def is_partitioned(engine: Any) -> bool:
    return any(is_partition(parameter) for parameter in engine.module.parameters())


def without_padding(tensor: torch.Tensor, parameters: Sequence[Any] | None) -> torch.Tensor:
    """Of a rank's flat partitions of ``parameters``, one behind the other, what is theirs; anything else (a step's
    count, or what is not partitioned) as it is."""
    sizes = [each.ds_tensor.numel() for each in parameters or ()]
    flat = torch.as_tensor(tensor).detach().reshape(-1)
    if not parameters or flat.numel() != sum(sizes):
        return tensor
    pieces = [
        part[: max(0, each.ds_numel - partition_rank(each) * part.numel())]
        for part, each in zip(torch.split_with_sizes(flat, sizes), parameters, strict=True)
    ]
    return torch.cat(pieces)


def partition_rank(parameter: Any) -> int:
    """Which of the partitions is this rank's."""
    return torch.distributed.get_rank(parameter.ds_process_group)


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

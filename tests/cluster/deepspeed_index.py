"""What the index of each rank says of its masters, against the parameters that DeepSpeed gathers: every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.assembling import assembled
from tests.cluster.deepspeed_harness import Case, Model, build, differences, full_parameters, iterate
from tiercheck.format.index.logical import LogicalTensor, Range
from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider
from tiercheck.streams.tensors.as_bytes import DTYPES

__all__ = ["INDEXES", "built_failures", "index_failures"]


def index_failures(engine: Any, provider: DeepSpeedProvider) -> Iterable[str]:
    """``provider`` is the one of ``engine``."""
    whole, holdings = assembled(provider)
    tensors = {tensor.name: tensor for tensor in holdings.tensors}
    for name, parameter in full_parameters(engine).items():
        value = whole[name, ""].to(parameter.dtype)
        if value.shape != parameter.shape:
            value = value[own_block(tensors[name], parameter)]
        yield from differences(f"{name} as assembled", parameter, value)
    for name, buffer in provider.buffers().items():
        yield from differences(name, buffer, whole[name, ""])


def own_block(tensor: LogicalTensor, parameter: torch.Tensor) -> tuple[slice, ...]:
    """The part of a tensor that this rank's module has under tensor parallelism: here all are cut in equal parts."""
    rank = torch.distributed.get_rank()
    pairs = zip(tensor.shape, parameter.shape, strict=True)
    return tuple(slice(rank * n, (rank + 1) * n) if n < size else slice(None) for size, n in pairs)


def on_three_ranks(case: Case) -> Iterable[str]:
    """Sizes that no rank's part divides: partitions end in padding, and begin in the middle of parameters."""
    engine = build(case, seed=1)
    provider = DeepSpeedProvider(engine)
    if case.stage > 0:  # whose wrappers do not step before training
        yield from built_failures(provider, seed=1)
    yield from index_failures(engine, provider)
    iterate(engine)
    yield from index_failures(engine, provider)
    index = provider.index()
    within = any(isinstance(piece, Range) and piece.start for pieces in index.stored.values() for piece in pieces)
    if within != (case.stage > 0 and torch.distributed.get_rank() > 0):
        yield f"that pieces begin in the middle of parameters is {within}"
    engine.destroy()


def built_failures(provider: DeepSpeedProvider, seed: int) -> Iterable[str]:
    """Before the first step all together hold the model that DeepSpeed was given, which it may have cut into slices."""
    whole, holdings = assembled(provider)
    dtypes = {tensor.name: DTYPES[tensor.dtype] for tensor in holdings.tensors}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        given = dict(Model().named_parameters())
    for name, parameter in given.items():
        if (name, "") not in whole:
            yield f"{name} is not whole"
            continue
        dtype = dtypes[name]
        yield from differences(f"{name} as built", parameter.detach().to(dtype), whole[name, ""].to(dtype))


INDEXES: dict[str, Callable[[], Iterable[str]]] = {
    f"index-{name}": lambda case=case: on_three_ranks(case)
    for name, case in {
        "zero0-bf16-fused": Case(0, True, fused=True),
        "zero1-bf16": Case(1, True),
        "zero1-bf16-accumulate-fp32": Case(1, True, accumulate_fp32=True),
        "zero2-fp32": Case(2, False),
        "zero3-fp32": Case(3, False),
        "zero3-bf16": Case(3, True),
    }.items()
}

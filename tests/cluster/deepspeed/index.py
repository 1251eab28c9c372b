"""What the index of each rank says of its masters, against the parameters that DeepSpeed gathers: every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine

from tests.assembling import assembled
from tests.cluster.deepspeed.harness import (
    Block,
    Case,
    First,
    Model,
    build,
    deepspeed,
    differences,
    full_parameters,
    iterate,
    objective,
)
from tiercheck.format.index.logical import Block as Cut
from tiercheck.format.index.logical import LogicalTensor, Range
from tiercheck.integrations.deepspeed.layouts import Span
from tiercheck.integrations.deepspeed.meaning import CUT, Known, Parallel
from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider
from tiercheck.streams.tensors.as_bytes import DTYPES

__all__ = ["INDEXES", "built_failures", "index_failures"]


def index_failures(engine: Any, provider: DeepSpeedProvider) -> Iterable[str]:
    """``provider`` is the one of ``engine``."""
    whole, holdings = assembled(provider)
    tensors = {tensor.name: tensor for tensor in holdings.tensors}
    stage = f"pipeline stage {engine.stage_id} of {engine.num_stages}" if isinstance(engine, PipelineEngine) else ""
    own = {name: each for (name, its), each in whole.items() if its in ("", stage)}
    for name, parameter in full_parameters(engine).items():
        value = own[name].to(parameter.dtype)
        if value.shape != parameter.shape:
            value = value[own_block(tensors[name], parameter)]
        yield from differences(f"{name} as assembled", parameter, value)
    for name, buffer in provider.buffers().items():
        yield from differences(name, buffer, own[name])


def own_block(tensor: LogicalTensor, parameter: torch.Tensor) -> tuple[slice, ...]:
    """The part of a tensor that this rank's module has under tensor parallelism: here all are cut in equal parts."""
    rank = torch.distributed.get_rank()
    pairs = zip(tensor.shape, parameter.shape, strict=True)
    return tuple(slice(rank * n, (rank + 1) * n) if n < size else slice(None) for size, n in pairs)


def on_three_ranks(case: Case, **zero: Any) -> Iterable[str]:
    """Sizes that no rank's part divides: partitions end in padding, and begin in the middle of parameters. ``zero``:
    more options of ``zero_optimization``."""
    config = case.config()
    config["zero_optimization"] |= zero
    engine = build(case, seed=1, config=config)
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


def with_tied_layers() -> Iterable[str]:
    """The first and the last of three stages share a weight, and have more under the same names that they do not."""

    def head(layer: First, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.embed.weight)

    weights = {"tied_weight_attr": ["embed.weight"]}
    last = TiedLayerSpec("embed", First, forward_fn=head, **weights)
    torch.manual_seed(torch.distributed.get_rank())
    model = PipelineModule([TiedLayerSpec("embed", First, **weights), LayerSpec(Block), last], 3, loss_fn=objective)
    case = Case(1, True, accumulation=2, pipeline=True)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=case.config())
    provider = DeepSpeedProvider(engine)
    iterate(engine)
    yield from index_failures(engine, provider)
    slices = {tensor.name: tensor.slice_name for tensor in provider.index().tensors.values()}
    mine = {name.removeprefix("tied_modules.embed.") for name, each in slices.items() if each}
    if mine != (set() if engine.stage_id == 1 else {"frozen", "drift"}):
        yield f"{mine} are this stage's own"


def of_slices() -> Iterable[str]:
    """Under tensor parallelism of two, the second rank's (2, 6) of a matrix: what is told of it is what it is."""
    second = Parallel(1, 2)
    columns = {"partition_dim": 1, "partition_sizes": (6, 6), "logical_shape": (2, 12)}
    block = Known(LogicalTensor("w", "F32", (2, 12), trained=True), Cut("w", (0, 6), (2, 6)))
    part = Known(LogicalTensor("w", "F32", (2, 6), trained=True, slice_name="tensor parallel 1 of 2"))
    whole = Known(LogicalTensor("w", "F32", (2, 6), trained=True))
    for what, attributes, wanted in (
        ("cut by DeepSpeed", {CUT: columns, "tensor_model_parallel": True}, block),
        ("cut in more pieces", {CUT: {**columns, "sub_param_sizes": (3, 3)}}, part),
        ("cut otherwise than it says", {CUT: {**columns, "partition_sizes": (5, 7)}}, part),
        ("told nothing of", {CUT: {}, "tensor_model_parallel": True}, part),
        ("the same on all ranks", {CUT: {"replicated": True}}, whole),
        ("not parallel", {}, whole),
    ):
        parameter = torch.nn.Parameter(torch.zeros(2, 6))
        for name, value in attributes.items():
            setattr(parameter, name, value)
        if (found := second.known("w", parameter, trained=True)) != wanted:
            yield f"a parameter that is {what} is {found}"
    pieces = [*block.pieces(Span(None, 4, 5))]
    if pieces != [Cut("w", (0, 10), (1, 2)), Cut("w", (1, 6), (1, 3))]:
        yield f"the elements 4 to 8 of the block are {pieces}"


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
INDEXES["index-of-slices"] = of_slices
INDEXES["index-zero2-bf16-round-robin"] = lambda: on_three_ranks(Case(2, True), round_robin_gradients=True)
# The last of its launch: DeepSpeed builds no plain engine in a process after a pipeline.
INDEXES["index-pipeline-with-tied-layers"] = with_tied_layers

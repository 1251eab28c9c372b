"""What of the model the tensors of a DeepSpeed engine are: the logical index of a rank.

Names are those of the model that DeepSpeed was given. A pipeline names each layer by its place in the whole pipeline,
so that its stages agree. If several stages tie a layer, DeepSpeed keeps only the tied weights equal. The other tensors
of the layer have the same names on each stage, and are its own: only a rank of the same stage can take them.

Under tensor parallelism a rank's module has slices. DeepSpeed says how it has cut layers itself (AutoTP). Nobody says
it of any other layer, such as those of a model that brings its own ``mpu``: such a slice goes only to a rank that has
the same slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from msgspec import structs

from tiercheck.format.index.boxes import boxes_of
from tiercheck.format.index.logical import (
    EXTRA,
    MASTER,
    Block,
    LogicalIndex,
    LogicalTensor,
    Padding,
    Piece,
    Range,
    Role,
    Shape,
    whole,
)
from tiercheck.integrations.deepspeed.layouts import MasterLayout, Span
from tiercheck.streams.tensors.as_bytes import dtype_name
from tiercheck.streams.tensors.module_tensors import ModuleTensors
from tiercheck.streams.tensors.provider import logical_tensor

__all__ = ["index_of"]

CUT = getattr(constants, "DS_AUTOTP_UC_META", "")
"""The attribute by which DeepSpeed says how it has cut a parameter. Not all releases have it."""


@dataclass(frozen=True)
class Known:
    """A parameter of the rank's module, as the model knows it."""

    tensor: LogicalTensor
    block: Block | None = None
    """The part of it that the rank's module has, if that is not all."""

    def pieces(self, span: Span) -> Iterator[Piece]:
        """What a span of the rank's parameter is."""
        here = Range(self.tensor.name, span.start, span.length)
        if self.block is None:
            yield here
            return
        for box in boxes_of(here, self.block.lengths):
            offsets = tuple(map(sum, zip(self.block.offsets, box.offsets, strict=True)))
            yield Block(self.tensor.name, offsets, box.lengths)


def index_of(engine: Any, layout: MasterLayout, tensors: ModuleTensors) -> LogicalIndex:
    """Errors: ``UnsupportedSetup`` for a dtype that no shard can hold."""
    names = {id(each): f"optimizer.{i}.{j}" for i, group in enumerate(layout.trained()) for j, each in enumerate(group)}
    names |= {id(parameter): tensors.model_name(name) for name, parameter in tensors.parameters().items()}
    parallel = Parallel.of(engine)
    own = of_this_stage(engine)
    found: dict[str, LogicalTensor] = {}
    stored: dict[str, tuple[Piece, ...]] = {}

    def store(name: str, held: Iterable[Span], *, trained: bool) -> None:
        pieces: list[Piece] = []
        for span in held:
            if span.parameter is None:
                pieces.append(Padding(span.length))
                continue
            known = parallel.known(names[id(span.parameter)], span.parameter, trained=trained)
            found[known.tensor.name] = own(known.tensor)
            pieces += known.pieces(span)
        stored[name] = tuple(pieces)

    for master, each in zip(layout.masters(), layout.spans(), strict=True):
        store(MASTER + master.name, each, trained=True)
    trained = (parameter for group in layout.trained() for parameter in group)
    for name, parameter in tensors.others(trained).items():
        store(EXTRA + name, layout.local_spans(parameter), trained=False)
    for name, buffer in tensors.buffers().items():
        tensor = logical_tensor(tensors.model_name(name), buffer, Role.BUFFER)
        found[tensor.name], stored[EXTRA + name] = own(tensor), (whole(tensor),)
    return LogicalIndex(found, stored, tensors.aliases())


def of_this_stage(engine: Any) -> Callable[[LogicalTensor], LogicalTensor]:
    """Marks the tensors of tied layers that each stage of a pipeline has for itself."""
    if not isinstance(engine, PipelineEngine):
        return lambda tensor: tensor
    tied = {f"tied_modules.{key}.": each["weight_attr"] for key, each in engine.module.tied_comms.items()}
    stage = f"pipeline stage {engine.stage_id} of {engine.num_stages}"

    def mark(tensor: LogicalTensor) -> LogicalTensor:
        for prefix, weights in tied.items():
            if tensor.name.startswith(prefix) and tensor.name.removeprefix(prefix) not in weights:
                return structs.replace(tensor, slice_name=", ".join(filter(None, (tensor.slice_name, stage))))
        return tensor

    return mark


@dataclass(frozen=True)
class Parallel:
    """This rank's place among those that hold slices of the same parameters."""

    rank: int
    size: int

    @classmethod
    def of(cls, engine: Any) -> Parallel:
        if isinstance(engine, PipelineEngine):
            return cls(engine.grid.get_slice_parallel_rank(), engine.grid.get_slice_parallel_world_size())
        if engine.autotp_size() > 1:
            return cls(groups.get_tensor_model_parallel_rank(), engine.autotp_size())
        if engine.mpu is not None and engine.mp_world_size > 1:
            return cls(engine.mpu.get_model_parallel_rank(), engine.mp_world_size)
        return cls(0, 1)

    def known(self, name: str, parameter: torch.Tensor, *, trained: bool) -> Known:
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        dtype = dtype_name(parameter, name)
        told = getattr(parameter, CUT, None) or {}
        if self.size > 1 and (block := self._block(name, shape, told)) is not None:
            return Known(LogicalTensor(name, dtype, tuple(told["logical_shape"]), trained=trained), block)
        cut = is_model_parallel_parameter(parameter) or (told and not told.get("replicated"))
        slice_name = f"tensor parallel {self.rank} of {self.size}" if self.size > 1 and cut else ""
        return Known(LogicalTensor(name, dtype, shape, trained=trained, slice_name=slice_name))

    def _block(self, name: str, shape: Shape, told: Mapping[str, Any]) -> Block | None:
        """The rank's part of a parameter, if DeepSpeed has cut it along one dimension in one piece a rank."""
        axis, sizes, all_of_it = map(told.get, ("partition_dim", "partition_sizes", "logical_shape"))
        in_parts = told.get("sub_param_sizes") or told.get("sub_param_shard_widths")
        if axis is None or not sizes or not all_of_it or in_parts:
            return None
        offsets = tuple(sum(sizes[: self.rank]) if i == axis else 0 for i in range(len(all_of_it)))
        cut = tuple(sizes[self.rank] if i == axis else size for i, size in enumerate(all_of_it))
        return Block(name, offsets, shape) if cut == shape and sum(sizes) == all_of_it[axis] else None

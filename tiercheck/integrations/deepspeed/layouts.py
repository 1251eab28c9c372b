"""How each of DeepSpeed's optimizer wrappers lays out the tensors its inner optimizer updates.

DeepSpeed trains through a plain ``torch.optim.Optimizer`` (the *inner* optimizer) whose parameters it has
replaced by full-precision masters: whole parameters, flattened groups, or this rank's partition of them
(ZeRO: Rajbhandari et al., 2020, section 5). A :class:`MasterLayout` names these masters, says which of them one
iteration's calls of the inner ``step`` update, and rebuilds the low-precision parameters from them.

=============================== =========================== =============================================
wrapper                         names of the masters        calls of the inner ``step`` per iteration
=============================== =========================== =============================================
none (stage 0, fp32)            the module's own            one
``FP16_UnfusedOptimizer``       the module's own            one (stage 0, bf16 or fp16)
``FP16_Optimizer``              ``group{i}.flat``           one (the same, DeepSpeed's fused kernels)
``BF16_Optimizer``              ``group{i}.partition``      one (stage 1, bf16, gradients kept in fp32)
``DeepSpeedZeroOptimizer``      ``group{i}.partition``      one per parameter group (stages 1 and 2)
``DeepSpeedZeroOptimizer_Stage3`` ``group{i}.subgroup{j}``  one per sub-group (stage 3; j counts over all)
=============================== =========================== =============================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from tiercheck.errors import UnsupportedSetup

__all__ = ["Master", "MasterLayout", "Span", "layout_of"]


@dataclass(frozen=True)
class Master:
    """A tensor that the inner optimizer updates: the very object that keys its state."""

    name: str
    tensor: torch.Tensor
    group: int


class Span(NamedTuple):
    """Consecutive elements of a master: those of a parameter of the module, flattened, or padding."""

    parameter: torch.Tensor | None
    start: int
    length: int

    @classmethod
    def whole(cls, parameter: torch.Tensor) -> Span:
        return cls(parameter, 0, parameter.numel())

    @classmethod
    def padding(cls, length: int) -> Span:
        return cls(None, 0, length)


class MasterLayout(ABC):
    """The masters of one engine. Looks everything up anew: DeepSpeed replaces objects when it loads."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._wrapper = engine.optimizer

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Per master, the inner optimizer's tensors for it, live, and values."""
        states = self.inner.state
        return {
            master.name: {
                key: value.detach() if isinstance(value, torch.Tensor) else value
                for key, value in states[master.tensor].items()
            }
            for master in self.masters()
            if states.get(master.tensor)
        }

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer whose step hooks see every update, and that a replay calls."""
        optimizer = getattr(self._wrapper, "optimizer", self._wrapper)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer

    @abstractmethod
    def masters(self) -> list[Master]:
        """This rank's masters, in the order in which an iteration updates them."""

    @abstractmethod
    def trained(self) -> Sequence[Sequence[torch.Tensor]]:
        """Per parameter group, the module's parameters that the masters stand for."""

    @abstractmethod
    def refresh(self) -> None:
        """Rebuild the module's parameters from the masters. Collective."""

    @abstractmethod
    def spans(self) -> list[list[Span]]:
        """What each of :meth:`masters` consists of, in the order of its elements."""

    def local_spans(self, parameter: torch.Tensor) -> list[Span]:
        """The same of :meth:`local_part`."""
        return [Span.whole(parameter)]

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the inner optimizer, inside its hooks too."""
        return self.inner.param_groups

    def calls(self) -> list[list[Master]]:
        """The masters that each call of the inner ``step`` updates, in order."""
        return [self.masters()]

    @contextmanager
    def narrowed(self, call: list[Master]) -> Iterator[None]:
        """Show the inner optimizer only the masters of this call, as DeepSpeed does around its own."""
        yield

    def local_part(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a parameter that no optimizer updates, live."""
        return parameter.detach()

    def gradient_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The masters, each with the gradient that it has between steps: with offload, DeepSpeed copies what comes into
        one that stays for good."""
        wrapper = self._wrapper
        stays = getattr(wrapper, "cpu_offload", False) or getattr(wrapper, "offload_optimizer", False)
        return [(each.tensor, each.tensor.grad if stays else None) for each in self.masters()]

    def forget_state_links(self) -> None:
        """Have DeepSpeed look up the optimizer's tensors again, after some of them were replaced."""
        if hasattr(self._wrapper, "_hp_optimizer_states_linked"):
            self._wrapper._hp_optimizer_states_linked = False

    def _whole_parameters(self) -> list[list[Span]]:
        """Of a layout with one master for each parameter."""
        return [[Span.whole(parameter)] for parameter in chain.from_iterable(self.trained())]

    def _partitions(self, flats: Sequence[torch.Tensor]) -> list[list[Span]]:
        """Of a layout with one partition for each group. ``flats``: by group, the flat buffer that is partitioned.

        The parameters are views of it, and that tells where they lie, in whatever order and with whatever gaps. (What
        DeepSpeed keeps of it for its own checkpoints is wrong if ``round_robin_gradients`` is set.)
        """
        ranks = map(torch.distributed.get_rank, self._wrapper.real_dp_process_group)
        parts = zip(self.masters(), flats, self.trained(), ranks, strict=True)
        return [partition(flat, parameters, rank, master.tensor.numel()) for master, flat, parameters, rank in parts]

    def _named(self, parameter: torch.Tensor, otherwise: str) -> str:
        return str(self._engine.param_names.get(parameter, otherwise))


class WholeParameters(MasterLayout):
    """Stage 0 in fp32: the module's parameters are the masters."""

    def masters(self) -> list[Master]:
        return [
            Master(self._named(parameter, f"group{group}.parameter{index}"), parameter, group)
            for group, options in enumerate(self.groups())
            for index, parameter in enumerate(options["params"])
        ]

    def trained(self) -> Sequence[Sequence[torch.Tensor]]:
        return [options["params"] for options in self.groups()]

    def spans(self) -> list[list[Span]]:
        return self._whole_parameters()

    def refresh(self) -> None:
        """Nothing derives from the parameters."""


class WholeCopies(MasterLayout):
    """Stage 0 in bf16 or fp16 with a torch optimizer: one full-precision copy of each parameter."""

    def masters(self) -> list[Master]:
        return [
            Master(self._named(low, f"group{group}.parameter{index}"), master, group)
            for group, (lows, masters) in enumerate(
                zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True)
            )
            for index, (low, master) in enumerate(zip(lows, masters, strict=True))
        ]

    def trained(self) -> Sequence[Sequence[torch.Tensor]]:
        return list(self._wrapper.fp16_groups)

    def spans(self) -> list[list[Span]]:
        return self._whole_parameters()

    def refresh(self) -> None:
        for lows, masters in zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True):
            for low, master in zip(lows, masters, strict=True):
                low.data.copy_(master.data)


class FlatCopies(MasterLayout):
    """Stage 0 in bf16 or fp16 with DeepSpeed's fused optimizers: one flat full-precision copy of each group."""

    def masters(self) -> list[Master]:
        return [Master(f"group{group}.flat", flat, group) for group, flat in enumerate(self._wrapper.fp32_groups_flat)]

    def trained(self) -> Sequence[Sequence[torch.Tensor]]:
        return list(self._wrapper.fp16_groups)

    def spans(self) -> list[list[Span]]:
        return [[Span.whole(parameter) for parameter in parameters] for parameters in self.trained()]

    def refresh(self) -> None:
        for lows, flat in zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups_flat, strict=True):
            offset = 0
            for low in lows:
                low.data.copy_(flat.data[offset : offset + low.numel()].view_as(low))
                offset += low.numel()


class AccumulatedPartitions(MasterLayout):
    """Stage 1 in bf16 with gradients accumulated apart: a partition of each group, stepped at once."""

    def masters(self) -> list[Master]:
        partitions = self._wrapper.fp32_groups_flat_partition
        return [Master(f"group{group}.partition", partition, group) for group, partition in enumerate(partitions)]

    def trained(self) -> Sequence[Sequence[torch.Tensor]]:
        return list(self._wrapper.bf16_groups)

    def spans(self) -> list[list[Span]]:
        return self._partitions(self._wrapper.bf16_groups_flat)

    def refresh(self) -> None:
        self._wrapper.update_lp_params()


class Partitions(MasterLayout):
    """Stages 1 and 2: a partition of each group, and one call of the inner ``step`` per group."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._groups = list(self.inner.param_groups)
        if len(self._groups) != len(self.masters()):
            raise UnsupportedSetup(
                f"DeepSpeed has {len(self.masters())} partitions for the {len(self._groups)} parameter groups of "
                f"{type(self.inner).__name__}; supported is one partition a group (with Adagrad: one group)"
            )

    def masters(self) -> list[Master]:
        partitions = self._wrapper.single_partition_of_fp32_groups
        return [Master(f"group{group}.partition", partition, group) for group, partition in enumerate(partitions)]

    def trained(self) -> Sequence[Sequence[torch.Tensor]]:
        return list(self._wrapper.bit16_groups)

    def spans(self) -> list[list[Span]]:
        return self._partitions(self._wrapper.bit16_groups_flat)

    def refresh(self) -> None:
        self._wrapper.update_lp_params()

    def groups(self) -> list[dict[str, Any]]:
        current = self.inner.param_groups
        masters = self.masters()
        if len(current) == len(masters):
            self._groups = list(current)
        else:  # inside step(), which shows the inner optimizer one group at a time
            index = {id(master.tensor): master.group for master in masters}
            for options in current:
                self._groups[index[id(options["params"][0])]] = options
        return self._groups

    def calls(self) -> list[list[Master]]:
        return [[master] for master in self.masters()]

    @contextmanager
    def narrowed(self, call: list[Master]) -> Iterator[None]:
        every = self.inner.param_groups
        self.inner.param_groups = [every[master.group] for master in call]
        try:
            yield
        finally:
            self.inner.param_groups = every


class SubGroups(MasterLayout):
    """Stage 3: every parameter is partitioned, the partitions are joined into sub-groups, one call for each."""

    def masters(self) -> list[Master]:
        group_of = self._wrapper.sub_group_to_group_id
        return [
            Master(f"group{group_of[index]}.subgroup{index}", flat, group_of[index])
            for index, flat in enumerate(self._wrapper.fp32_partitioned_groups_flat)
        ]

    def trained(self) -> Sequence[Sequence[torch.Tensor]]:
        return list(self._wrapper.fp16_groups)

    def spans(self) -> list[list[Span]]:
        return [[*chain.from_iterable(map(self.local_spans, parameters))] for parameters in self.trained()]

    def refresh(self) -> None:
        self._wrapper.checkpoint_event_prologue()
        for index in range(len(self._wrapper.fp16_groups)):
            self._wrapper._reassign_or_swap_out_partitioned_parameters(index)
        self._wrapper.checkpoint_event_epilogue()

    def calls(self) -> list[list[Master]]:
        return [[master] for master in self.masters()]

    @contextmanager
    def narrowed(self, call: list[Master]) -> Iterator[None]:
        for master in call:
            self.inner.param_groups[master.group]["params"] = [master.tensor]
        try:
            yield
        finally:
            for master in call:
                self.inner.param_groups[master.group]["params"] = []

    def local_part(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.ds_tensor.detach()  # type: ignore[attr-defined,no-any-return]  # DeepSpeed's

    def local_spans(self, parameter: Any) -> list[Span]:
        """The rank's partition of the parameter; the last ones may end in padding."""
        elements, each = int(parameter.ds_numel), int(parameter.partition_numel())
        start = min(elements, each * torch.distributed.get_rank(parameter.ds_process_group))
        length = min(each, elements - start)
        return [Span(parameter, start, length), *([Span.padding(each - length)] if length < each else [])]


def partition(flat: torch.Tensor, parameters: Sequence[torch.Tensor], rank: int, length: int) -> list[Span]:
    """What lies in the ``rank``-th part, of ``length`` elements, of a flat buffer of which the parameters are views.
    Errors: ``UnsupportedSetup`` if one is no view of it."""
    first = rank * length
    found: list[tuple[int, Span]] = []
    for parameter in parameters:
        offset, within = divmod(parameter.data_ptr() - flat.data_ptr(), flat.element_size())
        if within or not 0 <= offset <= flat.numel() - parameter.numel():
            raise UnsupportedSetup("a parameter lies outside of the buffer that DeepSpeed has flattened it into")
        start, stop = max(offset, first), min(offset + parameter.numel(), first + length)
        if start < stop:
            found.append((start - first, Span(parameter, start - offset, stop - start)))
    spans: list[Span] = []
    filled = 0
    for start, span in sorted(found, key=itemgetter(0)):
        spans += [Span.padding(start - filled)] * (start > filled) + [span]
        filled = start + span.length
    return spans + [Span.padding(length - filled)] * (filled < length)


_LAYOUTS: dict[type, type[MasterLayout]] = {
    FP16_UnfusedOptimizer: WholeCopies,
    FP16_Optimizer: FlatCopies,
    BF16_Optimizer: AccumulatedPartitions,
    DeepSpeedZeroOptimizer: Partitions,
    DeepSpeedZeroOptimizer_Stage3: SubGroups,
}


def layout_of(engine: Any) -> MasterLayout:
    """The layout of an engine's state.

    Errors: ``UnsupportedSetup`` for a wrapper that is not in the table above, a subclass of one included,
    since what it adds would not be saved.
    """
    wrapper = engine.optimizer
    layout = _LAYOUTS.get(type(wrapper))
    if layout is None:
        if not isinstance(wrapper, torch.optim.Optimizer):
            supported = ", ".join(each.__name__ for each in _LAYOUTS)
            raise UnsupportedSetup(
                f"the engine trains through {type(wrapper).__module__}.{type(wrapper).__qualname__}; "
                f"supported are a torch optimizer and DeepSpeed's {supported}"
            )
        layout = WholeParameters
    inner = getattr(wrapper, "optimizer", wrapper)
    if not isinstance(inner, torch.optim.Optimizer):
        raise UnsupportedSetup(
            f"the optimizer is a {type(inner).__module__}.{type(inner).__qualname__}; supported are subclasses of "
            "torch.optim.Optimizer, whose state and step hooks can be reached"
        )
    return layout(engine)

"""One rank's part of a pipeline, for the case that a stage is lost with every copy of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tiercheck import kernels
from tiercheck.errors import RecoveryError, UnsupportedSetup
from tiercheck.format.index.boxes import Copy
from tiercheck.format.index.logical import MASTER, LogicalIndex, Padding, Shape
from tiercheck.streams.optimizers.registry import find_optimizer
from tiercheck.streams.stage import STATE, Moments, StagePlace
from tiercheck.streams.tensors.as_bytes import array_of
from tiercheck.streams.tensors.provider import StateProvider, extras_of
from tiercheck.streams.tensors.storable import to_plain

__all__ = ["GradientNorms", "PipelineStage", "TensorStage"]

NORMS = "gradient_norms"
"""In a version's host state: by layer, the sum of the squares of what the rank held of the step's gradient."""
NOT_KNOWN = math.nan
STATE_LIKE = {"deepspeed.ops.adam.fused_adam.FusedAdam": "torch.optim.adamw.AdamW"}
"""Optimizers that no kernel replays, and those that are declared and keep the same state, under the same names."""


@dataclass(frozen=True)
class PipelineStage:
    """What an integration says of the rank's stage. Fields: as of :class:`~tiercheck.streams.stage.StagePlace`."""

    stage: int
    stages: int
    copies: int | None
    layers: Mapping[str, Mapping[str, Shape]]
    tied: Collection[str]
    scheduled: bool


class TensorStage:
    """See :class:`~tiercheck.streams.stage.StageState`. Of the stage of a provider."""

    def __init__(self, provider: StateProvider, stage: PipelineStage) -> None:
        self._provider = provider
        self._stage = stage
        self._expected: dict[str, dict[str, Any]] = {}
        """By master, the optimizer's state that comes from another rank."""

    @property
    def place(self) -> StagePlace:
        each = self._stage
        layers = tuple((name, tuple(parameters.items())) for name, parameters in each.layers.items())
        kept = tuple(sorted(extras_of(self._provider)))
        tied = tuple(sorted(each.tied))
        return StagePlace(each.stage, each.stages, each.copies, layers, tied, each.scheduled, kept)

    def index(self) -> LogicalIndex:
        found = self._provider.index()
        stored = {name: pieces for name, pieces in found.stored.items() if name.startswith(MASTER)}
        held = {piece.tensor for pieces in stored.values() for piece in pieces if not isinstance(piece, Padding)}
        return LogicalIndex({name: each for name, each in found.tensors.items() if name in held}, stored)

    def norms(self, host_state: Mapping[str, Any]) -> Sequence[float | None]:
        known = host_state.get(NORMS, {})
        found = [known.get(layer, NOT_KNOWN) for layer in self._stage.layers]
        return [each if isinstance(each, float) and math.isfinite(each) else None for each in found]

    def clear(self, stored: Collection[str]) -> None:
        masters = self._provider.masters()
        with torch.no_grad():
            for name in stored:
                masters[name.removeprefix(MASTER)].zero_()

    def optimizer(self, stored: str) -> Mapping[str, Any]:
        held = self._provider.optimizer_state().get(stored.removeprefix(MASTER), {})
        if odd := [key for key, each in held.items() if is_tensor(each) and each.dtype is not torch.float32]:
            raise UnsupportedSetup(f"the optimizer's {odd[0]} of {stored} is {held[odd[0]].dtype}, not fp32")
        return {key: list(each.shape) if is_tensor(each) else to_plain(each, key) for key, each in held.items()}

    def moments(self) -> Mapping[str, Moments]:
        provider = self._provider
        kind = provider.identity().optimizer.kind
        declared = find_optimizer(STATE_LIKE.get(kind, kind))
        options, group_of, states = provider.hyperparameters(), provider.group_of(), provider.optimizer_state()
        found: dict[str, Moments] = {}
        for name in provider.masters():
            betas = declared.moments(options[group_of[name]]) if declared else {}
            if declared is None or declared.counter is None or not betas:
                raise RecoveryError(
                    f"LostStage(moments='averaged') needs an optimizer whose moments are known (Adam or AdamW, without "
                    f"amsgrad), and this one is {kind}: leave it out, and the optimizer's state begins anew"
                )
            steps = int(states.get(name, {}).get(declared.counter, 0))
            found[MASTER + name] = Moments(steps, betas, self.optimizer(MASTER + name))
        return found

    def expect_optimizer(self, stored: str, told: Mapping[str, Any], like_master: Collection[str] = ()) -> None:
        name = stored.removeprefix(MASTER)
        shape = self._provider.masters()[name].shape
        self._expected[name] = {
            key: torch.zeros(shape if key in like_master else each) if isinstance(each, list) else each
            for key, each in told.items()
        }

    def finish(self) -> None:
        provider, expected = self._provider, self._expected
        self._expected = {}
        if expected:
            provider.load(
                masters=provider.masters(),
                optimizer_state={**provider.optimizer_state(), **expected},
                extras=extras_of(provider),
                hyperparameters=provider.hyperparameters(),
            )

    def read(self, stored: str, copy: Copy) -> bytes:
        elements = self._view(stored, copy.lengths, copy.source_start, copy.source_strides)
        return bytes(elements.to("cpu", torch.float32).contiguous().view(-1).view(torch.uint8).numpy().data)

    def add(self, stored: str, copy: Copy, elements: bytes, weight: float) -> None:
        target = self._view(stored, copy.lengths, copy.target_start, copy.target_strides)
        total = target.to("cpu", torch.float32).contiguous()
        kernels.accumulate(np.frombuffer(elements, np.float32), weight, array_of(total).reshape(-1), threads=1)
        if total.data_ptr() != target.data_ptr():
            with torch.no_grad():
                target.copy_(total)

    def _view(self, stored: str, lengths: Shape, start: int, strides: Shape) -> torch.Tensor:
        """Errors: ``UnsupportedSetup`` for a master whose elements are not in their order."""
        master = self._tensor(stored)
        if not master.is_contiguous():
            raise UnsupportedSetup(f"the master {stored} is not contiguous, and cannot be made of other stages")
        return master.as_strided(lengths, strides, master.storage_offset() + start)

    def _tensor(self, stored: str) -> torch.Tensor:
        if not stored.startswith(STATE):
            return self._provider.masters()[stored.removeprefix(MASTER)]
        key, _, master = stored.removeprefix(STATE).partition("/")
        name = master.removeprefix(MASTER)
        states = self._expected if name in self._expected else self._provider.optimizer_state()
        tensor: torch.Tensor = states[name][key]
        return tensor


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class GradientNorms:
    """The gradient's norm by layer, measured in the step: one read of the rank's gradients, and nothing is copied. On a
    device nothing is waited for before a version is published. It is added up in fp32, which is within a percent.

    ``parts``: by master, the layers of which it holds elements, each with the first and the one behind the last.
    ``weights``: by master, by what its squares are multiplied, if not by 1.
    """

    def __init__(
        self,
        layers: Iterable[str],
        parts: Mapping[str, Sequence[tuple[str, int, int]]],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._parts = parts
        self._weights = weights or {}
        self._squares: dict[str, list[tuple[str, torch.Tensor]]] = {}
        """By master, of the last step that visited it, where the gradient is."""
        self._known = dict.fromkeys(layers, NOT_KNOWN)

    def measure(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of a step, or of a part of it."""
        for name, gradient in gradients.items():
            flat = gradient.reshape(-1)
            parts = [(layer, flat[start:stop]) for layer, start, stop in self._parts.get(name, ())]
            self._squares[name] = [(layer, square_of(part)) for layer, part in parts]

    def host_state(self) -> dict[str, Any]:
        """What a version says of its last step; of a layer that has not been stepped yet, no number."""
        if squares := [(name, *each) for name, found in self._squares.items() for each in found]:
            self._known = dict.fromkeys(self._known, 0.0)
            values = torch.stack([each for *_, each in squares]).tolist()  # the device is waited for once
            for (name, layer, _), square in zip(squares, values, strict=True):
                self._known[layer] += square * self._weights.get(name, 1.0)
        return {NORMS: dict(self._known)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what a version's host state says, as far as it is of this stage's layers."""
        known = state.get(NORMS, {})
        self._squares = {}
        self._known = {layer: known.get(layer, NOT_KNOWN) for layer in self._known}


def square_of(elements: torch.Tensor) -> torch.Tensor:
    """The square of their norm."""
    if elements.dtype is torch.float32:
        return torch.dot(elements, elements)
    norm: torch.Tensor = torch.linalg.vector_norm(elements, dtype=torch.float32)
    return norm.square()


def runs_of(layers: Iterable[tuple[str | None, int]]) -> Iterator[tuple[str, int, int]]:
    """The rows of elements of one layer each, from consecutive spans: their layer (``None``: padding) and length."""
    start, begun, current = 0, 0, None
    for layer, length in [*layers, (None, 0)]:
        if layer != current:
            if current is not None:
                yield current, begun, start
            begun, current = start, layer
        start += length

"""Which form replays which optimizer, bit for bit unless said otherwise, and running it on one or more threads."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tiercheck.errors import ConfigurationError
from tiercheck.kernels import widened
from tiercheck.kernels.gradients import Gradient, HalfGradient, SparseGradient, check_gradients, check_state
from tiercheck.kernels.threads import run, split
from tiercheck.streams.optimizers.optimizer import Array, Form, Function, ReplayableOptimizer, State
from tiercheck.streams.optimizers.registry import find_optimizer

__all__ = ["Replay", "Setting", "flushes_denormals", "is_ready", "replay_for"]

logger = logging.getLogger(__name__)

SMALLEST = 5e-324
WIDENED = 8 * 32704
"""Elements: 1 MiB of fp32 for each step, and whole tiles of :mod:`tiercheck.kernels.torch_tiles`."""

_ready: set[tuple[str, Setting]] = set()
"""For which optimizers' kinds, running how, :func:`replay_for` has found a form in this process."""


@dataclass(frozen=True)
class Setting:
    """How an optimizer runs: what rounds its steps."""

    implementation: str
    torch_version: str
    instruction_set: str
    device: str


@dataclass(frozen=True)
class Replay:
    """A form that applies an optimizer's steps as that optimizer would: bit for bit where ``exact``."""

    name: str
    optimizer: ReplayableOptimizer[Any]
    implementation: str
    function: Function
    exact: bool = True

    def __call__(
        self,
        param: Array,
        state: State,
        gradients: Sequence[Gradient | HalfGradient],
        steps: Sequence[Any],
        *,
        threads: int = 1,
    ) -> None:
        """Apply ``steps`` with ``gradients`` (one each, in temporal order) to the state, in place.

        All arrays are fp32, contiguous, of one size (any shape), and one whole tensor each: an implementation may round
        the end of every tensor otherwise. A gradient may be a :class:`SparseGradient`, whose indices count the
        tensor's elements; the step is the one with the dense gradient, which moves every element. One in half precision
        is widened :data:`WIDENED` elements at a time, which stay in the processor's caches. ``state`` has the
        arrays that the steps need, and no others. A step that was skipped, or in which this tensor had no gradient, is
        left out by the caller. At most ``threads`` threads run, the caller's included.

        Raises:
            ConfigurationError: the arrays cannot be worked on, or the form cannot take such steps; nothing was
                touched.
        """
        if threads < 1:
            raise ConfigurationError(f"a replay needs at least one thread, not {threads}")
        arrays = {"param": param, **state}
        self._check(arrays, gradients, steps)
        flat = {name: array.reshape(-1) for name, array in arrays.items()}

        halves = [index for index, each in enumerate(gradients) if isinstance(each, HalfGradient)]

        def apply(piece: slice) -> None:
            # Used again for each part: fresh memory takes longer to fill than the step takes.
            room = min(WIDENED, piece.stop - piece.start)
            rooms = {index: np.empty(room, np.float32) for index in halves}
            for part in parts_of(piece, WIDENED) if rooms else (piece,):
                parts = {name: array[part] for name, array in flat.items()}
                pieces = [piece_of(each, part, rooms.get(index)) for index, each in enumerate(gradients)]
                with np.errstate(all="ignore"):
                    self.function(parts.pop("param"), parts, pieces, steps)

        run(apply, split(param.size, threads))

    def _check(
        self, arrays: Mapping[str, Array], gradients: Sequence[Gradient | HalfGradient], steps: Sequence[Any]
    ) -> None:
        needed = {self.optimizer.needs(step) for step in steps}
        if len(needed) > 1:
            raise ConfigurationError("the steps of one replay all need the same state")
        if needed and next(iter(needed)) != tuple(name for name in arrays if name != "param"):
            raise ConfigurationError(
                f"these steps need the state {', '.join(next(iter(needed))) or 'of nothing but the parameter'}, and no "
                f"other; given are {', '.join(arrays)}"
            )
        if len(gradients) != len(steps):
            raise ConfigurationError(f"a replay needs a gradient a step, not {len(gradients)} for {len(steps)} steps")
        check_state(arrays)
        check_gradients(arrays, gradients)


def parts_of(piece: slice, size: int) -> Iterator[slice]:
    """The piece in parts of ``size`` elements, and what is left: only the last part of an array ends in a partial
    vector."""
    for start in range(piece.start, piece.stop, size):
        yield slice(start, min(start + size, piece.stop))


def piece_of(gradient: Gradient | HalfGradient, piece: slice, room: Array | None) -> Gradient:
    """``room``: for a gradient in half precision, memory of at least the piece's length."""
    if isinstance(gradient, HalfGradient):
        part = gradient.piece(piece.start, piece.stop)
        return widened(part, None if room is None else room[: part.size])
    if isinstance(gradient, SparseGradient):
        return gradient.piece(piece.start, piece.stop)
    return gradient.reshape(-1)[piece]


def replay_for(
    optimizer: ReplayableOptimizer[Any] | str, setting: Setting, *, choose: str | None = None, exact: bool = True
) -> Replay | None:
    """The form that replays this optimizer bit for bit, or ``None``: nobody can, call the optimizer.

    A form must declare the support, the setting must be that of the torch in this process (another version, or another
    instruction set, rounds otherwise), and the form is certified by experiment, once a process: it must get the very
    bits of the optimizer on small problems, dense and sparse.

    ``optimizer``: may be given by its kind. ``choose`` names the form. ``exact=False`` asks for its approximation
    instead, whatever the setting, which is worth having for sparse gradients alone.

    Raises:
        ConfigurationError: the form chosen by name, or the approximation, cannot be had; the message says why.
    """
    found = find_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
    if found is None:
        return None
    if not exact:
        return approximation_of(found, setting.implementation, choose)
    if choose is not None and choose not in [each.name for each in found.forms]:
        names = ", ".join(each.name for each in found.forms)
        raise ConfigurationError(f"there is no replay kernel {choose!r}: choose one of {names}")
    for form in found.forms:
        wanted = form.automatic and setting.implementation in form.implementations
        if form.name == choose or (choose is None and wanted):
            reason = why_not(form, found, setting)
            if reason is None:
                function = function_of(form, setting.implementation, setting.instruction_set)
                _ready.add((found.kind, setting))
                return Replay(form.name, found, setting.implementation, function)
            if choose is not None:
                raise ConfigurationError(f"the replay kernel {choose!r} cannot be had: {reason}")
            logger.info("the replay kernel %s is passed over: %s", form.name, reason)
    return None


def is_ready(kind: str, setting: Setting) -> bool:
    """Whether :func:`replay_for` has found a form before, so that it answers at once."""
    return (kind, setting) in _ready


def approximation_of(optimizer: ReplayableOptimizer[Any], implementation: str, choose: str | None) -> Replay:
    found = optimizer.approximation()
    if found is None:
        raise ConfigurationError(f"{optimizer.kind} has no form that is not exact")
    name, function = found
    if choose not in (None, name):
        raise ConfigurationError(f"{choose!r} is exact; the one that is not is {name!r}")
    return Replay(name, optimizer, implementation, function, exact=False)


def unsupported(form: Form, setting: Setting) -> str | None:
    """Why the form does not stand for an optimizer that runs so, by its own declaration; ``None`` if it may."""
    if setting.implementation not in form.implementations:
        return (
            f"it replays the implementations {', '.join(sorted(form.implementations))}, not {setting.implementation!r}"
        )
    if setting.device != "cpu":
        return f"it replays what ran on cpu, not {setting.device!r}"
    if form.instruction_sets is not None and setting.instruction_set not in form.instruction_sets:
        return f"how torch rounds on {setting.instruction_set} is not known"
    for module in (form.needs, "torch"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    return None


def why_not(form: Form, optimizer: ReplayableOptimizer[Any], setting: Setting) -> str | None:
    """Why the form does not replay this optimizer in this process, or ``None``: it was certified."""
    if reason := unsupported(form, setting):
        return reason
    from tiercheck.streams.optimizers import certification

    if (setting.torch_version, setting.instruction_set) != certification.environment():
        running = " on ".join(certification.environment())
        return (
            f"the steps ran under torch {setting.torch_version} on {setting.instruction_set}, and this process runs "
            f"{running}"
        )
    if flushes_denormals():
        return "this thread flushes denormals to zero, and which ones torch flushed depends on its threads"
    function = function_of(form, setting.implementation, setting.instruction_set)
    differing = certification.differing_elements(function, optimizer, setting.implementation)
    return f"{differing} values of its self-test differ from the optimizer's own" if differing else None


@cache
def function_of(form: Form, implementation: str, instruction_set: str) -> Function:
    """The form's function; cached, so that each is certified once."""
    return form.make(implementation, instruction_set)


def flushes_denormals() -> bool:
    """Whether the CPU takes denormals for zero in this thread (``torch.set_flush_denormal``, or a library on load)."""
    return SMALLEST * 1.0 == 0.0

"""What a replayable optimizer says of itself, and the forms in which its steps can be replayed."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError
from tiercheck.kernels.gpu_adam import Powers
from tiercheck.kernels.gradients import Gradient
from tiercheck.streams.tensors.group_options import numpy_options, tensor_options

__all__ = [
    "FUSED",
    "SEPARATE",
    "X86",
    "Array",
    "Candidate",
    "Form",
    "Function",
    "OnDevice",
    "ReplayableOptimizer",
    "State",
    "Trial",
]

Array: TypeAlias = NDArray[np.float32]
State: TypeAlias = Mapping[str, Array]
"""By name, what the optimizer keeps for one parameter: arrays of the parameter's size."""

S = TypeVar("S")
"""The scalars of one step."""

Function: TypeAlias = Callable[[Array, State, Sequence[Gradient], Sequence[Any]], None]
"""``function(param, state, gradients, steps)`` applies the steps in order, in place. All arrays are 1-D, fp32,
contiguous and of one size. A gradient may be a :class:`~tiercheck.kernels.SparseGradient`."""

OnDevice: TypeAlias = Callable[..., None]
"""``function(param, state, gradients, steps, stream=stream)``: the same on device arrays, put into a stream."""

FUSED = frozenset({"fused"})
SEPARATE = frozenset({"single_tensor", "foreach"})
"""How torch's own optimizers run on a CPU. Any other runs as ``single_tensor``."""
X86 = frozenset({"AVX2", "AVX512", "DEFAULT"})
"""The instruction sets of torch's x86 builds."""


@dataclass(frozen=True)
class Form:
    """One way to replay. It is used only after it has got the optimizer's very bits in this process."""

    name: str
    make: Callable[[str, str], Function]
    """``make(implementation, instruction_set)``: the function. What it needs is imported here."""
    implementations: frozenset[str] = SEPARATE
    """Which implementations of the optimizer it stands for."""
    instruction_sets: frozenset[str] | None = None
    """Under which instruction sets of torch's; ``None``: under any."""
    needs: str = "numpy"
    """A module that must be installed."""
    automatic: bool = True
    """Whether it is ever chosen without being named."""


@dataclass(frozen=True)
class Candidate:
    """One way in which an optimizer that steps on a GPU may round. Which one it follows, if any, is found by experiment
    on the device (:mod:`tiercheck.streams.optimizers.stand_in`)."""

    name: str
    implementations: frozenset[str]
    """Which implementations of the optimizer may follow it."""
    powers: type[np.float32] | type[np.float64] | None
    """In which type the device computes the powers of the optimizer's betas; ``None``: the host does."""
    on_host: Callable[[Powers], Function]
    """The kernel that replays on a processor, given the powers."""
    on_device: Callable[[Powers], OnDevice]
    """The kernel that replays on the GPU. Errors: ``ConfigurationError`` if what it needs is not installed."""


@dataclass(frozen=True, eq=False)
class Trial:
    """Steps that tell candidates apart, from a state that is planted: the optimizer's own first step is not in it."""

    options: Mapping[str, Any]
    count: int
    """The steps that the parameter has had."""
    held: Mapping[str, Array]
    """``param``, and the arrays of the state by name."""
    gradients: Sequence[Array]


@dataclass(frozen=True)
class ReplayableOptimizer(abc.ABC, Generic[S]):
    """One optimizer class whose steps kernels can take.

    It is a class registered under :attr:`kind` in the entry-point group ``tiercheck.optimizers``. Nothing it says is
    believed: before a form replays a step, it is certified by experiment against the optimizer itself, in this process,
    with the options of :meth:`variants`.
    """

    kind: ClassVar[str]
    """The optimizer's class by its qualified name, ``package.module.Class``; also the name of the entry point."""
    state: ClassVar[tuple[str, ...]]
    """The arrays that it may keep for a parameter, by their names in ``optimizer.state[parameter]``."""
    counter: ClassVar[str | None] = None
    """The tensor of its state that counts the parameter's steps, if there is one."""
    forms: ClassVar[tuple[Form, ...]]
    """The exact ones, in order of preference; the reference last."""
    candidates: ClassVar[tuple[Candidate, ...]] = ()
    """How it may round on a GPU, the likeliest first. Without any, only its own call replays what ran there."""

    @abc.abstractmethod
    def reason_not_replayable(self, options: Mapping[str, Any]) -> str | None:
        """Why steps with a parameter group's ``options`` must be replayed by calling the optimizer, or ``None``."""

    @abc.abstractmethod
    def step(self, options: Mapping[str, Any], count: int) -> S:
        """The scalars of the step that the optimizer takes with a parameter group's ``options``.

        ``count``: the number of the parameter's step, 1 for its first. An optimizer without a :attr:`counter` gets 1 or
        2: the first step, or a later one. Errors: ``ConfigurationError`` if the step cannot be replayed.
        """

    @abc.abstractmethod
    def variants(self) -> Iterator[dict[str, Any]]:
        """Keyword arguments of the class to certify with: every path that its step can take."""

    def why_called(self, options: Mapping[str, Any]) -> str | None:
        """As :meth:`reason_not_replayable`, which knows Python's numbers alone: with a tensor, or a number of NumPy's
        that is no float64, torch computes otherwise."""
        if tensors := tensor_options(options):
            return f"{tensors[0]} is a tensor"
        if others := numpy_options(options):
            return f"{others[0]} is a number of NumPy's, in another precision than Python's"
        return self.reason_not_replayable(options)

    def check_replayable(self, options: Mapping[str, Any]) -> None:
        """Errors: ``ConfigurationError`` if :meth:`why_called` has a reason."""
        if reason := self.why_called(options):
            raise ConfigurationError(f"this step cannot be replayed: {reason}; call the optimizer instead")

    def needs(self, step: S) -> tuple[str, ...]:
        """Which of :attr:`state` the step reads and writes, in that order."""
        return self.state

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        """Which of :attr:`state` are moments, and their betas, with a parameter group's ``options``. A moment starts at
        zero. Each step multiplies it by beta, and adds ``1 - beta`` times a number that does not depend on it. Empty:
        that is not known, or the optimizer keeps other arrays besides."""
        return {}

    def trials(self) -> Iterator[Trial]:
        """What tells the :attr:`candidates` apart. No two of them may give the same bits in all of it."""
        return iter(())

    def betas(self, options: Mapping[str, Any]) -> tuple[float, ...]:
        """Of which numbers the device computes powers for a step with these options."""
        return ()

    def arguments(self, implementation: str) -> dict[str, Any]:
        """Keyword arguments that make the optimizer's class run this implementation."""
        return {}

    def approximation(self) -> tuple[str, Function] | None:
        """The name and the function of a form that is not exact, and faster over sparse gradients, if there is one.

        Errors: ``ConfigurationError`` if it cannot be had here.
        """
        return None

"""Which kernel replays which optimizer bit for bit, and running it on one or more threads."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError
from tiercheck.kernels import reference
from tiercheck.kernels.adam import KINDS, AdamStep, check_arrays
from tiercheck.kernels.threads import run, split

__all__ = ["IMPLEMENTATIONS", "Implementation", "Replay", "supports"]

logger = logging.getLogger(__name__)

State = NDArray[np.float32]
Function = Callable[[State, State, State, Sequence[State], Sequence[AdamStep]], None]


@dataclass(frozen=True)
class Implementation:
    """What a replay kernel declares to support: ``implementations`` of torch's Adam and AdamW on CPU."""

    name: str
    module: str
    implementations: frozenset[str]
    instruction_sets: frozenset[str] | None
    automatic: bool
    """Whether it is ever chosen without being named."""


_FUSED = frozenset({"fused"})
_X86 = frozenset({"AVX2", "AVX512", "DEFAULT"})

_SEPARATE = frozenset({"single_tensor", "foreach"})

IMPLEMENTATIONS = (
    Implementation("numba", "numba", _FUSED, _X86, automatic=True),
    Implementation("numba_tiles", "numba", _SEPARATE, _X86, automatic=True),
    Implementation("torch_tiles", "torch", _SEPARATE, None, automatic=True),
    Implementation("reference", "numpy", _FUSED, _X86, automatic=False),
)
"""In order of preference."""


@dataclass(frozen=True)
class Replay:
    """A kernel that applies steps of one optimizer as that optimizer would, bit for bit."""

    name: str
    kind: str
    implementation: str
    function: Function

    def __call__(
        self,
        param: State,
        exp_avg: State,
        exp_avg_sq: State,
        gradients: Sequence[State],
        steps: Sequence[AdamStep],
        *,
        threads: int = 1,
    ) -> None:
        """Apply ``steps`` with ``gradients`` (one each, in temporal order) to the state, in place.

        All arrays are fp32, contiguous, of one size (any shape), and one whole tensor each: torch's fused kernel
        rounds the end of every tensor otherwise. A step that was skipped, or in which this tensor had no gradient,
        is left out by the caller. At most ``threads`` threads run, the caller's included.

        Raises:
            ConfigurationError: the arrays cannot be worked on; nothing was touched.
        """
        if threads < 1:
            raise ConfigurationError(f"a replay needs at least one thread, not {threads}")
        check_arrays(param, exp_avg, exp_avg_sq, gradients, steps)
        state = [array.reshape(-1) for array in (param, exp_avg, exp_avg_sq)]
        flat = [gradient.reshape(-1) for gradient in gradients]

        def apply(piece: slice) -> None:
            p, m, v = (array[piece] for array in state)
            self.function(p, m, v, [gradient[piece] for gradient in flat], steps)

        run(apply, split(param.size, threads))


def supports(
    *,
    kind: str,
    implementation: str,
    torch_version: str,
    instruction_set: str,
    device: str,
    choose: str | None = None,
) -> Replay | None:
    """The kernel that replays this optimizer bit for bit, or ``None``: nobody can, call the optimizer.

    A kernel must declare the support, the identity must be that of the torch in this process (another version, or
    another instruction set, rounds otherwise), and the kernel is certified by experiment, once a process: it must
    get the very bits of the torch optimizer on a small problem.

    ``choose`` names the kernel, one of :data:`IMPLEMENTATIONS`.

    Raises:
        ConfigurationError: the kernel chosen by name cannot be had; the message says why.
    """
    if choose is not None and choose not in [each.name for each in IMPLEMENTATIONS]:
        names = ", ".join(each.name for each in IMPLEMENTATIONS)
        raise ConfigurationError(f"there is no replay kernel {choose!r}: choose one of {names}")
    for each in IMPLEMENTATIONS:
        if each.name == choose or (choose is None and each.automatic and implementation in each.implementations):
            reason = why_not(each, kind, implementation, torch_version, instruction_set, device)
            if reason is None:
                return Replay(each.name, kind, implementation, function_of(each.name, instruction_set))
            if choose is not None:
                raise ConfigurationError(f"the replay kernel {choose!r} cannot be had: {reason}")
            logger.info("the replay kernel %s is passed over: %s", each.name, reason)
    return None


def why_not(
    each: Implementation, kind: str, implementation: str, torch_version: str, instruction_set: str, device: str
) -> str | None:
    if kind not in KINDS:
        return f"it replays {', '.join(KINDS)}, not {kind}"
    if implementation not in each.implementations:
        return f"it replays the implementations {', '.join(sorted(each.implementations))}, not {implementation!r}"
    if device != "cpu":
        return f"it replays what ran on cpu, not {device!r}"
    if each.instruction_sets is not None and instruction_set not in each.instruction_sets:
        return f"how torch rounds on {instruction_set} is not known"
    for module in (each.module, "torch"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    from tiercheck.kernels import torch_tiles

    if (torch_version, instruction_set) != torch_tiles.environment():
        running = " on ".join(torch_tiles.environment())
        return f"the steps ran under torch {torch_version} on {instruction_set}, and this process runs {running}"
    if flushes_denormals():
        return "this thread flushes denormals to zero, and which ones torch flushed depends on its threads"
    differing = torch_tiles.differing_elements(function_of(each.name, instruction_set), kind, implementation)
    return f"{differing} values of its self-test differ from torch's own" if differing else None


def flushes_denormals() -> bool:
    """Whether the CPU takes denormals for zero in this thread (``torch.set_flush_denormal``, or a library on load)."""
    smallest = np.full(1, 1e-45, np.float32)
    return bool((smallest * np.float32(1)).view(np.uint32)[0] == 0)


@cache
def function_of(name: str, instruction_set: str) -> Function:
    """The kernel; cached, so that each is certified once."""
    if name == "torch_tiles":
        from tiercheck.kernels.torch_tiles import replay_adam

        return replay_adam
    function: Callable[..., None] = reference.replay_fused_adam
    if name == "numba":
        from tiercheck.kernels import cpu

        function = cpu.replay_fused_adam
    elif name == "numba_tiles":
        from tiercheck.kernels.torch_tiles import replay_adam_with_numba

        function = replay_adam_with_numba
    return partial(function, contracted=instruction_set != "DEFAULT")

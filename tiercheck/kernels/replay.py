"""Which kernel replays which optimizer, bit for bit unless said otherwise, and running it on one or more threads."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError
from tiercheck.kernels.adam import KINDS, AdamStep, check_arrays
from tiercheck.kernels.gradients import Gradient, SparseGradient
from tiercheck.kernels.sgd import SGD, SgdStep, check_sgd_arrays
from tiercheck.kernels.threads import run, split

__all__ = ["IMPLEMENTATIONS", "Implementation", "Replay", "SgdReplay", "supports", "supports_sgd"]

logger = logging.getLogger(__name__)

State = NDArray[np.float32]
Function = Callable[..., None]
"""Of param, exp_avg, exp_avg_sq, gradients, steps, and ``max_exp_avg_sq`` by keyword; for SGD of param,
momentum_buffer, gradients and steps."""


@dataclass(frozen=True)
class Implementation:
    """What a replay kernel declares to support: ``implementations`` of torch's ``kinds`` on CPU."""

    name: str
    module: str
    kinds: frozenset[str]
    implementations: frozenset[str]
    instruction_sets: frozenset[str] | None
    automatic: bool
    """Whether it is ever chosen without being named."""


_FUSED = frozenset({"fused"})
_SEPARATE = frozenset({"single_tensor", "foreach"})
_X86 = frozenset({"AVX2", "AVX512", "DEFAULT"})
_ADAM = frozenset(KINDS)
_SGD = frozenset({SGD})

IMPLEMENTATIONS = (
    Implementation("numba", "numba", _ADAM, _FUSED, _X86, automatic=True),
    Implementation("numba_tiles", "numba", _ADAM, _SEPARATE, _X86, automatic=True),
    Implementation("torch_tiles", "torch", _ADAM, _SEPARATE, None, automatic=True),
    Implementation("reference", "numpy", _ADAM, _FUSED, _X86, automatic=False),
    Implementation("numba_sgd", "numba", _SGD, _SEPARATE | _FUSED, _X86, automatic=True),
    Implementation("reference_sgd", "numpy", _SGD, _SEPARATE | _FUSED, _X86, automatic=False),
)
"""The exact ones, in order of preference."""

CLOSED_FORM = "numba_closed_form"
"""The one that is not exact, and is had with ``exact=False`` alone."""


@dataclass(frozen=True)
class Replay:
    """A kernel that applies steps of Adam or AdamW as that optimizer would: bit for bit where ``exact``."""

    name: str
    kind: str
    implementation: str
    function: Function
    exact: bool = True

    def __call__(
        self,
        param: State,
        exp_avg: State,
        exp_avg_sq: State,
        gradients: Sequence[Gradient],
        steps: Sequence[AdamStep],
        *,
        threads: int = 1,
        max_exp_avg_sq: State | None = None,
    ) -> None:
        """Apply ``steps`` with ``gradients`` (one each, in temporal order) to the state, in place.

        All arrays are fp32, contiguous, of one size (any shape), and one whole tensor each: torch's fused kernel
        rounds the end of every tensor otherwise. A gradient may be a :class:`SparseGradient`, whose indices count the
        tensor's elements; the step is the one with the dense gradient, which moves every element.
        ``max_exp_avg_sq`` is given where the steps are amsgrad. A step that was skipped, or in which this tensor had no
        gradient, is left out by the caller. At most ``threads`` threads run, the caller's included.

        Raises:
            ConfigurationError: the arrays cannot be worked on, or the kernel cannot take such steps; nothing was
                touched.
        """
        if threads < 1:
            raise ConfigurationError(f"a replay needs at least one thread, not {threads}")
        state = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        if max_exp_avg_sq is not None:
            state["max_exp_avg_sq"] = max_exp_avg_sq
        check_arrays(state, gradients, steps)
        flat = {name: array.reshape(-1) for name, array in state.items()}

        def apply(piece: slice) -> None:
            parts = {name: array[piece] for name, array in flat.items()}
            largest = parts.pop("max_exp_avg_sq", None)
            self.function(*parts.values(), [piece_of(each, piece) for each in gradients], steps, max_exp_avg_sq=largest)

        run(apply, split(param.size, threads))


def piece_of(gradient: Gradient, piece: slice) -> Gradient:
    if isinstance(gradient, SparseGradient):
        return gradient.piece(piece.start, piece.stop)
    return gradient.reshape(-1)[piece]


@dataclass(frozen=True)
class SgdReplay:
    """A kernel that applies steps of SGD as torch would, bit for bit."""

    name: str
    implementation: str
    function: Function

    def __call__(
        self,
        param: State,
        momentum_buffer: State | None,
        gradients: Sequence[Gradient],
        steps: Sequence[SgdStep],
        *,
        threads: int = 1,
    ) -> None:
        """As :meth:`Replay.__call__`. ``momentum_buffer`` is given where a step has momentum; where the first step
        is the tensor's first, what it holds does not matter.

        Raises:
            ConfigurationError: the arrays cannot be worked on; nothing was touched.
        """
        if threads < 1:
            raise ConfigurationError(f"a replay needs at least one thread, not {threads}")
        state = {"param": param}
        if momentum_buffer is not None:
            state["momentum_buffer"] = momentum_buffer
        check_sgd_arrays(state, gradients, steps)
        flat = {name: array.reshape(-1) for name, array in state.items()}

        def apply(piece: slice) -> None:
            parts = {name: array[piece] for name, array in flat.items()}
            pieces = [piece_of(each, piece) for each in gradients]
            self.function(parts["param"], parts.get("momentum_buffer"), pieces, steps)

        run(apply, split(param.size, threads))


def supports(
    *,
    kind: str,
    implementation: str,
    torch_version: str,
    instruction_set: str,
    device: str,
    choose: str | None = None,
    exact: bool = True,
) -> Replay | None:
    """The kernel that replays this Adam or AdamW bit for bit, or ``None``: nobody can, call the optimizer.

    A kernel must declare the support, the identity must be that of the torch in this process (another version, or
    another instruction set, rounds otherwise), and the kernel is certified by experiment, once a process: it must
    get the very bits of the torch optimizer on small problems, dense and sparse.

    ``choose`` names the kernel, one of :data:`IMPLEMENTATIONS`. ``exact=False`` asks for the closed form over runs
    without a gradient instead, which replays any Adam within 2e-5 of the movement, wherever its steps ran, and is worth
    having for sparse gradients alone.

    Raises:
        ConfigurationError: the kernel chosen by name, or the closed form, cannot be had; the message says why.
    """
    if not exact:
        return closed_form(kind, implementation, choose)
    found = chosen(_ADAM, kind, implementation, torch_version, instruction_set, device, choose)
    return None if found is None else Replay(found[0], kind, implementation, found[1])


def supports_sgd(
    *,
    implementation: str,
    torch_version: str,
    instruction_set: str,
    device: str,
    choose: str | None = None,
) -> SgdReplay | None:
    """The kernel that replays torch's SGD bit for bit, or ``None``: as :func:`supports`."""
    found = chosen(_SGD, SGD, implementation, torch_version, instruction_set, device, choose)
    return None if found is None else SgdReplay(found[0], implementation, found[1])


def chosen(
    family: frozenset[str],
    kind: str,
    implementation: str,
    torch_version: str,
    instruction_set: str,
    device: str,
    choose: str | None,
) -> tuple[str, Function] | None:
    """The name and the function of the first kernel of a family that can, or of the one chosen."""
    offered = [each for each in IMPLEMENTATIONS if each.kinds == family]
    if choose is not None and choose not in [each.name for each in offered]:
        names = ", ".join(each.name for each in offered)
        raise ConfigurationError(f"there is no replay kernel {choose!r}: choose one of {names}")
    for each in offered:
        if each.name == choose or (choose is None and each.automatic and implementation in each.implementations):
            reason = why_not(each, kind, implementation, torch_version, instruction_set, device)
            if reason is None:
                return each.name, function_of(each.name, implementation, instruction_set)
            if choose is not None:
                raise ConfigurationError(f"the replay kernel {choose!r} cannot be had: {reason}")
            logger.info("the replay kernel %s is passed over: %s", each.name, reason)
    return None


def why_not(
    each: Implementation, kind: str, implementation: str, torch_version: str, instruction_set: str, device: str
) -> str | None:
    if kind not in each.kinds:
        return f"it replays {', '.join(sorted(each.kinds))}, not {kind}"
    if implementation not in each.implementations:
        return f"it replays the implementations {', '.join(sorted(each.implementations))}, not {implementation!r}"
    if device != "cpu":
        return f"it replays what ran on cpu, not {device!r}"
    if each.instruction_sets is not None and instruction_set not in each.instruction_sets:
        return f"how torch rounds on {instruction_set} is not known"
    for module in (each.module, "torch"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    from tiercheck.kernels import certification

    if (torch_version, instruction_set) != certification.environment():
        running = " on ".join(certification.environment())
        return f"the steps ran under torch {torch_version} on {instruction_set}, and this process runs {running}"
    if flushes_denormals():
        return "this thread flushes denormals to zero, and which ones torch flushed depends on its threads"
    function = function_of(each.name, implementation, instruction_set)
    differing = certification.differing_elements(function, kind, implementation)
    return f"{differing} values of its self-test differ from torch's own" if differing else None


def closed_form(kind: str, implementation: str, choose: str | None) -> Replay:
    """The closed form: the same arithmetic whatever torch rounds, so that no environment has to match."""
    if choose not in (None, CLOSED_FORM):
        raise ConfigurationError(f"{choose!r} is exact; the one that is not is {CLOSED_FORM!r}")
    if kind not in KINDS:
        raise ConfigurationError(f"the closed form replays {', '.join(KINDS)}, not {kind}")
    if importlib.util.find_spec("numba") is None:
        raise ConfigurationError("the closed form needs numba, which is not installed: pip install numba")
    from tiercheck.kernels import accuracy
    from tiercheck.kernels.cpu.closed_form import replay_sparse_adam

    error = accuracy.movement_error(replay_sparse_adam)
    if not error <= accuracy.ERROR_MAX:
        raise ConfigurationError(
            f"the closed form's self-test is off by {error:.1e} of the movement, more than {accuracy.ERROR_MAX:.0e}"
        )
    return Replay(CLOSED_FORM, kind, implementation, replay_sparse_adam, exact=False)


def flushes_denormals() -> bool:
    """Whether the CPU takes denormals for zero in this thread (``torch.set_flush_denormal``, or a library on load)."""
    smallest = np.full(1, 1e-45, np.float32)
    return bool((smallest * np.float32(1)).view(np.uint32)[0] == 0)


@cache
def function_of(name: str, implementation: str, instruction_set: str) -> Function:
    """The kernel; cached, so that each is certified once."""
    if name == "torch_tiles":
        from tiercheck.kernels.torch_tiles import replay_adam

        return replay_adam
    options: dict[str, Any] = {"contracted": instruction_set != "DEFAULT"}
    if name.endswith("_sgd"):
        options["fused"] = implementation == "fused"
    return partial(uncertified(name), **options)


def uncertified(name: str) -> Function:
    if name == "numba":
        from tiercheck.kernels.cpu import adam

        return adam.replay_fused_adam
    if name == "numba_tiles":
        from tiercheck.kernels import torch_tiles

        return torch_tiles.replay_adam_with_numba
    if name == "numba_sgd":
        from tiercheck.kernels.cpu import sgd

        return sgd.replay_sgd
    from tiercheck.kernels.reference.adam import replay_fused_adam
    from tiercheck.kernels.reference.sgd import replay_sgd

    return replay_sgd if name == "reference_sgd" else replay_fused_adam

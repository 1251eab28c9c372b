"""A kernel on the host that stands in for an optimizer on a GPU.

Bases are folded by a process without a device. There the optimizer cannot be asked how it rounds. So it is asked where
it trains: the candidates of its class (:class:`~tiercheck.streams.optimizers.optimizer.Candidate`) and the optimizer
itself take the same steps, which no two candidates take with the same bits. The candidate that has all of the
optimizer's bits is the stand-in. Each base names it, with a digest of the optimizer's bits and the powers that the
device computes. The process that folds takes the same steps by its own kernel: it believes in the stand-in only if it
gets that digest.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from tiercheck import schema
from tiercheck.errors import ConfigurationError
from tiercheck.kernels.gpu_adam import Powers
from tiercheck.streams.optimizers.optimizer import Array, Candidate, Function, ReplayableOptimizer, Trial
from tiercheck.streams.optimizers.registry import find_optimizer

__all__ = [
    "Outcome",
    "PowerTable",
    "StandIn",
    "certified_function",
    "find_stand_in",
    "known_stand_in",
    "trials_of",
    "with_its_bits",
]

logger = logging.getLogger(__name__)


@schema.ready
@dataclass(frozen=True)
class PowerTable:
    """The powers of one beta, from the first on, as the device computes them: fp64 if ``wide``, else fp32."""

    beta: float
    wide: bool
    values: bytes


@schema.ready
@dataclass(frozen=True)
class StandIn:
    """What a base says of the kernel that stands in for its optimizer."""

    candidate: schema.Name
    digest: schema.Name
    """Of what the optimizer made of the trials on its device."""
    tables: tuple[PowerTable, ...] = ()

    @property
    def powers(self) -> Powers:
        """Errors: ``ConfigurationError`` if a table is cut short."""
        try:
            found = {each.beta: np.frombuffer(each.values, "<f8" if each.wide else "<f4") for each in self.tables}
        except ValueError as error:
            raise ConfigurationError(f"the powers that the base tells are damaged: {error}") from None
        return Powers(found)


Outcome = Mapping[str, Array]
"""What a trial leaves: the parameter, and the arrays of its state."""

_known: dict[tuple[str, str], StandIn] = {}
"""By the optimizer's kind and implementation, what :func:`find_stand_in` has found in this process."""


def known_stand_in(kind: str, implementation: str) -> StandIn | None:
    """What was found for an optimizer on this process's device, if it was looked for."""
    return _known.get((kind, implementation))


def find_stand_in(kind: str, implementation: str, options: Sequence[Mapping[str, Any]], device: str) -> StandIn:
    """The stand-in for an optimizer that runs so on ``device`` with these options of its groups. Certified by its bits;
    takes seconds, once a process.

    Errors: ``ConfigurationError``: no candidate has the optimizer's bits; the message says why.
    """
    optimizer = find_optimizer(kind)
    if optimizer is None or not optimizer.candidates:
        raise ConfigurationError(f"no kernel stands for {kind} on a GPU")
    if reasons := [why for group in options if (why := optimizer.why_called(group))]:
        raise ConfigurationError(f"no kernel stands for {kind} as it runs: {reasons[0]}")
    betas = tuple(sorted({beta for group in options for beta in optimizer.betas(group)}))
    found = _known[kind, implementation] = chosen(optimizer, implementation, betas, device)
    return found


@cache
def chosen(optimizer: ReplayableOptimizer[Any], implementation: str, betas: tuple[float, ...], device: str) -> StandIn:
    def on_host(candidate: Candidate, powers: Powers) -> list[Outcome]:
        return outcomes_of(optimizer, candidate.on_host(powers), trials_of(optimizer))

    refusal = f"no kernel on the host has the bits of {optimizer.kind} ({implementation})"
    found = with_its_bits(optimizer, implementation, betas, device, on_host, refusal=refusal)
    logger.debug("%s stands in for %s (%s)", found.candidate.name, optimizer.kind, implementation)
    return StandIn(found.candidate.name, digest_of(found.outcomes), tuple(tables_of(found.powers)))


@dataclass(frozen=True)
class Choice:
    """A candidate that has the optimizer's bits."""

    candidate: Candidate
    powers: Powers
    outcomes: Sequence[Outcome]
    """Of the trials."""


def with_its_bits(
    optimizer: ReplayableOptimizer[Any],
    implementation: str,
    betas: Collection[float],
    device: str,
    attempt: Callable[[Candidate, Powers], Sequence[Outcome]],
    *,
    refusal: str,
) -> Choice:
    """The candidate whose ``attempt`` at the trials has the optimizer's bits on ``device``. ``betas``: of the job.

    Errors: ``ConfigurationError``: there is none; the message begins with ``refusal``, and says by how many values each
    one differs. And those of ``attempt``.
    """
    from tiercheck.streams.optimizers import device_trials

    trials = trials_of(optimizer)
    try:
        expected = device_trials.outcomes_on_device(optimizer, implementation, device, trials)
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        raise ConfigurationError(f"the optimizer could not be tried on {device}: {error}") from error
    needed = {*betas, *(beta for trial in trials for beta in optimizer.betas(trial.options))}
    tried: list[str] = []
    for candidate in optimizer.candidates:
        if implementation not in candidate.implementations:
            continue
        powers = device_trials.powers_on_device(candidate, needed, device)
        differing = differing_values(attempt(candidate, powers), expected)
        if differing == 0:
            return Choice(candidate, powers, expected)
        tried.append(f"{candidate.name}: {differing}")
    raise ConfigurationError(f"{refusal} on {device}; values that differ: {', '.join(tried) or 'none was tried'}")


def certified_function(optimizer: ReplayableOptimizer[Any], stand_in: StandIn) -> Function:
    """The kernel that stands in, if it gets the optimizer's bits in this process. The first time that takes seconds.

    Errors: ``ConfigurationError``: it does not, or this release does not know it.
    """
    candidate = next((each for each in optimizer.candidates if each.name == stand_in.candidate), None)
    if candidate is None:
        raise ConfigurationError(f"this release knows no kernel {stand_in.candidate!r} for {optimizer.kind} on a GPU")
    found = certified(optimizer, candidate, stand_in)
    if isinstance(found, str):
        raise ConfigurationError(found)
    return found


@lru_cache(maxsize=16)
def certified(optimizer: ReplayableOptimizer[Any], candidate: Candidate, stand_in: StandIn) -> Function | str:
    """The function, or why not; either is found once."""
    try:
        function = candidate.on_host(stand_in.powers)
        digest = digest_of(outcomes_of(optimizer, function, trials_of(optimizer)))
    except ConfigurationError as error:
        return str(error)
    if digest != stand_in.digest:
        return f"the kernel {candidate.name} does not get the bits here that {optimizer.kind} had where it trained"
    return function


@cache
def trials_of(optimizer: ReplayableOptimizer[Any]) -> tuple[Trial, ...]:
    """Its trials; made once."""
    return tuple(optimizer.trials())


def outcomes_of(optimizer: ReplayableOptimizer[Any], function: Function, trials: Sequence[Trial]) -> list[Outcome]:
    """What a kernel makes of each trial."""
    found: list[Outcome] = []
    for trial in trials:
        arrays = {name: array.copy() for name, array in trial.held.items()}
        steps = [optimizer.step(trial.options, trial.count + 1 + index) for index in range(len(trial.gradients))]
        param = arrays.pop("param")
        with np.errstate(all="ignore"):
            function(param, arrays, trial.gradients, steps)
        found.append({"param": param, **arrays})
    return found


def differing_values(actual: Sequence[Outcome], expected: Sequence[Outcome]) -> int:
    from tiercheck.streams.optimizers.certification import differing_values as differing

    return sum(differing(one, other) for one, other in zip(actual, expected, strict=True))


def digest_of(outcomes: Sequence[Outcome]) -> str:
    """Thirty-two hexadecimal digits of all bits, in which a NaN is a NaN, whatever its payload."""
    state = hashlib.sha256()
    for outcome in outcomes:
        for name in sorted(outcome):
            bits = np.where(np.isnan(outcome[name]), np.uint32(0x7FC00000), outcome[name].view(np.uint32))
            state.update(bits.astype("<u4").tobytes())
    return state.hexdigest()[:32]


def tables_of(powers: Powers) -> list[PowerTable]:
    return [
        PowerTable(beta, table.dtype == np.float64, table.astype(table.dtype.newbyteorder("<")).tobytes())
        for beta, table in powers.tables.items()
    ]

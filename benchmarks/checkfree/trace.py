"""Which stages are lost at which iteration: one trace for all strategies.

The rates are the paper's, 5, 10 and 16 % an hour, as its authors' training draws them: for each iteration and
transformer stage a probability of its own (github.com/gensyn-ai/CheckFree, simulate_training/500M_config.json; the
keys "5", "10" and "16"). One draw serves all rates: what is lost at a lower rate is lost at a higher one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["ALONE", "RATES", "Trace", "hard_trace", "one_loss", "plain_trace"]

RATES: Mapping[str, float] = {"5%": 0.0009, "10%": 0.002, "16%": 0.004}
"""By failures an hour: the probability that an iteration loses a given stage."""

ALONE = "-"
"""The rate of a training without failures."""

HORIZON = 40
"""A trace is that many times as long as a training: a training that rolls back executes more iterations."""


@dataclass(frozen=True)
class Trace:
    """``lost``: by executed iteration, counted from 0, the stages lost just before it."""

    rate: str
    lost: Mapping[int, tuple[int, ...]]
    until: int | None = None
    """The training ends after so many steps instead of all."""

    def struck(self, of: Callable[[Collection[int]], tuple[int, ...]]) -> Trace:
        """The losses that are left if each is what ``of`` leaves of it."""
        left = {at: of(stages) for at, stages in self.lost.items()}
        return replace(self, lost={at: stages for at, stages in left.items() if stages})

    def before(self, iterations: int) -> int:
        """How many stages are lost in the first ``iterations``."""
        return sum(len(stages) for at, stages in self.lost.items() if at < iterations)


def draws(seed: int, steps: int, stages: int, rate: str) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    drawn = np.random.default_rng([seed, 18]).random((HORIZON * steps, stages)) < RATES[rate]
    drawn[:2] = False  # nothing is known of any stage before its first step
    return drawn


def plain_trace(rate: str, *, seed: int, steps: int, stages: int) -> Trace:
    """No two neighbours are lost at once, as the paper assumes: of two in a row, the first is lost."""
    lost: dict[int, tuple[int, ...]] = {}
    for at, row in enumerate(draws(seed, steps, stages, rate)):
        found: list[int] = []
        for stage in np.flatnonzero(row):
            if not found or stage - found[-1] > 1:
                found.append(int(stage))
        if found:
            lost[at] = tuple(found)
    return Trace(rate, lost)


def one_loss(lost: tuple[int, ...], *, at: int, later: int) -> Trace:
    """One failure alone, or none, and ``later`` steps after it."""
    told = f"stage {' and '.join(map(str, lost))}" if lost else "nothing"
    return Trace(f"{told} at {at}", {at: lost}, until=at + later)


def hard_trace(rate: str, *, seed: int, steps: int, stages: int) -> Trace:
    """At each failure of the plain trace two stages are lost: in turns both ends, and two in a row."""
    plain = plain_trace(rate, seed=seed, steps=steps, stages=stages)
    lost: dict[int, tuple[int, ...]] = {}
    for turn, (at, (first, *_)) in enumerate(plain.lost.items()):
        pair = min(first, stages - 2)
        lost[at] = (pair, pair + 1) if turn % 2 else (0, stages - 1)
    return Trace(f"{rate}, pairs", lost)

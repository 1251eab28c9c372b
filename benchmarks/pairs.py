"""Ratios that hold on a noisy machine: subject and ceiling are measured in turns, and compared pair by pair."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

__all__ = ["PAIRS_MIN", "Pair", "Repetition", "Summary", "interleave", "summarise", "summarise_times", "timed"]

PAIRS_MIN = 5

Repetition = Callable[[], Awaitable[float]]
"""One repetition of a measurement; returns what it measured (seconds, mostly)."""


@dataclass(frozen=True)
class Pair:
    """What the subject and its ceiling took, in seconds, one right after the other."""

    subject_s: float
    ceiling_s: float


@dataclass(frozen=True)
class Summary:
    """Medians over the pairs. ``ratio`` is the median of the pairs' own ratios, ``spread`` the quartiles of those."""

    value: float
    ceiling: float
    ratio: float
    spread: tuple[float, float]
    pairs: int


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


async def interleave(
    subject: Repetition,
    ceiling: Repetition,
    *,
    pairs: int,
    warmups: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Pair, ...]:
    """``pairs`` pairs in the order A B, B A, A B, ...: a drift of the machine favours neither side.

    ``warmups`` repetitions of each come first and do not count. ``ValueError`` for fewer than 5 pairs.
    """
    if pairs < PAIRS_MIN:
        raise ValueError(f"{pairs} pairs say too little: take at least {PAIRS_MIN}")
    for _ in range(warmups):
        await subject()
        await ceiling()
    found: list[Pair] = []
    for n in range(pairs):
        if n % 2 == 0:
            subject_s = await subject()
            ceiling_s = await ceiling()
        else:
            ceiling_s = await ceiling()
            subject_s = await subject()
        found.append(Pair(subject_s, ceiling_s))
        progress(n + 1, pairs)
    return tuple(found)


def summarise(pairs: Sequence[Pair], nbytes: int) -> Summary:
    """Rates in bytes a second, where each repetition moved ``nbytes``; a ratio over 1 beats the ceiling."""
    ratio, spread = ratio_and_quartiles([pair.ceiling_s / pair.subject_s for pair in pairs])
    subject_s, ceiling_s = medians_s(pairs)
    return Summary(nbytes / subject_s, nbytes / ceiling_s, ratio, spread, len(pairs))


def summarise_times(pairs: Sequence[Pair]) -> Summary:
    """Seconds of both, and how many times as long the subject took; a ratio under 1 beats the ceiling."""
    ratio, spread = ratio_and_quartiles([pair.subject_s / pair.ceiling_s for pair in pairs])
    subject_s, ceiling_s = medians_s(pairs)
    return Summary(subject_s, ceiling_s, ratio, spread, len(pairs))


def ratio_and_quartiles(ratios: Sequence[float]) -> tuple[float, tuple[float, float]]:
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(ratios), (low, high)


def medians_s(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Of the subject, and of its ceiling."""
    return statistics.median(pair.subject_s for pair in pairs), statistics.median(pair.ceiling_s for pair in pairs)

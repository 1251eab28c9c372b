"""Sets of versions, or of generations, as ranges: small however long a chain is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

__all__ = ["Span", "both", "contain", "joined", "numbers_in", "spans_of", "spans_text"]

NAMED_MAX = 8

Span = tuple[int, int]
"""The first and the last of a range of consecutive numbers."""


def spans_of(numbers: Iterable[int]) -> tuple[Span, ...]:
    """Ascending."""
    return joined((number, number) for number in numbers)


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """All of them, as ascending ranges that do not touch."""
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def both(spans: Sequence[Span], others: Sequence[Span]) -> tuple[Span, ...]:
    """What lies in both. All are ascending."""
    found: list[Span] = []
    at = other = 0
    while at < len(spans) and other < len(others):
        first, last = max(spans[at][0], others[other][0]), min(spans[at][1], others[other][1])
        if first <= last:
            found.append((first, last))
        if spans[at][1] < others[other][1]:
            at += 1
        else:
            other += 1
    return tuple(found)


def contain(spans: Sequence[Span], number: int) -> bool:
    """Whether the number lies in one of these ascending ranges."""
    at = bisect_right(spans, number, key=lambda span: span[0]) - 1
    return at >= 0 and number <= spans[at][1]


def numbers_in(spans: Iterable[tuple[Span, ...]]) -> set[int]:
    """Each of the numbers, one by one."""
    return {number for each in spans for first, last in each for number in range(first, last + 1)}


def spans_text(spans: Iterable[Span]) -> str:
    """For people: ``0..7, 12``."""
    said = [str(first) if first == last else f"{first}..{last}" for first, last in spans]
    dropped = len(said) - NAMED_MAX
    return ", ".join(([f"({dropped} older ranges)"] if dropped > 0 else []) + said[-NAMED_MAX:]) or "none"

"""Bytes a second, lately."""

from __future__ import annotations

import itertools
from collections import deque

__all__ = ["Throughput"]

SAMPLES_MAX = 120
RECENT_S = 10.0


class Throughput:
    """A growing count, sampled about once a second: its rate now, and over the last two minutes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES_MAX)

    def note(self, now: float, count: int) -> None:
        """``count`` at the time ``now``, in seconds of any clock that does not go back."""
        if not self._samples or now > self._samples[-1][0]:
            self._samples.append((now, count))

    def rate(self, now: float) -> float:
        """A second, over the last ten seconds."""
        recent = [sample for sample in self._samples if sample[0] >= now - RECENT_S]
        if len(recent) < 2:
            return 0.0
        (began, before), (ended, after) = recent[0], recent[-1]
        return max(0, after - before) / (ended - began)

    def history(self) -> list[float]:
        """The rate between each two samples, oldest first."""
        return [
            max(0, after - before) / (ended - began)
            for (began, before), (ended, after) in itertools.pairwise(self._samples)
        ]

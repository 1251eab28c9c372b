"""How long to wait before another try."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(frozen=True)
class Backoff:
    """Pauses that double from ``first_s`` to ``max_s``, in seconds. It has no clock and draws nothing."""

    first_s: float
    max_s: float

    def pause_s(self, failures: int, draw: float = 1.0) -> float:
        """The pause after so many failures in a row (from 1). ``draw``: 0 to 1, from an even distribution, if many
        clients of one server must not come back together.

        Source: M. Brooker, "Exponential Backoff and Jitter" (AWS Architecture Blog, 2015), "full jitter".
        """
        return draw * min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 64))

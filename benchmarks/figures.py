"""A figure: a number of the project's, a ceiling that was measured beside it, and the goal for their ratio."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.pairs import Summary

__all__ = ["Chosen", "Figure", "Measured", "Progress", "Settings", "Unavailable"]


class Progress(Protocol):
    """What every kind of settings has: somebody waits."""

    @property
    def progress(self) -> Callable[[str], None]: ...


Chosen = TypeVar("Chosen", bound=Progress)


class Unavailable(Exception):
    """A figure cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Settings:
    """What the command line asks of the tiers' figures."""

    size_bytes: int
    """Bytes of one object."""
    peak_bytes: int
    """Bytes of the one large put whose peak memory is taken."""
    pairs: int
    directory: Path
    """A directory of the benchmark's own, on the disk that is to be measured."""
    progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Measured:
    """A figure's numbers. ``details`` says what else one must know to read them."""

    summary: Summary
    unit: str
    device: str
    nbytes: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure(Generic[Chosen]):
    """``name`` is subject/ceiling; ``measure`` takes the settings of its command, and is ``None`` if the command
    measures several figures at once.

    The ratio should be at least ``goal``, or at most where ``at_most`` says so.
    """

    name: str
    meaning: str
    measure: Callable[[Chosen], Coroutine[Any, Any, Measured]] | None = None
    goal: float | None = None
    at_most: bool = False

    def met(self, ratio: float) -> bool | None:
        """Whether the goal is reached; ``None`` without one."""
        if self.goal is None:
            return None
        return ratio <= self.goal if self.at_most else ratio >= self.goal

"""When a base is due."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from tiercheck.errors import ConfigurationError
from tiercheck.keys import VERSION_MAX
from tiercheck.policy.compose.checks import check_whole, flat

__all__ = ["AnyDue", "CadencePolicy", "EverySeconds", "EveryVersions", "Progress", "When", "by_versions_and_asked"]

SECONDS_MAX = 365 * 86400.0


@dataclass(frozen=True)
class Progress:
    """What a cadence decides by."""

    version: int
    """The version that was just trained."""
    last_due: int
    """The version at which a base was last due: at first, the version at which the generation opened."""
    seconds: float
    """Seconds since then, on rank 0."""


class CadencePolicy(ABC):
    """Says when a base is due. Make it a frozen dataclass.

    Bases count only if all ranks make them at the same versions. So either the answer depends on versions alone
    (:attr:`alike`), or rank 0 is asked, at every :attr:`check_every`-th version, and all ranks take its answer, which
    costs a small collective.
    """

    @property
    @abstractmethod
    def interval(self) -> int:
        """The most versions from one base to the next. The first tier has memory for as many differentials as that
        takes, so a base is due after this many versions whatever :meth:`due` says."""

    @property
    def alike(self) -> bool:
        """Whether :meth:`due` depends on versions alone, so that every rank comes to the same answer."""
        return False

    @property
    def check_every(self) -> int:
        """How many versions lie between two questions, unless the policy is :attr:`alike`."""
        return 10

    @abstractmethod
    def due(self, seen: Progress) -> bool:
        """Whether version ``seen.version`` gets a base."""

    def __or__(self, other: CadencePolicy) -> CadencePolicy:
        """A base is due if one of both says so."""
        return AnyDue(flat(AnyDue, self, other))


@dataclass(frozen=True)
class EveryVersions(CadencePolicy):
    """A base at each version that is a multiple of ``n``."""

    n: int = 50

    def __post_init__(self) -> None:
        check_whole("n", self.n, 1, VERSION_MAX)

    @property
    def interval(self) -> int:
        return self.n

    @property
    def alike(self) -> bool:
        return True

    def due(self, seen: Progress) -> bool:
        return seen.version % self.n == 0


class _AskedOfRank0(CadencePolicy):
    """What the policies that look at more than versions have in common."""

    versions_max: int
    """A base is due after so many versions, whatever else."""
    ask_every: int
    """The versions between two questions."""

    def __post_init__(self) -> None:
        check_whole("versions_max", self.versions_max, 1, VERSION_MAX)
        check_whole("ask_every", self.ask_every, 1, VERSION_MAX)

    @property
    def interval(self) -> int:
        return self.versions_max

    @property
    def check_every(self) -> int:
        return self.ask_every


@dataclass(frozen=True)
class EverySeconds(_AskedOfRank0):
    """A base when ``seconds`` have passed since the last one, or after ``versions_max`` versions. The clock is looked
    at every ``ask_every`` versions."""

    seconds: float
    versions_max: int = 50
    ask_every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float):
            raise ConfigurationError(f"seconds must be a number, not {self.seconds!r}")
        if math.isnan(self.seconds) or not 0 < self.seconds <= SECONDS_MAX:
            raise ConfigurationError(f"seconds must be above 0 and at most {SECONDS_MAX:.0f}, not {self.seconds!r}")

    def due(self, seen: Progress) -> bool:
        return seen.seconds >= self.seconds


@dataclass(frozen=True)
class When(_AskedOfRank0):
    """A base when ``function(progress)`` is true on rank 0, or after ``versions_max`` versions. The function is called
    every ``ask_every`` versions."""

    function: Callable[[Progress], bool]
    versions_max: int = 50
    ask_every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise ConfigurationError(f"function must take a Progress and return a bool, not be {self.function!r}")

    def due(self, seen: Progress) -> bool:
        return self.function(seen)


@dataclass(frozen=True)
class AnyDue(CadencePolicy):
    """A base is due if one of ``policies`` says so: what ``|`` makes."""

    policies: tuple[CadencePolicy, ...]

    @property
    def interval(self) -> int:
        return min(each.interval for each in self.policies)

    @property
    def alike(self) -> bool:
        return all(each.alike for each in self.policies)

    @property
    def check_every(self) -> int:
        return math.gcd(*(each.check_every for each in self.policies if not each.alike)) or 1

    def due(self, seen: Progress) -> bool:
        # Each is asked at its own versions alone, as it would be by itself.
        return any(each.due(seen) for each in self.policies if each.alike or seen.version % each.check_every == 0)


def by_versions_and_asked(policy: CadencePolicy) -> tuple[CadencePolicy | None, CadencePolicy | None]:
    """What every rank computes for itself, and what rank 0 is asked for: either one says that a base is due."""
    if not isinstance(policy, AnyDue):
        return (policy, None) if policy.alike else (None, policy)
    alike = tuple(each for each in policy.policies if each.alike)
    asked = tuple(each for each in policy.policies if not each.alike)
    return AnyDue(alike) if alike else None, AnyDue(asked) if asked else None

"""Which committed versions stay in a shared tier."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tiercheck.errors import ConfigurationError
from tiercheck.keys import VERSION_MAX, is_metric_name
from tiercheck.policy.compose.checks import check_whole, flat

__all__ = ["AnyKeep", "Best", "Committed", "Keep", "KeepBest", "KeepEvery", "KeepLast", "Metric", "RetentionPolicy"]


@dataclass(frozen=True, order=True)
class Metric:
    """What the training loop has reported of a version. ``value`` is finite."""

    version: int
    name: str
    value: float


@dataclass(frozen=True)
class Committed:
    """What a retention policy decides by: the job's own past, as one shared tier holds it."""

    tier: str
    """The tier's name."""
    bases: tuple[int, ...]
    """The versions of the committed bases, oldest first; at least one. The newest one stays, whatever is decided."""
    metrics: tuple[Metric, ...] = ()
    """What was reported of versions that can be kept, by version."""

    def reported(self, name: str) -> Mapping[int, float]:
        """The values of one metric, by version."""
        return {each.version: each.value for each in self.metrics if each.name == name}


@dataclass(frozen=True)
class Keep:
    """What is to stay."""

    versions: frozenset[int] = field(default_factory=frozenset)
    """Each of these versions stays recoverable: the base before it, and the differentials from there to it."""
    since: int | None = None
    """Every version from this one on stays recoverable."""

    def __or__(self, other: Keep) -> Keep:
        """What one of both keeps."""
        since = min((each for each in (self.since, other.since) if each is not None), default=None)
        return Keep(self.versions | other.versions, since)


class RetentionPolicy(ABC):
    """Says what stays in a shared tier. Make it a frozen dataclass.

    What a recovery may need stays whatever a policy says: the newest committed base, and all that is newer. Every rank
    must come to the same answer, so it may depend on the observation alone.
    """

    @abstractmethod
    def keep(self, seen: Committed) -> Keep:
        """What is to stay of what the tier holds."""

    def __or__(self, other: RetentionPolicy) -> RetentionPolicy:
        """What one of both keeps stays."""
        return AnyKeep(flat(AnyKeep, self, other))


@dataclass(frozen=True)
class KeepLast(RetentionPolicy):
    """The last ``n`` committed bases stay, and every version from the oldest of them on."""

    n: int = 2

    def __post_init__(self) -> None:
        check_whole("n", self.n, 1, VERSION_MAX)

    def keep(self, seen: Committed) -> Keep:
        return Keep(since=seen.bases[-self.n :][0])


@dataclass(frozen=True)
class KeepEvery(RetentionPolicy):
    """Each committed base stays whose version is a multiple of ``k``."""

    k: int

    def __post_init__(self) -> None:
        check_whole("k", self.k, 1, VERSION_MAX)

    def keep(self, seen: Committed) -> Keep:
        return Keep(frozenset(version for version in seen.bases if version % self.k == 0))


class Best(StrEnum):
    """Which value of a metric is the best."""

    MIN = "min"
    MAX = "max"


@dataclass(frozen=True)
class KeepBest(RetentionPolicy):
    """The ``n`` versions with the best values of a metric stay: see ``Checkpointer.report``.

    Of equal values the newer version is the better one. A version without a value is not kept by this.
    """

    metric: str
    n: int = 1
    best: Best = Best.MIN

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not is_metric_name(self.metric):
            raise ConfigurationError(
                f"metric must be a name such as 'eval_loss' of at most 64 letters, digits and '_', not {self.metric!r}"
            )
        check_whole("n", self.n, 1, VERSION_MAX)
        if self.best not in tuple(Best):
            raise ConfigurationError(f"best must be 'min' or 'max', not {self.best!r}")
        object.__setattr__(self, "best", Best(self.best))

    def keep(self, seen: Committed) -> Keep:
        sign = 1.0 if self.best is Best.MIN else -1.0
        values = {version: value for version, value in seen.reported(self.metric).items() if math.isfinite(value)}
        order = sorted(values, key=lambda version: (sign * values[version], -version))
        return Keep(frozenset(order[: self.n]))


@dataclass(frozen=True)
class AnyKeep(RetentionPolicy):
    """What one of ``policies`` keeps stays: what ``|`` makes."""

    policies: tuple[RetentionPolicy, ...]

    def keep(self, seen: Committed) -> Keep:
        kept = Keep()
        for each in self.policies:
            kept |= each.keep(seen)
        return kept

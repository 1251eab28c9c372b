"""A retention policy: the versions that made progress stay."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.errors import ConfigurationError
from tiercheck.policy.policies import Committed, Keep, RetentionPolicy


@dataclass(frozen=True)
class KeepProgress(RetentionPolicy):
    """Each version stays that is better, by a share, than every version that stays before it.

    - ``metric``: the name under which the loop reports it; lower is better.
    - ``by``: the least share by which it must be lower.
    """

    metric: str
    by: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.by < 1:  # a NaN is neither
            raise ConfigurationError(f"by must be at least 0 and below 1, not {self.by!r}")

    def keep(self, seen: Committed) -> Keep:
        kept: dict[int, float] = {}
        for version, value in sorted(seen.reported(self.metric).items()):
            best = min(kept.values(), default=None)
            if best is None or value < best - self.by * abs(best):
                kept[version] = value
        return Keep(frozenset(kept))

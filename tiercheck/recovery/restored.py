"""What a recovery has come to, as one rank knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiercheck.format.references import References
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.request import Turn
from tiercheck.recovery.finding.past import Past
from tiercheck.recovery.report import Recovery

__all__ = ["Restored"]


@dataclass(frozen=True)
class Restored:
    """What :meth:`~tiercheck.recovery.restorer.Restorer.restore` returns: where the ranks have met, as one of
    them knows it."""

    recovery: Recovery | None
    """``None``: nothing was recovered, and training begins at version 0."""
    past: Past
    """What all ranks have found, less the copies that were found damaged."""
    parent: int = 0
    """The generation of the version that was recovered: the newest one of any rank's; 0 for none."""
    turn: Turn | None = None
    """What was asked for, if it was carried out."""
    residuals: Mapping[str, Any] = field(default_factory=dict)
    """By master, the residuals of training on compressed gradients: what the base holds, less what was sent since
    (:mod:`tiercheck.streams.gradients.encoder`)."""
    sound: frozenset[Copy] = frozenset()
    """This rank's copies, less those that were found damaged."""
    constants: tuple[Copy, References] | None = None
    """What this rank's base referred to, and where that was read: the next bases may refer to it as well."""
    in_memory: bool = False
    """Every rank came to the version by what its first tier holds."""
    converted: bool = False
    """It was saved under another layout, so that ranks need each other's shards until this generation has a base."""

    made: tuple[str, ...] = ()
    """What was made anew, since no copy was left, in words; the same on all ranks."""
    own_version: int | None = None
    """The version that this rank has read: an older one than that of the recovery, or none, if it was lost."""

    @property
    def version(self) -> int:
        """The version that the state is at."""
        return self.recovery.version if self.recovery else 0

    @property
    def dropped(self) -> bool:
        """A part of what was saved was left out on purpose."""
        fit = self.recovery.fit if self.recovery else None
        return fit is not None and bool(fit.dropped or fit.stopped)

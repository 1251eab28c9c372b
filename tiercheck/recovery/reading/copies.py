"""The copies that one rank has: which have failed, which cannot be read just now, and which to read next.

A copy that is damaged or gone is not used again. The same holds for a copy that is whole but has another form than this
job's state. Any other error may pass: the copy is not read while there are others. If there are none, it is tried again
after a pause, until the deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from tiercheck.errors import Corruption, NotFound, RecoveryError, TierError
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import Stream
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.plan import Unreachable
from tiercheck.runtime.backoff import Backoff

__all__ = ["ROUNDS_MAX", "TOO_MANY_DAMAGED", "Copies", "Failed", "OutOfReach", "Unusable"]

log = logging.getLogger(__name__)

RETRY = Backoff(0.1, 5.0)
NAMED_MAX = 3
"""The most copies that an error names."""
ROUNDS_MAX = 64
"""How often the ranks choose a version again, because some rank found a damaged copy, before they give up."""
TOO_MANY_DAMAGED = (
    f"the ranks chose a version {ROUNDS_MAX} times, and each time some rank found one more damaged copy. Each rank's "
    "log names its copies and tiers ('is not used from tier'). Run 'tiercheck verify URL...' to see what is damaged, "
    "check the storage, and start again, or resume from an older version with attach(version=...)"
)

Chosen = TypeVar("Chosen")


class Unusable(TierError):
    """A copy that this job cannot use although its checksums hold: it is of another model, has another form than this
    job's state, or was made by a codec that is not installed."""


class OutOfReach(RecoveryError):
    """The only copy left may be whole, but could not be read before the deadline."""


class Failed(Exception):
    """Reading one copy, ``source``, failed with ``cause``."""

    def __init__(self, source: Copy, cause: TierError) -> None:
        super().__init__(str(cause))
        self.source = source
        self.cause = cause


@dataclass
class Copies:
    """What one rank knows of its copies. ``deadline_s``: how long a copy that cannot be read is tried again; it is used
    in messages only."""

    hierarchy: OpenHierarchy
    rank: int
    deadline_s: float
    quarantined: dict[Copy, str] = field(default_factory=dict)
    """Copies that failed, and why."""
    unusable: dict[Copy, str] = field(default_factory=dict)
    """Those of them that are whole, and why they cannot be used."""
    silent: set[int] = field(default_factory=set)
    """Indexes of the tiers that did not answer in time."""
    troubled: dict[Copy, TierError] = field(default_factory=dict)
    """Copies that could not be read just now, and why. They are used if there are no others."""
    _pauses: int = 0

    def usable(self, own: Collection[Copy]) -> set[Copy]:
        """The copies that have not failed so far."""
        return set(own) - self.quarantined.keys()

    def choose(
        self, own: Collection[Copy], policy: Callable[[Iterable[Copy]], Chosen | Unreachable]
    ) -> Chosen | Unreachable:
        """What the policy chooses of the usable copies. If it can do without them, copies in trouble and silent tiers
        are left out."""
        usable = self.usable(own)
        answering = [source for source in usable if source not in self.troubled]
        prompt = [source for source in answering if source.tier not in self.silent]
        for copies in (prompt, answering):
            if not isinstance(chosen := policy(copies), Unreachable):
                return chosen
        return policy(usable)

    def note(self, failed: Failed) -> None:
        """Remember the failure. A copy that is damaged, gone or unusable is not used again; any other error may
        pass."""
        if isinstance(failed.cause, Corruption | NotFound | Unusable):
            self.quarantine(failed.source, failed.cause)
            return
        name = self.name(failed.source)
        log.warning("%s cannot be read from tier %s just now: %s", failed.source.key, name, failed.cause)
        self.troubled[failed.source] = failed.cause

    def pause(
        self, own: Collection[Copy], policy: Callable[[Iterable[Copy]], Chosen | Unreachable], left_s: float
    ) -> float:
        """Seconds to wait before the next try. 0 if the copies in trouble are not needed, or would not help.

        After the pause all of them may be tried again. Errors: ``OutOfReach`` if no time is left.
        """
        usable = self.usable(own)
        answering = [source for source in usable if source not in self.troubled]
        if not isinstance(policy(answering), Unreachable) or isinstance(policy(usable), Unreachable):
            return 0.0
        if left_s < RETRY.first_s:
            source, error = min(self.troubled.items(), key=lambda each: each[0])
            raise OutOfReach(
                f"rank {self.rank} tried for {self.deadline_s:g} s to read {source.key} from tier {self.name(source)}: "
                f"{error}. The copy may be whole, so nothing older is restored in its place. Start again when the tier "
                "can be read, or delete the object to resume from an older version"
                + "".join(f"; {key} in {tier} cannot be used: {why}" for key, tier, why in self._no_use()[:NAMED_MAX])
            )
        self.troubled.clear()
        self.silent.clear()
        self._pauses += 1
        return min(RETRY.pause_s(self._pauses), left_s / 2)  # so that the last try has time, too

    def is_in_another_tier(self, source: Copy, own: Collection[Copy]) -> bool:
        """Whether the other tiers together hold every version that is in this copy."""
        key = source.key
        if key.stream is Stream.SNAPSHOT:  # only the same snapshot leads to the same version
            return any(each.key == key and each.tier != source.tier for each in self.usable(own) - self.troubled.keys())
        others = [
            each.key
            for each in self.usable(own) - self.troubled.keys()
            if each.tier != source.tier and (each.key.stream, each.key.generation) == (key.stream, key.generation)
        ]
        return all(any(version in other.versions for other in others) for version in key.versions)

    def told(self) -> list[str]:
        """The copies that failed, each with its tier and the reason."""
        return [f"{source.key} in {self.name(source)}: {why}" for source, why in sorted(self.quarantined.items())]

    def quarantine(self, source: Copy, cause: TierError) -> None:
        """Do not use this copy again."""
        log.warning("%s is not used from tier %s: %s", source.key, self.name(source), cause.message)
        self.quarantined[source] = str(cause)
        if isinstance(cause, Unusable):
            self.unusable[source] = cause.message

    def has_unusable(self, stream: Stream, version: int) -> bool:
        """Whether a copy of it is whole, and of no use to this job."""
        return any(each.key.stream is stream and version in each.key.versions for each in self.unusable)

    def _no_use(self) -> list[tuple[str, str, str]]:
        return [(str(source.key), self.name(source), why) for source, why in sorted(self.unusable.items())]

    def name(self, source: Copy) -> str:
        return self.hierarchy.tiers[source.tier].name

"""The copies that one rank has: which have failed, which are in trouble, and which to read next.

A copy that is damaged, or gone, is none; nor is one that is whole, and of another form than this job's state. Any other
error may pass: the copy is left alone while there are others, and else it is tried again after a pause, until the
deadline.
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

__all__ = ["Copies", "Failed", "OutOfReach", "Unusable"]

log = logging.getLogger(__name__)

RETRY = Backoff(0.1, 5.0)
NAMED_MAX = 3
"""Copies that an error names."""

Chosen = TypeVar("Chosen")


class Unusable(TierError):
    """A copy whose checksums hold, and that this job cannot use: it is of another model, has another form than this
    job's state, or was made by a codec that is not installed."""


class OutOfReach(RecoveryError):
    """A copy that may be whole could not be read until the deadline, and there is no other."""


class Failed(Exception):
    """A source did not give what it should."""

    def __init__(self, source: Copy, cause: TierError) -> None:
        super().__init__(str(cause))
        self.source = source
        self.cause = cause


@dataclass
class Copies:
    """What one rank knows of its copies. ``deadline_s``: how long those in trouble are tried again, for messages."""

    hierarchy: OpenHierarchy
    rank: int
    deadline_s: float
    quarantined: dict[Copy, str] = field(default_factory=dict)
    """Copies that failed, and why."""
    unusable: dict[Copy, str] = field(default_factory=dict)
    """Of those the ones that are whole."""
    silent: set[int] = field(default_factory=set)
    """Tiers that have not answered in time."""
    troubled: dict[Copy, TierError] = field(default_factory=dict)
    """Copies that could not be read just now, and why. They are used if there are no others."""
    _pauses: int = 0

    def usable(self, own: Collection[Copy]) -> set[Copy]:
        """The copies that have not failed so far."""
        return set(own) - self.quarantined.keys()

    def choose(
        self, own: Collection[Copy], policy: Callable[[Iterable[Copy]], Chosen | Unreachable]
    ) -> Chosen | Unreachable:
        """What the policy chooses of the usable copies; without those in trouble and the tiers that keep silent, where
        it can."""
        usable = self.usable(own)
        answering = [source for source in usable if source not in self.troubled]
        prompt = [source for source in answering if source.tier not in self.silent]
        for copies in (prompt, answering):
            if not isinstance(chosen := policy(copies), Unreachable):
                return chosen
        return policy(usable)

    def note(self, failed: Failed) -> None:
        """A copy that is damaged, gone or unusable is none. Any other error may pass."""
        if isinstance(failed.cause, Corruption | NotFound | Unusable):
            self.quarantine(failed.source, failed.cause)
            return
        name = self.name(failed.source)
        log.warning("%s cannot be read from tier %s just now: %s", failed.source.key, name, failed.cause)
        self.troubled[failed.source] = failed.cause

    def pause(
        self, own: Collection[Copy], policy: Callable[[Iterable[Copy]], Chosen | Unreachable], left_s: float
    ) -> float:
        """How long to wait before the next try; 0 if there is a way without the copies in trouble, or no way at all.

        After a pause each of them is worth another try. Errors: ``OutOfReach`` if no time is left.
        """
        usable = self.usable(own)
        answering = [source for source in usable if source not in self.troubled]
        if not isinstance(policy(answering), Unreachable) or isinstance(policy(usable), Unreachable):
            return 0.0
        if left_s < RETRY.first_s:
            source, error = min(self.troubled.items(), key=lambda each: each[0])
            raise OutOfReach(
                f"rank {self.rank} cannot read {source.key} from tier {self.name(source)}, and tried for "
                f"{self.deadline_s:g} s: {error}. The copy may be whole, so that nothing older is restored in its "
                "place: start again when the tier can be read, or remove the object to go back without it"
                + "".join(f"; {key} in {tier} is of no use: {why}" for key, tier, why in self._no_use()[:NAMED_MAX])
            )
        self.troubled.clear()
        self.silent.clear()
        self._pauses += 1
        return min(RETRY.pause_s(self._pauses), left_s / 2)  # the last try, too, has time to learn what is wrong

    def is_in_another_tier(self, source: Copy, own: Collection[Copy]) -> bool:
        """Whether other tiers hold all that is in the source."""
        key = source.key
        if key.stream is Stream.SNAPSHOT:  # one of other versions leads elsewhere, even if it spans them
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
        log.warning("%s is not used from tier %s: %s", source.key, self.name(source), cause)
        self.quarantined[source] = str(cause)
        if isinstance(cause, Unusable):
            self.unusable[source] = cause.message

    def _no_use(self) -> list[tuple[str, str, str]]:
        return [(str(source.key), self.name(source), why) for source, why in sorted(self.unusable.items())]

    def name(self, source: Copy) -> str:
        return self.hierarchy.tiers[source.tier].name

"""A rank's mover as others see it: what it says of itself, and what it can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tiercheck.errors import JobConflict
from tiercheck.policy.recovery.spans import Span

__all__ = ["AGENT", "HURRY_S_MAX", "MOVER", "POLICIES", "MoverHandle", "MoverStatus"]

HURRY_S_MAX = 60.0
"""Whoever waits for longer says so again: nobody takes it back if the process that waits dies."""
POLICIES = "policies"
"""Under which :attr:`MoverStatus.errors` says which decisions of policies are refused."""
MOVER = "mover"
"""Under which it says why the mover has stopped."""
AGENT = "agent"
"""Under which it says why the agent does not answer, or cannot open the tiers."""
COUNTS = (
    "copied_bytes",
    "copied_objects",
    "deleted_objects",
    "folded_bases",
    "skipped_folds",
    "audited_bases",
    "refused_decisions",
)
"""What a :class:`MoverStatus` counts from the mover's start on."""


@dataclass(frozen=True)
class MoverStatus:
    """What the mover last saw and did."""

    watermark: int | None = None
    """The newest base version committed in the tier that survives most."""
    uncommitted: str = ""
    """What the first base of this generation that is to be committed there waits for. Only rank 0 knows."""
    undrained_bases: int = 0
    """Bases of this rank that the durable tier still lacks."""
    idle: bool = False
    """Nothing was left to do at the last look."""
    copied_bytes: int = 0
    copied_objects: int = 0
    deleted_objects: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    """Per tier in trouble, the action that has been failing for longest: its object, and its last error. And what
    :data:`POLICIES`, :data:`MOVER` and :data:`AGENT` stand for."""
    slow_views_s: dict[str, float] = field(default_factory=dict)
    """Per tier whose last listing began over a minute ago: how many seconds ago."""
    folded_bases: int = 0
    """Bases that were made of the base before and the differentials after it, also those for the first tier alone."""
    skipped_folds: int = 0
    """Bases that were not folded, since something unusable lies in their place in the first tier."""
    unfolded_bases: int = 0
    """Bases that were left to be folded, and are not there yet."""
    fold_lag_versions: int = 0
    """How many versions were recorded since the oldest of those."""
    folds_to: int = -1
    """The newest version whose base the mover has taken over to fold."""
    folds: bool = False
    """The mover folds bases that are left to it."""
    prepares_folding: bool = False
    """What folds is not ready yet: it will fold then, unless it finds that it cannot."""
    not_folded: str = ""
    """Why it does not, though it was to."""
    audited_bases: int = 0
    """Folded bases that were compared with what training had, and are the same. Those for the first tier alone are not
    compared."""
    differing_version: int | None = None
    """The newest version whose folded base differed, and was not published."""
    differing: tuple[str, ...] = ()
    """What differed there, by the names in the base."""
    has_room: bool = True
    """The first tier may take another base."""
    newest_base: int = -1
    """The newest base of this rank's that was in the first tier when that was found."""
    reach: tuple[Span, ...] = ()
    """Where no tier is shared: what this rank can come to, whichever of its copies are lost."""
    base_needed_after: int | None = None
    """A version whose only copy was damaged before it could be copied on: what comes after it cannot be restored once
    this process's memory is lost, until a base newer than this version is captured. Or one whose base lacks its
    constants in the first tier, from which nothing can be restored until then."""
    reached_versions: dict[str, int] = field(default_factory=dict)
    """By the name of each tier, the version up to which it has all that it is to hold. The first tier comes first."""
    held_up_by: str = ""
    """What the oldest differential in the first tier waits for."""
    awaits_base: bool = False
    """It waits for a base after it, and for nothing else."""
    refused_decisions: int = 0
    """How often a policy's decision was refused. What is refused now is told among the errors, under ``policies``."""

    @property
    def troubled_tiers(self) -> int:
        """How many of ``errors`` are a tier's, or of tiers that do not open."""
        return len(self.errors.keys() - {POLICIES, MOVER})

    def after(self, before: MoverStatus) -> MoverStatus:
        """This one, with counts that go on from those of a mover before."""
        return replace(self, **{each: getattr(self, each) + getattr(before, each) for each in COUNTS})

    @property
    def lag_versions(self) -> dict[str, int]:
        """By tier, how many versions it lacked at the last look. A tier that takes batches lacks up to one of them."""
        newest, *others = self.reached_versions.items() or [("", 0)]
        return {tier: newest[1] - last for tier, last in others}

    @property
    def holds_up(self) -> str:
        """What those who wait for the tiers wait for, in words; empty if that is not known."""
        troubles = (f"{tier}: {error}" for tier, error in sorted(self.errors.items()))
        why = f": {self.not_folded}" if self.awaits_base and self.not_folded else ""
        return "; ".join(filter(None, [self.held_up_by and self.held_up_by + why, *troubles]))

    @property
    def holds_up_a_flush(self) -> str:
        """The same for those who wait for all other tiers, and for no base that is folded for the first one alone."""
        folds = self.folds or bool(self.not_folded)
        in_between = folds and self.awaits_base and not self.unfolded_bases
        return (replace(self, held_up_by="") if in_between else self).holds_up

    @property
    def fold_lag(self) -> str:
        """``fold_lag_versions`` in words."""
        return f"a base that was due is not folded yet ({self.fold_lag_versions} versions were captured since)"


class MoverHandle(Protocol):
    """A rank's mover, as its trainer sees it: in the trainer's own process, or in the node agent's."""

    @property
    def status(self) -> MoverStatus: ...

    @property
    def conflict(self) -> JobConflict | None:
        """Why the mover has stopped for good: a newer generation has opened."""
        ...

    def nudge(self, *, hurry_s: float = 0.0) -> None:
        """Something changed: look soon. ``hurry_s``: somebody waits for the tiers, so that for so many seconds no pace
        need hold a copy back, and what has failed is tried again after short pauses; :data:`HURRY_S_MAX` at most."""
        ...

    def leave(self, due: Sequence[int]) -> None:
        """Leave the bases of these versions to the mover, as :meth:`room_for_base` does, without waiting for what it
        says to that."""
        ...

    async def run(self) -> None: ...

    async def cycle(self, *, closing: bool = False) -> bool: ...

    async def make_room(self) -> bool:
        """Delete from the first tier what may go. If nothing may yet, bring the other tiers what they lack, until
        something may, or nothing is left that can be done now. True if something was deleted from the first tier: ask
        again if that is not enough. Errors: ``JobConflict``."""
        ...

    async def agree(self, mark: int) -> None:
        """The ranks agree on this mark (:mod:`tiercheck.policy.recovery.agreement`). :attr:`status` is fresh after
        that."""
        ...

    async def room_for_base(self, deadline_s: float, due: Sequence[int] = (), *, patiently: bool = False) -> None:
        """Wait until another base may come into the first tier: fewer than two of this rank still drain, and of those
        in the first tier no more than two must stay. ``due``: leave the bases of these versions to the mover, which
        takes them over if nothing is in the way (:attr:`MoverStatus.folds_to`). ``patiently``: wait also until those
        before are folded; for what folds to be ready, only half of the deadline. Errors: ``DeadlineExceeded``;
        ``JobConflict``."""
        ...

    async def drain(self, deadline_s: float, *, closing: bool) -> None: ...

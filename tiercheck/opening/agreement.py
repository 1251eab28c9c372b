"""What the ranks settle together: what goes when a generation opens, and the mark while they train."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass

from tiercheck import keys
from tiercheck.errors import DeadlineExceeded, RanksLate, TierError
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.agreement import NO_MARK, agreed, needs_agreement
from tiercheck.policy.recovery.opening import Reach, anew, lost_versions, superseded_at_opening
from tiercheck.policy.recovery.spans import Span, spans_text
from tiercheck.recovery.ranks import Ranks, gather
from tiercheck.recovery.restored import Restored
from tiercheck.replication.mover import MoverHandle
from tiercheck.runtime.group import AsyncGroup
from tiercheck.runtime.runtime import Scheduler

__all__ = ["Agreement", "clear_tiers"]

log = logging.getLogger(__name__)

RANKS_NAMED_MAX = 8
TOLD_S = 2.0
"""What a wait may take beyond its deadline, whose error says more."""
PAUSE_MAX = 32
"""The most versions between two looks for a mark that does not move."""
AGAIN_S = 0.2
"""How long the ranks wait before they look again whether their bases have arrived."""


async def clear_tiers(ranks: Ranks, hierarchy: OpenHierarchy, restored: Restored, generation: int) -> int:
    """Delete what nothing needs any more, from the tiers inside the node, before ``generation`` captures anything.
    Collective, after all ranks have recovered; or when there was no version that all could come to, and the job begins
    anew. Returns the mark that the generation begins with.

    What was saved under another layout stays until this generation has a base that outlives the nodes: ranks need each
    other's shards of it. So does what other ranks have left in this node's memory, if some rank was restored from
    memory that is none of its tiers now. A tier that cannot be cleared just now is left as it is, and so is one that
    was away at the survey. Errors: ``RecoveryError``; ``GroupError``.
    """
    roles, past, sound = hierarchy.roles, restored.past, restored.sound
    lineage, owned = past.own_lineage, past.owned
    ancestors = {each for each, _ in past.as_of(restored.parent).chain}
    others = ancestors - (set() if restored.converted else {each for each, _ in lineage.chain})
    answers = await ranks.gather("what each rank can come to", lambda: Reach.of(sound, roles, lineage), kind=Reach)
    # What was converted is of another layout, and other attempts to do so are none of its past.
    reached = restored.recovery if not restored.converted else None
    refers_to = restored.constants[0].key if restored.constants is not None else None
    known = anew(answers, reached.version if reached else None)
    versions = known.versions
    if restored.own_version is not None and restored.own_version not in versions:
        versions = (restored.own_version, *versions)  # this rank's stage was lost, and went back alone
    absent = {tier for tier, _ in past.told[ranks.rank].away}
    # Of what lies in a tier that was away when its owner looked, nobody knows whether the owner needs it.
    unsure = past.unsure
    deleted: set[Copy] = set()

    def is_own(source: Copy) -> bool:
        return source.key.rank == ranks.rank

    async def clear(tier: OpenTier) -> None:
        try:
            held = await visible(tier, generation)
            held = {source for source in held if is_own(source) or source.key.rank not in unsure}
            staying = {source.key.constants for source in held if source.key.generation in others}
            held = {each for each in held if each.key.generation not in others and each.key not in staying}
            if past.is_scattered:
                held = {source for source in held if is_own(source) or source.key.generation not in ancestors}
            gone = superseded_at_opening(held, ranks.rank, roles, lineage, versions, sound, owned, refers_to)
            if gone:
                await tier.driver.delete([str(source.key) for source in gone])
                deleted.update(source for source in gone if is_own(source) and source in sound)
                log.info("tier %s: %d objects of older generations are deleted", tier.name, len(gone))
        except TierError as error:
            log.warning("what is superseded is not deleted from tier %s yet: %s", tier.name, error)

    async def clear_all() -> None:
        inside = [tier for tier in hierarchy.tiers if not tier.role.shared and tier.index not in absent]
        await asyncio.gather(*map(clear, inside))

    async def clear_in_time() -> None:
        try:
            await ranks.call(clear_all(), "deleting what is superseded")
        except DeadlineExceeded as error:
            log.warning("what is superseded is not deleted yet: %s", error)

    # Nobody captures anything before all have: the ranks of a node share its memory.
    await ranks.gather("deleting what is superseded", clear_in_time)
    if lost := lost_versions(deleted, sound, roles, lineage):
        unasked = ", ".join(tier.name for tier in hierarchy.tiers if tier.role.shared and tier.index in absent)
        if unasked:
            told = f"no start can go back to them, unless {unasked}, which could not be asked, has them"
            log.warning("versions %s are deleted from memory: %s", spans_text(lost), told)
        else:
            log.info("versions %s are deleted from memory, and no other tier has them", spans_text(lost))
    return known.mark


async def visible(tier: OpenTier, generation: int) -> set[Copy]:
    """The shards of generations before this one, of all ranks, in the tier. Errors: ``TierError``."""
    found = [keys.parse(info.key) async for info in tier.driver.list()]
    return {Copy(tier.index, key) for key in found if isinstance(key, ShardKey) and key.generation < generation}


@dataclass(frozen=True)
class _Said:
    """What a rank tells the others when a base is due."""

    reach: tuple[Span, ...]
    has_room: bool
    errors: str
    """The trouble of its tiers; empty if there is none."""
    over: bool
    """Its time is over."""


@dataclass
class Agreement:
    """The mark of a job without a shared tier, while it trains. All ranks call the same methods in the same order."""

    group: AsyncGroup
    mover: MoverHandle
    scheduler: Scheduler
    deadline_s: float
    mark: int = NO_MARK
    """The version that the ranks have agreed on last."""
    _before: int = NO_MARK
    """The mark when the last base was due."""
    _next_look: int = 0
    _pause: int = 1
    """Versions between two looks."""

    @staticmethod
    def needed(hierarchy: OpenHierarchy, group: AsyncGroup) -> bool:
        return needs_agreement(hierarchy.roles, group.world_size)

    async def begin(self) -> None:
        """Tell the mover the mark that the generation begins with. Not a collective. Errors: as :meth:`settle`."""
        await self._tell()

    async def settle(self, version: int) -> None:
        """Base ``version`` is due on every rank: agree on a mark, and wait until every rank has room for the base.

        Errors: ``RanksLate`` naming the ranks whose bases have not arrived; ``RecoveryError``; ``GroupError``.
        """
        what = f"agreeing on what is whole before base {version}"
        until = self.scheduler.time() + self.deadline_s
        self._before, self._pause, self._next_look = self.mark, 1, version + 1
        while True:
            answers = await self._ask(what, until)
            reaches = [answer.reach for answer in answers]
            mark = agreed(reaches)
            if mark != self.mark:
                self.mark = mark
                continue  # the movers are told within the collective: one that does not answer is heard of by all
            if all(answer.has_room for answer in answers):
                return
            if any(answer.over for answer in answers):
                newest = [max((last for _, last in reach), default=NO_MARK) for reach in reaches]
                late = [rank for rank, version in enumerate(newest) if version == min(newest)]
                raise RanksLate(self._late(late, [answer.errors for answer in answers]), late=late)
            await self.scheduler.sleep(AGAIN_S)

    async def advance(self, version: int) -> None:
        """The version is whole on every rank, and no base is due. As long as there is no mark, or it has not moved when
        the last base was due, the ranks look now and then whether there is a newer one: until then a rank that needs
        bases in between keeps more than it would have to, and a failure costs more.

        Errors: as :meth:`settle`.
        """
        if self.mark != self._before or version < self._next_look:
            return
        self._next_look, self._pause = version + self._pause, min(2 * self._pause, PAUSE_MAX)
        what, until = f"agreeing on what is whole at version {version}", self.scheduler.time() + self.deadline_s
        mark = agreed([answer.reach for answer in await self._ask(what, until)])
        if mark != self.mark:
            self.mark = mark
            await self._ask(what, until)  # the movers are told

    async def _ask(self, what: str, until: float) -> list[_Said]:
        """What the ranks say, once their movers know the mark."""
        deadline_s = self.deadline_s + 2 * TOLD_S
        return await gather(self.group, what, lambda: self._said(until), deadline_s=deadline_s, kind=_Said)

    async def _said(self, until: float) -> _Said:
        await self._tell()
        status = self.mover.status
        errors = "; ".join(f"{tier}: {error}" for tier, error in sorted(status.errors.items()))
        return _Said(status.reach, status.has_room, errors, self.scheduler.time() >= until)

    async def _tell(self) -> None:
        deadline_s = self.deadline_s + TOLD_S
        telling = self.mover.agree(self.mark)
        await self.scheduler.call(telling, what="telling the mover what is whole", deadline_s=deadline_s)

    def _late(self, late: Collection[int], errors: list[str]) -> str:
        named = list(late)[:RANKS_NAMED_MAX]
        said = "; ".join(f"rank {rank}" + (f" ({errors[rank]})" if errors[rank] else "") for rank in named)
        return (
            "the first tier has no room for another base before those in it have arrived on every rank, and within "
            f"{self.deadline_s:g} s they did not: furthest behind is {said}{'; ...' if len(late) > len(named) else ''}"
        )

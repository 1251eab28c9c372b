"""The memory of the other nodes, as further tiers of a recovery: what it holds is found there, not computed.

Each rank looks for its shards in the tiers where they should be: its node's memory, its neighbour's, what all share. If
that does not lead every rank by its own memory to the newest version, one rank a node tells which ranks have shards in
the node's memory: in what was captured there, and in what it keeps for neighbours. A rank that is named looks there by
the peer transport. So hosts may come back in another order, under other names, or be replaced.

Such a tier is only read. It is opened when something is looked for in it. If it does not answer, its copies are lost to
this recovery, and nothing else is. If each rank finds all that there is where it should be, no node is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from tiercheck.errors import ConfigurationError, TierCheckError
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.policy.recovery.plan import Plan, Unreachable
from tiercheck.policy.recovery.spans import Span, contain
from tiercheck.recovery.finding.survey import Survey, survey
from tiercheck.recovery.ranks import Ranks
from tiercheck.schema import Text
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.wrappers.lazy_open import LazyOpenDriver
from tiercheck.tiers.wrappers.read_only import ReadOnlyDriver

__all__ = ["NodeMemories", "NodeMemory"]

log = logging.getLogger(__name__)

TELL_S_MAX = 5.0
"""How long a rank waits for what its own node's memory holds."""
ANSWER_S_MAX = 10.0
CLOSE_S_MAX = 5.0
MEMORIES_MAX = 64
"""What one node tells of."""
SPANS_MAX = 4096


@dataclass(frozen=True)
class NodeMemory:
    """A part of a node's memory that holds shards of the job's ranks."""

    name: Text
    """In messages and reports."""
    host: Text
    url: Text
    """Of the tier that it is for other nodes."""
    local: Text
    """The URL by which it is the first tier of ranks of this host; empty for what is kept for neighbours."""
    only_here: bool
    """Nobody but its own host can reach it."""
    ranks: Annotated[tuple[Span, ...], Meta(max_length=SPANS_MAX)]
    """Those that have shards there."""


Tell = Callable[[], Coroutine[Any, Any, Sequence[NodeMemory]]]
"""What this rank has to tell of its node's memory; nothing, if another rank of the node does."""


class NodeMemories:
    """The other nodes' memory, as one rank reads it. ``tell``: ``None`` on all ranks if no agents serve the memory.
    ``host``: this rank's, as :attr:`NodeMemory.host`. ``always``: the ranks' own tiers may know nothing of what was
    captured last. ``place``: the same text for ranks that see the same first tier;
    empty, if that is not known."""

    def __init__(
        self,
        hierarchy: OpenHierarchy,
        ranks: Ranks,
        tell: Tell | None = None,
        host: str = "",
        place: str = "",
        always: bool = False,
    ) -> None:
        self.place = place
        self.always = always
        self.reading = OpenHierarchy(hierarchy.tiers, hierarchy.must_survive)
        """The job's tiers, and behind them those that were found. Never opened or closed as a whole."""
        self._own = hierarchy.tiers
        self._ranks = ranks
        self._tell = tell
        self._host = host
        self._memories: dict[NodeMemory, OpenTier | None] = {}
        """What the nodes have told, and the tiers that were made of it."""
        self._opened: set[OpenTier] = set()
        self.answer_s = min(ANSWER_S_MAX, ranks.deadline_s / 4)
        """How long a tier of theirs may take to be opened and listed."""

    @property
    def can_be_asked(self) -> bool:
        return self._tell is not None

    @property
    def names(self) -> list[str]:
        """Of the tiers that were found."""
        return [tier.name for tier in self.reading.tiers[len(self._own) :]]

    async def ask(self) -> bool:
        """Learn what each node's memory holds. Collective. Returns whether there is anything."""
        if self._tell is None:
            return False
        tell, scheduler = self._tell, self._ranks.scheduler
        within_s = min(TELL_S_MAX, self._ranks.deadline_s / 4)

        async def told() -> Sequence[NodeMemory]:
            try:
                return tuple(await scheduler.call(tell(), what="looking at this node's memory", deadline_s=within_s))
            except TierCheckError as error:
                log.warning("other ranks are not told what this node's memory holds: %s", error)
                return ()

        kind = Annotated[tuple[NodeMemory, ...], Meta(max_length=MEMORIES_MAX)]
        answers = await self._ranks.gather("what the memory of the nodes holds", told, kind=kind)
        # Agents that share a machine see the same memory there.
        places: set[tuple[str, str]] = set()
        for memory in (each for answer in answers for each in answer):
            place = (memory.host, memory.local or memory.url)
            if place not in places:
                places.add(place)
                self._memories.setdefault(memory, None)
        return bool(self._memories)

    async def look(self) -> Survey:
        """This rank's own shards there, and the lineage. On the event loop."""
        rank = self._ranks.rank
        tiers = await self.holding({rank})
        found = await survey(tiers, rank, retry_s=self.answer_s / 2, answer_s=self.answer_s, insist=False)
        for tier, error in found.away:
            log.warning("the %s is done without, since it does not answer: %s", self.reading.tiers[tier].name, error)
        return replace(found, away=())

    def tells_of(self, old: int) -> bool:
        """Whether some node's memory that can be reached from here holds shards of the rank."""
        return any(self._is_reached(memory) and contain(memory.ranks, old) for memory in self._memories)

    async def holding(self, olds: Collection[int]) -> list[OpenTier]:
        """The tiers that hold shards of any of these ranks, open as far as they answer. On the event loop."""
        here = [self._tier(memory) for memory in self._memories if any(contain(memory.ranks, old) for old in olds)]
        tiers = [tier for tier in here if tier is not None]
        fresh = [tier for tier in tiers if tier not in self._opened]
        self._opened.update(fresh)
        await asyncio.gather(*(tier.driver.open() for tier in fresh))
        return tiers

    def say_plan(self, chosen: Plan | Unreachable) -> None:
        """Say from where this rank is to read, before it does, if any of it is in their memory."""
        if isinstance(chosen, Unreachable):
            return
        point, tiers = chosen.point, [self.reading.tiers[source.tier] for source in chosen.sources]
        if any(tier.is_other_node for tier in tiers):
            rank, names = self._ranks.rank, ", ".join(dict.fromkeys(tier.name for tier in tiers))
            log.info("rank %d: version %d is to be read from base %d on by %s", rank, point.last, point.anchor, names)

    async def close(self) -> None:
        """Idempotent."""
        opened, self._opened = self._opened, set()

        async def close_all() -> None:
            await asyncio.gather(*(tier.driver.close() for tier in opened))

        if opened:
            try:
                await self._ranks.scheduler.call(close_all(), what="closing", deadline_s=CLOSE_S_MAX)
            except TierCheckError as error:
                log.warning("the other nodes' memory is not let go of: %s", error)

    def _is_reached(self, memory: NodeMemory) -> bool:
        return memory.host == self._host or not memory.only_here

    def _tier(self, memory: NodeMemory) -> OpenTier | None:
        """``None`` if it cannot be reached from here, or is a tier of this rank's anyhow."""
        tier = self._memories[memory]
        if tier is not None:
            return tier
        is_here = memory.host == self._host
        if not self._is_reached(memory):
            return None
        try:
            driver = make_driver(memory.url)
        except ConfigurationError as error:
            log.warning("the %s cannot be read: %s", memory.name, error)
            return None
        if any(driver.url == own.driver.url or (is_here and memory.local == own.driver.url) for own in self._own):
            return None
        reading = LazyOpenDriver(ReadOnlyDriver(driver), open_s=self.answer_s / 2)
        same = self.names.count(memory.name)
        name = f"{memory.name} ({same + 1})" if same else memory.name
        tier = OpenTier(len(self.reading.tiers), name, reading, is_other_node=True)
        self._memories[memory] = tier
        self.reading.tiers = (*self.reading.tiers, tier)
        return tier

"""What the tiers hold, listed no more often than it takes, and at the price of what has changed.

A rank lists what is its own and what concerns the whole job (:func:`tiercheck.keys.own_prefixes`), so that a look costs
it the same however many ranks there are. What other ranks have left in a tier inside a node is found by the first
listing of that tier, which is of all of it: nothing is added to it as long as this generation is the newest. If that
shows constants of another rank of the job, the first tier is listed whole once more when the generation has settled.
That shows whether the rank is there, and refers to them: when the generation opened it may not have come yet.

A tier inside the node is listed at each look. A store behind a network is listed by a task of its own: at first, again
when somebody asks for it, and else after a pause that doubles as long as nothing changes, and is no shorter than the
listing took. Nobody waits for a listing but who asks for it. Meanwhile all decide on what is known: what was listed
last, and what this mover has itself put and deleted since. A tier that was never listed is unknown.

A view may be old, since what a decision rests on stays true unless a newer generation opens
(``docs/adr/0018-a-decision-is-fenced-not-its-view.md``). Whether one has is read by itself, right before the decision:
:meth:`Observer.fence`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from tiercheck import keys
from tiercheck.errors import Transient
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import LINEAGE, CommitKey, Key, LineageKey, ShardKey, own_prefixes
from tiercheck.policy.commit import COORDINATOR
from tiercheck.policy.observation import Contents, Copy, Observation
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.recovery.relayout import left_to
from tiercheck.policy.watermark import is_settled
from tiercheck.replication.backoff import Action, TierBackoff
from tiercheck.runtime.backoff import Backoff

__all__ = ["LISTING", "Observer"]

RELIST = Backoff(0.5, 30.0)
"""The pauses between the listings of a tier behind a network in which nothing changes."""
LISTING_S_MAX = 900.0
FENCE_S_MAX = 60.0
SLOW_VIEW_S = 60.0
"""A view older than this is shown."""
YIELD_EVERY = 1000
"""So many listed objects are looked at, before others get their turn."""
GENERATIONS = f"{LINEAGE}g"
LISTING = "listing"


@dataclass
class _Known:
    """What is known of one tier. Times are the event loop's, in seconds."""

    names: dict[str, int] = field(default_factory=dict)
    """The name and size of every object that this rank lists, those that are none of TierCheck's among them."""
    contents: Contents = field(default_factory=Contents)
    """The same as keys, but for damaged copies; and what other ranks have left, as the first listing found it."""
    changes: dict[str, int | None] = field(default_factory=dict)
    """What this mover has put (bytes) and deleted (``None``) since the last listing began: one that was under way
    meanwhile shows some of it, and some not."""
    listed_at: float = float("-inf")
    """When the listing began that ``names`` is of."""
    attempted_at: float = float("-inf")
    """When the last attempt began, whatever became of it."""
    next_at: float = float("-inf")
    """When another one is worth it."""
    rest_until: float = float("-inf")
    """Not before then, whatever changes: listing takes half of the time at most."""
    unchanged: int = 0
    """So many listings in a row have brought nothing new."""
    prefixes: tuple[str, ...] = ("",)
    """What the next listing is of."""
    visible: bool = False
    """The last attempt to list it has succeeded."""
    fenced_at: float = float("-inf")
    """When it was last asked which generations have opened."""
    committed_at: float = float("-inf")
    """When the newest of its commit records was learned of."""
    unsure: bool = False
    """The last listing has brought commit records: older ones may have come behind it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """This mover has put something, so that others may have, too."""

    @property
    def pause_s(self) -> float:
        """Until the next listing, if nothing else asks for one."""
        return RELIST.pause_s(self.unchanged + 1)


class Observer:
    """One rank's view of its tiers."""

    def __init__(
        self,
        hierarchy: OpenHierarchy,
        attempts: TierBackoff,
        *,
        rank: int,
        world_size: int,
        generation: int,
        lineage: Lineage,
    ) -> None:
        self.damaged: set[Copy] = set()
        """Copies that failed verification: they count as absent. Those that are gone for as long as they matter."""
        self.foreign: set[Copy] = set()
        """Of these, what another job has written: it is not this one's to delete."""
        self._hierarchy = hierarchy
        self._attempts = attempts
        self.rank = rank
        self._world_size = world_size
        self._generation = generation
        self._lineage = lineage
        departed = left_to(rank, world_size, lineage)
        self._own_prefixes = own_prefixes(rank, coordinator=rank == COORDINATOR, departed=departed)
        self._known = [_Known(prefixes=self._own_prefixes if role.shared else ("",)) for role in hierarchy.roles]
        self._relisted = False
        """As of :class:`~tiercheck.policy.observation.Observation`."""
        self._seen_state: object = None
        self._seen: Observation | None = None
        self.mark: int | None = None
        self.under_pressure = False
        """As of :class:`~tiercheck.policy.observation.Observation`."""
        self.differing: int | None = None
        """As of :class:`~tiercheck.policy.observation.Observation`."""

    # What is known

    def seen(self) -> Observation:
        """What every tier holds, as far as is known now: the same value as long as that is the same. Of a tier that was
        never listed nothing is known."""
        contents = tuple(known.contents for known in self._known)
        state = self.mark, contents, self._relisted, self.differing, self._short_of_room, self.under_pressure
        if state != self._seen_state or self._seen is None:
            self._seen_state = state
            self._seen = Observation(
                self._hierarchy.roles,
                contents,
                self.rank,
                self._world_size,
                self._generation,
                self._lineage,
                self.mark,
                self._relisted,
                self.differing,
                self._short_of_room,
                self.under_pressure,
            )
        return self._seen

    @property
    def state(self) -> object:
        """All that decisions rest on. It is equal only to itself as long as nothing changes."""
        tiers = [(known.contents, known.visible, known.unsure) for known in self._known]
        return self.mark, self._relisted, self.differing, self._short_of_room, self.under_pressure, tiers

    @property
    def _short_of_room(self) -> frozenset[int]:
        return frozenset(tier.index for tier, _ in self._pairs() if self._attempts.was_full(tier))

    def visible(self, index: int) -> bool:
        """Whether the tier could be listed at the last attempt: else what there is to do for it is not known."""
        return self._known[index].visible

    def listed(self, index: int) -> bool:
        """Whether the tier was ever listed."""
        return self._known[index].listed_at > float("-inf")

    def listed_at(self, index: int) -> float:
        """When the listing began of which the tier's contents are, in the event loop's seconds."""
        return self._known[index].listed_at

    def sure(self, index: int) -> bool:
        """Whether what is known of the tier has every commit record older than the newest one there.

        A listing that a commit overtakes shows the newer of two records without the older one, which was put where it
        had passed. Commits are made in order, so that the next listing shows both.
        """
        return not self._known[index].unsure

    def attempted_since(self, index: int, since: float) -> bool:
        """Whether the tier was listed since then, or could not be."""
        return self._known[index].attempted_at >= since

    @property
    def damaged_there(self) -> set[Copy]:
        """Damaged copies of this job's that lie in their tiers still."""
        ours = self.damaged - self.foreign
        return {copy for copy in ours if str(copy.key) in self._known[copy.tier].names}

    @property
    def slow_views_s(self) -> dict[str, float]:
        """Per tier whose last listing began over a minute ago: how many seconds ago."""
        ages = {tier.name: _now() - known.listed_at for tier, known in self._pairs() if known.visible}
        return {name: age_s for name, age_s in ages.items() if age_s > SLOW_VIEW_S}

    # What this mover does

    def put(self, index: int, key: Key, nbytes: int) -> None:
        """This mover has put an object."""
        known = self._known[index]
        known.names[str(key)] = known.changes[str(key)] = nbytes
        known.contents = known.contents.changed({key: nbytes})
        if isinstance(key, CommitKey):
            known.committed_at = _now()
        if isinstance(key, ShardKey):
            self._sound(index, key)
        known.unchanged = 0
        known.changed.set()

    def gone(self, index: int, deleted: Collection[Key]) -> None:
        """These objects are no longer there."""
        known = self._known[index]
        for key in deleted:
            known.names.pop(str(key), None)
            known.changes[str(key)] = None
        known.contents = known.contents.changed(dict.fromkeys(deleted))

    def found_damaged(self, index: int, key: ShardKey, *, foreign: bool = False) -> None:
        """This copy has failed verification."""
        known = self._known[index]
        self.damaged.add(Copy(index, key))
        if foreign:
            self.foreign.add(Copy(index, key))
        known.contents = known.contents.changed({key: None})

    def remember(self, lost: Collection[Copy]) -> None:
        """Of the damaged copies that are gone, forget all but these."""
        for copy in self.damaged.difference(lost):
            if str(copy.key) not in self._known[copy.tier].names:
                self._sound(copy.tier, copy.key)

    def _sound(self, index: int, key: ShardKey) -> None:
        """No damaged copy of this is left."""
        self.damaged.discard(Copy(index, key))
        self.foreign.discard(Copy(index, key))

    # Looking

    async def look(self, fresh: Iterable[int] = ()) -> Observation:
        """What every tier holds, once each has been listed where that is due; those in ``fresh`` now."""
        now, wanted = _now(), set(fresh)
        await asyncio.gather(*(self.refresh(tier, now if tier.index in wanted else None) for tier, _ in self._pairs()))
        return self.seen()

    async def refresh(self, tier: OpenTier, since: float | None = None) -> None:
        """List the tier if that is due; if its last listing began before ``since``, or left it unsure, in any case. Its
        errors are its trouble."""
        known = self._known[tier.index]
        async with known.lock:
            # Another look may have listed it while this one waited.
            asked = since is not None and (known.attempted_at < since or known.unsure)
            if asked or (_now() >= known.next_at and not (since is not None and tier.capabilities.mappable)):
                await self._list(tier, known)

    async def refresh_nearby(self, since: float | None = None) -> None:
        """List the tiers inside the node; one that was listed ``since`` then (by default: now) need not be."""
        since = _now() if since is None else since
        for tier, _ in self._pairs():
            if tier.capabilities.mappable:
                await self.refresh(tier, since)

    async def keep_listing(self, tier: OpenTier, changed: Callable[[], None]) -> None:
        """List a tier behind a network whenever that is due, until cancelled. ``changed`` is told when that has brought
        anything new."""
        known = self._known[tier.index]
        while not tier.capabilities.mappable:
            known.changed.clear()
            before = known.contents, known.visible, known.unsure
            await self.refresh(tier)
            if before != (known.contents, known.visible, known.unsure):
                changed()
            while (pause_s := known.next_at - _now()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await known.changed.wait()
                    known.next_at = max(known.rest_until, min(known.next_at, _now() + known.pause_s))
                    known.changed.clear()

    async def fence(self, tier: OpenTier) -> None:
        """Learn which generations have opened in a tier that a decision is about, and in the durable one: by a small
        listing right before the decision, however old the view is that it rests on.

        The durable one need not be asked again where it has been since the newest commit there was learned of: what
        is deleted elsewhere rests on that. Errors: ``TierError`` of either.
        """
        durable = self._hierarchy.tiers[self.seen().durable.index]
        await self._read_generations(tier)
        known = self._known[durable.index]
        if durable is not tier and known.fenced_at < known.committed_at:
            await self._read_generations(durable)

    async def _read_generations(self, tier: OpenTier) -> None:
        known, began = self._known[tier.index], _now()
        try:
            async with asyncio.timeout(FENCE_S_MAX):
                found = {info.key: info.nbytes async for info in tier.driver.list(GENERATIONS)}
        except TimeoutError:
            message = f"it did not tell within {FENCE_S_MAX:g} s which generations have opened"
            raise Transient(message, tier=tier.name) from None
        parsed = {keys.parse(name): nbytes for name, nbytes in found.items()}
        known.contents = known.contents.changed(
            {key: nbytes for key, nbytes in parsed.items() if isinstance(key, LineageKey)}
        )
        known.fenced_at = began

    async def _list(self, tier: OpenTier, known: _Known) -> None:
        began = _now()
        found: dict[str, int] = {}
        parsed: dict[str, Key | None] = {}
        known.changes.clear()
        if relists := self._is_to_relist(tier):
            known.prefixes = ("",)
            known.names = {str(key): nbytes for key, nbytes in known.contents.nbytes.items()} | known.names

        async def read() -> None:
            try:
                async with asyncio.timeout(LISTING_S_MAX):
                    await self._read(tier, known, found, parsed)
            except TimeoutError:
                raise Transient(f"its listing did not end within {LISTING_S_MAX:g} s", tier=tier.name) from None

        known.visible = await self._attempts.run(tier, Action(LISTING, "", read, into_tier=False))
        known.attempted_at = began
        if known.visible:
            known.unsure = False
            changed = self._take(tier, known, {**found, **known.changes} if known.changes else found, parsed)
            if known.prefixes != self._own_prefixes:
                known.prefixes = self._own_prefixes
                known.names = {name: size for name, size in known.names.items() if name.startswith(known.prefixes)}
            self._relisted = self._relisted or relists
            known.unchanged = 0 if changed else known.unchanged + 1
            # Keys are listed in order: of generations after what is committed.
            known.listed_at = known.fenced_at = began
        ended = _now()
        known.rest_until = 2 * ended - began
        nearby = tier.capabilities.mappable
        pause_s = known.pause_s if known.visible else RELIST.first_s
        known.next_at = began if nearby else max(known.rest_until, ended + pause_s)

    def _is_to_relist(self, tier: OpenTier) -> bool:
        """Whether other ranks' constants can go only by what the tier holds now that the generation has settled."""
        known, now = self._known[tier.index], self._generation
        if tier.index or tier.role.shared or self._relisted or not self.listed(tier.index):
            return False
        others = (rank for rank in known.contents.left_behind(now) if self.rank != rank < self._world_size)
        left = (key for rank in others for key in known.contents.constants(rank))
        return any(key.generation < now for key in left) and is_settled(self.seen())

    async def _read(self, tier: OpenTier, known: _Known, found: dict[str, int], parsed: dict[str, Key | None]) -> None:
        async for info in tier.listed(known.prefixes):
            if info.key not in known.names:
                parsed[info.key] = keys.parse(info.key)
            found[info.key] = info.nbytes
            if len(found) % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    def _take(
        self, tier: OpenTier, known: _Known, listed: Mapping[str, int | None], parsed: dict[str, Key | None]
    ) -> bool:
        """Make what was listed what is known. Whether anything has changed."""
        if listed == known.names:
            return False
        names = {name: nbytes for name, nbytes in listed.items() if nbytes is not None}
        if names == known.names:
            return False
        news: dict[str, int | None] = {name: size for name, size in names.items() if known.names.get(name) != size}
        news |= dict.fromkeys(known.names.keys() - names.keys())
        known.names = names
        changes: dict[Key, int | None] = {}
        for name, nbytes in news.items():
            key = parsed[name] if name in parsed else keys.parse(name)
            if key is None:
                continue
            if isinstance(key, ShardKey) and Copy(tier.index, key) in self.damaged:
                if nbytes is not None:
                    continue
                self._sound(tier.index, key)
            changes[key] = nbytes
            if isinstance(key, CommitKey) and nbytes is not None:
                known.committed_at = known.attempted_at
                known.unsure = self.rank != COORDINATOR  # who makes them all knows them all
        known.contents = known.contents.changed(changes)
        return True

    def _pairs(self) -> Iterable[tuple[OpenTier, _Known]]:
        return zip(self._hierarchy.tiers, self._known, strict=True)


def _now() -> float:
    return asyncio.get_running_loop().time()

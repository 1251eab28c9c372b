"""Copying a version, or all that a job has left, into another tier.

Each object is verified as it is read, and an object that is there already, whole, is not sent again. Lineage records
come after all shards, and commit records after everything else. So whoever looks at the target in the middle of a copy,
or after one that was interrupted, sees versions that are whole, or a generation without a record, which a recovery
refuses by name; never a commit record without what it speaks of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tiercheck.archive.inventory import Inventory, Recoverable
from tiercheck.archive.needs import commits_of, shards_of_commit, shards_of_version
from tiercheck.archive.shards import verify_shard
from tiercheck.archive.tiers import look_into, open_tier, within
from tiercheck.errors import ConfigurationError, Corruption, JobConflict, NotFound, RecoveryError, TierError, Transient
from tiercheck.format import container
from tiercheck.hierarchy import Hierarchy, OpenHierarchy, OpenTier, Tier
from tiercheck.keys import CommitKey, Key, LineageKey, MetricKey, ShardKey, Stream
from tiercheck.policy.commit import CommitRecord
from tiercheck.policy.recovery.lineage import LineageRecord
from tiercheck.policy.recovery.spans import Span
from tiercheck.recovery.reading.patience import time_to_read
from tiercheck.replication.objects.records import unseal
from tiercheck.replication.objects.shards import look_at

__all__ = ["Copied", "copy"]

T = TypeVar("T")

IN_MEMORY_NBYTES_MAX = 256 << 20
"""Of several objects at a time; a larger object comes alone."""
OBJECTS_AT_ONCE = 8
KINDS: Mapping[type[Key], Any] = {LineageKey: LineageRecord, CommitKey: CommitRecord}
"""What is read of each kind of record; of others, whatever fields they have."""

Progress = Callable[[int, int], None]


@dataclass
class Copied:
    """What :func:`copy` did."""

    url: str
    """The target, without secrets."""
    version: int | None
    """``None``: all that is there."""
    objects: int = 0
    nbytes: int = 0
    present: int = 0
    """Objects that were there already, the same."""
    damaged: list[str] = field(default_factory=list)
    """What no tier holds whole, and was left out, in words."""
    gone: int = 0
    """Objects that were deleted since the tiers were listed: a live job does that."""
    versions: tuple[Span, ...] = ()
    """The versions that can be read of the target now."""


async def copy(
    hierarchy: OpenHierarchy,
    inventory: Inventory,
    chosen: Recoverable | None,
    to: str,
    *,
    deadline_s: float,
    progress: Progress,
) -> Copied:
    """``chosen``: the version; ``None``: everything but markers, claims and replication jobs, which mean nothing in
    another tier. ``deadline_s``: how long a tier may keep silent.

    Errors: ``ConfigurationError`` if the target is one of the sources; ``JobConflict`` if it holds another job;
    ``RecoveryError`` if no copy of what the version needs is whole; ``TierError`` naming the tier. What was copied
    stays, and the next copy goes on from there.
    """
    async with AsyncExitStack() as stack:
        (target,) = Hierarchy.of(Tier(to)).open().tiers
        if any(tier.driver.url == target.driver.url for tier in hierarchy.tiers):
            raise ConfigurationError(f"{target.driver.url} is to be copied onto itself: give another tier")
        await open_tier(target, deadline_s)
        stack.push_async_callback(target.driver.close)
        held = await looked(target, deadline_s)
        refuse_other_job(inventory, held, target)
        work = _Copying(hierarchy, inventory, target, held, deadline_s, progress)
        work.copied.version = None if chosen is None else chosen.version
        await work.run(selected(inventory, chosen), insist=chosen is not None)
        work.copied.versions = (await looked(target, deadline_s)).spans
        if chosen is not None and not any(first <= chosen.version <= last for first, last in work.copied.versions):
            raise RecoveryError(
                f"version {chosen.version} was copied to {target.driver.url}, and cannot be read there: something else "
                f"that lies there is in its way ('tiercheck ls' shows it)"
            )
        return work.copied


async def looked(target: OpenTier, deadline_s: float) -> Inventory:
    contents = await look_into(target, None, deadline_s)
    if contents.away is not None:
        raise Transient(contents.away, tier=target.driver.url)
    return Inventory((contents,))


def refuse_other_job(source: Inventory, held: Inventory, target: OpenTier) -> None:
    """Errors: ``JobConflict``."""
    for number in sorted(source.branches.keys() & held.branches.keys()):
        ours, theirs = source.branches[number].token, held.branches[number].token
        if ours != theirs:
            raise JobConflict(
                f"{target.driver.url} holds another job: generation {number} is {theirs} there, and {ours} in what is "
                "to be copied. Copy to an empty place"
            )


def selected(inventory: Inventory, chosen: Recoverable | None) -> list[list[Key]]:
    """What is copied, in steps: what is in a step comes after all of the steps before it."""
    found: set[Key] = {key for tier in inventory.tiers for key in tier.objects}
    lineage: list[Key] = sorted((key for key in found if isinstance(key, LineageKey)), reverse=True)
    if chosen is not None:
        shards = shards_of_version(chosen)
        records = sorted(commits_of(shards) & found)
        return [*by_need(shards), lineage, list(records)]
    shards = sorted((key for key in found if isinstance(key, ShardKey)), key=lambda key: (key.generation, key.last))
    metrics = sorted(key for key in found if isinstance(key, MetricKey))
    commits = sorted(key for key in found if isinstance(key, CommitKey))
    return [*by_need(shards), list(metrics), lineage, list(commits)]


def by_need(shards: Iterable[ShardKey]) -> list[list[Key]]:
    """Constants, and what may refer to them."""
    found = list(shards)
    constants: list[Key] = [key for key in found if key.stream is Stream.CONSTANT]
    return [constants, [key for key in found if key.stream is not Stream.CONSTANT]]


class _Copying:
    def __init__(
        self,
        hierarchy: OpenHierarchy,
        inventory: Inventory,
        target: OpenTier,
        held: Inventory,
        deadline_s: float,
        progress: Progress,
    ) -> None:
        self.copied = Copied(target.driver.url, None)
        self._hierarchy = hierarchy
        self._inventory = inventory
        self._target = target
        self._held = held.tiers[0].objects
        self._deadline_s = deadline_s
        self._progress = progress
        self._there: set[Key] = set()
        """What the target holds for sure."""
        self._done = self._total = 0

    async def run(self, steps: Sequence[Sequence[Key]], *, insist: bool) -> None:
        """``insist``: an object that no tier holds whole is an error; else it is left out and told."""
        self._total = sum(self._nbytes(key) for step in steps for key in step)
        self._progress(0, self._total)
        for step in steps:
            for wave in waves(step, self._nbytes):
                outcomes = await asyncio.gather(*(self._object(key, insist) for key in wave), return_exceptions=True)
                for outcome in outcomes:
                    if isinstance(outcome, BaseException):
                        raise outcome
                self._done += sum(map(self._nbytes, wave))
                self._progress(self._done, self._total)

    def _nbytes(self, key: Key) -> int:
        return max(tier.objects[key].nbytes for tier in self._inventory.tiers if key in tier.objects)

    def _sources(self, key: Key) -> Iterator[OpenTier]:
        return (self._hierarchy.tiers[tier.role.index] for tier in self._inventory.tiers if key in tier.objects)

    async def _object(self, key: Key, insist: bool) -> None:
        """Errors: those of the target; ``RecoveryError`` if the object is insisted on, and no tier holds it whole."""
        if isinstance(key, CommitKey) and not all(map(self._has, shards_of_commit(self._inventory, key))):
            return  # of a base that is being deleted, or that was left out
        failures: list[str] = []
        for tier in self._sources(key):
            try:
                if isinstance(key, ShardKey) and await self._is_there(tier, key):
                    content = None
                else:
                    content = await self._read(tier, key)
            except NotFound:
                continue
            except (TierError, ConfigurationError) as error:
                failures.append(f"in {tier.name}: {error.message if isinstance(error, Corruption) else error}")
                continue
            await self._put(key, content)
            self._there.add(key)
            return
        if insist:
            why = "; ".join(failures) or "it was deleted meanwhile"
            raise RecoveryError(f"{key} cannot be copied, since no tier holds it whole ({why})")
        if failures:
            self.copied.damaged.append(f"{key} is left out ({'; '.join(failures)})")
        else:
            self.copied.gone += 1

    def _has(self, key: Key) -> bool:
        return key in self._there or (key in self._held and not any(self._sources(key)))

    async def _read(self, tier: OpenTier, key: Key) -> memoryview:
        """The object, verified. Errors: ``Corruption``, ``NotFound`` and ``TierError`` of the source."""
        nbytes = self._nbytes(key)
        content = await self._within(tier, nbytes, tier.driver.get(str(key)), f"{key} was not read")
        if isinstance(key, ShardKey):
            await asyncio.to_thread(container.parse(content, key=str(key), tier=tier.name).verify)
        else:
            await asyncio.to_thread(unseal, content, KINDS.get(type(key), dict[str, Any]), key=key, tier=tier.name)
        return content

    async def _put(self, key: Key, content: memoryview | None) -> None:
        """``None``: the very object is there. Errors: those of the target, which say how far the copy has come."""
        if content is None or await self._has_record(key, content):
            self.copied.present += 1
            return
        putting = self._target.driver.put(str(key), [content])
        try:
            await self._within(self._target, content.nbytes, putting, f"{key} was not stored")
        except TierError as error:
            there = self.copied.objects + self.copied.present
            error.message += f"; {there} objects are there, and the same copy goes on from here"
            error.tier, error.key = error.tier or self._target.driver.url, str(key)
            raise
        self.copied.objects += 1
        self.copied.nbytes += content.nbytes

    async def _is_there(self, tier: OpenTier, key: ShardKey) -> bool:
        """Whether the target holds this very shard, whole: its header, which tells the checksums of all the rest, is
        the same, and the rest has them. Errors: those of the source."""
        held, nbytes = self._held.get(key), self._nbytes(key)
        if held is None or held.nbytes != nbytes:
            return False
        ours, _ = await self._within(tier, 0, look_at(tier, key), f"{key} was not looked at")
        try:
            theirs, _ = await self._within(self._target, 0, look_at(self._target, key), f"{key} was not looked at")
            if ours != theirs:
                return False
            await self._within(self._target, nbytes, verify_shard(self._target, key, nbytes), f"{key} was not read")
        except TierError:
            return False  # the put finds out what is wrong with the target
        return True

    async def _has_record(self, key: Key, content: memoryview) -> bool:
        if isinstance(key, ShardKey) or key not in self._held:
            return False
        try:
            getting = self._target.driver.get(str(key))
            return content == await self._within(self._target, 0, getting, f"{key} was not read")
        except NotFound:
            return False

    async def _within(self, tier: OpenTier, nbytes: int, work: Awaitable[T], what: str) -> T:
        return await within(tier, self._deadline_s + time_to_read(nbytes), work, what)


def waves(keys: Iterable[Key], nbytes: Callable[[Key], int]) -> Iterator[Collection[Key]]:
    """As many as are copied at a time, in order."""
    wave: list[Key] = []
    room = IN_MEMORY_NBYTES_MAX
    for key in keys:
        if wave and (len(wave) == OBJECTS_AT_ONCE or nbytes(key) > room):
            yield wave
            wave, room = [], IN_MEMORY_NBYTES_MAX
        wave.append(key)
        room -= nbytes(key)
    if wave:
        yield wave

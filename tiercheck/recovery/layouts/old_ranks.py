"""What can be found of the ranks that saved under another layout: their shards, and what their tensors are pieces of.

Each new rank looks for the old ranks' shards: in the tiers inside its node for those of all ranks, in the tiers that
all share, and in the other nodes' memory, for those of the old ranks that are dealt to it. For each old rank one new
rank reads from a base what its tensors are pieces of, and tells the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

from tiercheck import keys
from tiercheck.errors import Corruption, NotFound, RecoveryError, TierCheckError, TierError
from tiercheck.format.index.logical import MASTER, LogicalIndex, Range, whole
from tiercheck.format.index.message import INDEX, read_index
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey, Stream, rank_prefix
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import Readable
from tiercheck.policy.recovery.lineage import Layout, Lineage
from tiercheck.policy.recovery.relayout import dealt, readers
from tiercheck.recovery.finding.node_memory import NodeMemories
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.reading.reader import ANSWER_S
from tiercheck.replication.objects.asking import first_answer, patiently
from tiercheck.replication.objects.shards import read_header, read_object

__all__ = ["LATE_S", "OldRanks", "first_of"]

log = logging.getLogger(__name__)

LATE_S = 5.0
"""A rank that ends its waiting at the deadline has so long to tell the others why."""
IDENTITY = "identity"
NAMED_MAX = 5


@dataclass(frozen=True)
class _Seen:
    """By old rank, the newest version that one new rank has found a way to: by the tiers that all see, and by all of
    its tiers together."""

    shared: dict[int, int]
    here: dict[int, int]
    last: int
    """The newest version of which there is anything."""


class OldRanks:
    """The ranks that saved under one ``layout``, as the new rank sees them. ``lineage``: of the job's past, an era
    under that layout. ``read_identity``: as of :class:`~tiercheck.streams.state.Conversion`. Each rank waits for tiers
    until the deadline, once for each step."""

    def __init__(
        self,
        memories: NodeMemories,
        ranks: Ranks,
        lineage: Lineage,
        layout: Layout,
        read_identity: Callable[[Any], Any],
    ) -> None:
        self.nbytes: dict[Copy, int] = {}
        """The copies that were found, and their lengths."""
        self.failed: dict[Copy, str] = {}
        """Those of them that are of no use, and why."""
        self.identities: dict[int, Any] = {}
        self.indexes: dict[int, LogicalIndex] = {}
        """Of the old ranks of which a base was found."""
        self.apart: tuple[str, ...] = ()
        """Trained tensors that several of them have whole, with other values in the same base."""
        self._memories = memories
        self._hierarchy = memories.reading
        self._ranks = ranks
        self._lineage = lineage
        self._layout = layout
        self._read_identity = read_identity
        self._seen: list[_Seen] = []

    @property
    def sound(self) -> set[Copy]:
        return self.nbytes.keys() - self.failed.keys()

    @property
    def lacking(self) -> str:
        """After :meth:`learn`: that versions were saved, and what was not found of them, in words."""
        size, last = self._layout.world_size, max(each.last for each in self._seen)
        if last == 0:
            return ""
        said = f"{size} ranks have saved up to version {last} under another layout"
        if missing := sorted(set(range(size)) - self.indexes.keys()):
            said += f", and no base was found of rank {first_of(missing)}"
        return said

    @property
    def whole(self) -> bool:
        """Whether something was found of each of them."""
        return len(self.indexes) == self._layout.world_size

    @property
    def visible(self) -> dict[int, int]:
        """By old rank that this one can read, the newest version of it, as far as is known."""
        found = dict(self._seen[self._ranks.rank].here)
        for each in self._seen:
            further = {old: version for old, version in each.here.items() if self._memories.tells_of(old)}
            for old, version in (each.shared | further).items():
                found[old] = max(version, found.get(old, version))
        return {old: version for old, version in found.items() if old in self.indexes}

    # Their shards

    async def look(self) -> None:
        """Find their shards, and who can read from whom. Collective. Errors: ``RecoveryError``; ``GroupError``."""
        own = dealt(self._ranks.rank, self._ranks.world_size, self._layout.world_size)

        async def look() -> _Seen:
            await self._find(own, inside=True)
            shared = {tier.index for tier in self._hierarchy.tiers if tier.seen_by_all}
            here = self._newest(range(len(self._hierarchy.tiers)))
            return _Seen(self._newest(shared), here, max((copy.key.last for copy in self.nbytes), default=0))

        doing = "looking for what other ranks have saved"
        self._seen = await self._ranks.gather(doing, look, more_s=2 * LATE_S, kind=_Seen)

    async def find_shared(self, olds: Collection[int]) -> None:
        """What the tiers that all see hold of these as well. Errors: ``RecoveryError``."""
        await self._find(olds, inside=False)

    async def find_in_first(self, olds: Collection[int]) -> None:
        """What was fetched of these into the first tier. Not a collective. If it cannot be listed, nothing was."""
        first = self._hierarchy.first
        if olds:
            finding = self._listed(first, prefixes(olds))
            try:
                within_s = self._ranks.deadline_s / 4
                self.nbytes |= await self._ranks.scheduler.call(finding, what="looking", deadline_s=within_s)
            except TierCheckError as error:
                log.warning("what was fetched into tier %s is not used: %s", first.name, error)

    def _newest(self, tiers: Collection[int]) -> dict[int, int]:
        """By old rank, the newest version to which what these tiers hold of it leads."""
        held: dict[int, list[ShardKey]] = {}
        for copy in self.nbytes:
            if copy.tier in tiers:
                held.setdefault(copy.key.rank, []).append(copy.key)
        reach = {old: Readable.of(found).ways(self._lineage) for old, found in held.items()}
        return {old: max(ways) for old, ways in reach.items() if ways}

    async def _find(self, olds: Collection[int], *, inside: bool) -> None:
        """What the tiers that all see hold of these, and with ``inside`` those inside the node of all. Another node's
        memory that does not answer is done without. Errors: ``RecoveryError``."""
        deadline_s = self._ranks.deadline_s

        async def listed(tier: OpenTier) -> tuple[OpenTier, dict[Copy, int] | TierError]:
            ask = partial(self._listed, tier, prefixes(olds) if tier.seen_by_all else ("",))
            within_s = self._memories.answer_s if tier.is_other_node else deadline_s
            return tier, await patiently(ask, tier, within_s, within_s, not tier.is_other_node)

        async def find() -> list[tuple[OpenTier, dict[Copy, int] | TierError]]:
            own = [tier for tier in self._hierarchy.tiers if not tier.is_other_node and (inside or tier.seen_by_all)]
            return await asyncio.gather(*map(listed, [*own, *await self._memories.holding(olds)]))

        finding = self._ranks.scheduler.call(find(), what="looking for shards", deadline_s=deadline_s + LATE_S)
        for tier, found in await finding:
            if isinstance(found, TierError):
                if tier.is_other_node:
                    log.warning("the %s is done without, since it does not answer: %s", tier.name, found)
                    continue
                raise RecoveryError(
                    f"tier {tier.name} could not be asked what it holds of the {self._layout.world_size} ranks that "
                    f"saved: {found}. Start again when it answers"
                )
            self.nbytes |= found

    async def _listed(self, tier: OpenTier, wanted: Collection[str]) -> dict[Copy, int]:
        found: dict[Copy, int] = {}
        async for info in tier.listed(wanted):
            key = keys.parse(info.key)
            if not isinstance(key, ShardKey):
                continue
            if key.stream is Stream.CONSTANT or self._lineage.admits(key.generation, key.first):
                found[Copy(tier.index, key)] = info.nbytes
        return found

    # What their tensors are pieces of

    async def learn(self) -> None:
        """What their tensors are pieces of, each read by one new rank and told to all. Collective. Errors:
        ``RecoveryError``; ``GroupError``."""
        mine = [old for old, rank in readers([each.here for each in self._seen]).items() if rank == self._ranks.rank]

        async def read_all() -> list[Any]:
            return await asyncio.gather(*map(self._told_by, mine))

        async def read() -> Any:
            within_s = self._ranks.deadline_s + ANSWER_S
            found = await self._ranks.scheduler.call(read_all(), what="reading indexes", deadline_s=within_s)
            return {str(old): each for old, each in zip(mine, found, strict=True) if each is not None}

        digests: dict[tuple[tuple[int, int], str], set[int]] = {}
        for answer in await self._ranks.gather("what the ranks that saved hold of the model", read, more_s=LATE_S):
            for old, (identity, index, base, held) in answer.items():
                self.identities[int(old)] = self._read_identity(identity)
                self.indexes[int(old)] = found = read_index(index)
                for name, digest in zip(whole_masters(found).values(), held, strict=True):
                    digests.setdefault((tuple(base), name), set()).add(digest)
        self.apart = tuple(dict.fromkeys(name for (_, name), found in digests.items() if len(found) > 1))

    async def _told_by(self, old: int) -> Any:
        """An old rank's identity and index, of the newest base of it that can be read."""
        bases = [copy for copy in self.nbytes if copy.key.rank == old and copy.key.stream is Stream.BASE]
        newest = sorted(bases, key=lambda copy: (-copy.key.generation, -copy.key.first, copy.tier))
        tiers = {copy: self._hierarchy.tiers[copy.tier] for copy in newest}
        asks = {copy: (tier, partial(self._told_in, tier, copy)) for copy, tier in tiers.items()}
        told, errors = await first_answer(asks, self._ranks.deadline_s)
        for copy, error in errors.items():
            log.warning("%s is not used from tier %s: %s", copy.key, tiers[copy].name, error)
        spoiled = {copy: str(error) for copy, error in errors.items() if isinstance(error, Corruption | NotFound)}
        self.failed |= spoiled
        if told is None and (troubles := {str(errors[copy]): None for copy in errors.keys() - spoiled.keys()}):
            said = "; ".join(sorted(troubles))  # the copies may be whole
            raise RecoveryError(f"what rank {old} has saved cannot be read: {said}. Start again when it can")
        return told

    async def _told_in(self, tier: OpenTier, copy: Copy) -> list[Any]:
        """Errors: ``Corruption``; ``NotFound``; ``TierError``."""
        header = await read_header(tier, copy.key, self.nbytes[copy])
        if reason := self._lineage.disowns(copy.key.generation, header.metadata.token):
            raise Corruption(reason, tier=tier.name, key=str(copy.key))
        told = [await read_object(tier, copy.key, header, name) for name in (IDENTITY, INDEX)]
        try:
            self._read_identity(told[0])
            index = read_index(told[1])
        except ValueError as error:
            raise Corruption(f"it is ill formed: {error}", tier=tier.name, key=str(copy.key)) from error
        checksums = {extent.spec.name: extent.checksum for extent in header.extents}
        held = [xxhash.xxh32_intdigest((checksums.get(name) or "").encode()) for name in whole_masters(index)]
        return [*told, [copy.key.generation, copy.key.first], held]


def whole_masters(index: LogicalIndex) -> dict[str, str]:
    """By the shard's name, the trained tensors that the rank stores whole."""
    wholes = {whole(tensor): name for name, tensor in index.tensors.items()}
    masters = (name for name, pieces in index.stored.items() if name.startswith(MASTER) and len(pieces) == 1)
    held = {name: index.stored[name][0] for name in masters}
    return {name: wholes[piece] for name, piece in held.items() if isinstance(piece, Range) and piece in wholes}


def first_of(named: Collection[object]) -> str:
    """The first of them, in words."""
    return ", ".join(map(str, list(named)[:NAMED_MAX])) + (", ..." if len(named) > NAMED_MAX else "")


def prefixes(olds: Collection[int]) -> tuple[str, ...]:
    return tuple(map(rank_prefix, sorted(olds)))

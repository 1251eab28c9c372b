"""What can be found of the ranks that saved under another layout: their shards, and what their tensors are pieces of.

Each new rank looks for the old ranks' shards: in the tiers inside its node for those of all ranks, in the tiers that
all share, and in the other nodes' memory, for those of the old ranks that are dealt to it. For each old rank one new
rank reads from a base what its tensors are pieces of, and tells the others in outline
(:mod:`tiercheck.recovery.layouts.telling`). The index itself is read by those that may need its rank.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import xxhash

from tiercheck import keys, schema
from tiercheck.errors import Corruption, NotFound, RecoveryError, TierCheckError, TierError
from tiercheck.format.checksums import checksum_of
from tiercheck.format.index.logical import MASTER, LogicalIndex, LogicalTensor, Range, whole
from tiercheck.format.index.message import INDEX, read_index
from tiercheck.format.index.outline import Outline, outline_of
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey, Stream, rank_prefix
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import Readable
from tiercheck.policy.recovery.lineage import Layout, Lineage
from tiercheck.policy.recovery.relayout import dealt, readers
from tiercheck.recovery.finding.node_memory import NodeMemories
from tiercheck.recovery.layouts.telling import Found, ReachableVersions, SharedParts, Wholes, differing, part_of
from tiercheck.recovery.ranks import TOLD_S, Ranks
from tiercheck.recovery.reading.reader import ANSWER_S
from tiercheck.replication.objects.asking import first_answer, patiently
from tiercheck.replication.objects.shards import read_header, read_object

__all__ = ["OldRanks", "first_of"]

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Old ranks whose shards are listed, or whose bases are read."""
IDENTITY = "identity"
NAMED_MAX = 5


@dataclass(frozen=True)
class _Read:
    """What a base of an old rank says."""

    found: Found
    index: LogicalIndex
    identity: Any
    told: dict[str, bytes]
    """By checksum, what others may have alike."""


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
        self.identity: Any = None
        """That of the first of them."""
        self.outlines: dict[int, Outline] = {}
        """Of the old ranks of which a base was found."""
        self.lists: dict[str, list[LogicalTensor]] = {}
        """The tensors that outlines name."""
        self.unread: set[int] = set()
        """Those of which no base could be read here."""
        self.apart: tuple[str, ...] = ()
        """Trained tensors that several of them have whole, with other values in the same base."""
        self._memories = memories
        self._hierarchy = memories.reading
        self._ranks = ranks
        self._lineage = lineage
        self._layout = layout
        self._read_identity = read_identity
        self._seen: list[ReachableVersions] = []
        self._looked_for = set(dealt(ranks.rank, ranks.world_size, layout.world_size))
        """In the tiers that all see."""
        self._digests: dict[int, str] = {}
        """By old rank, the checksum of its index."""
        self._indexes: dict[str, LogicalIndex] = {}
        """Those that were read here."""
        self._visible: dict[int, int] | None = None

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
        if missing := sorted(set(range(size)) - self.outlines.keys()):
            said += f", and no base was found of rank {first_of(missing)}"
        return said

    @property
    def whole(self) -> bool:
        """Whether something was found of each of them."""
        return len(self.outlines) == self._layout.world_size

    @property
    def visible(self) -> dict[int, int]:
        """After :meth:`learn`: by old rank that this one can read, the newest version of it, as far as is known."""
        if self._visible is None:
            found = dict(self._seen[self._ranks.rank].here)
            for each in self._seen:
                further = {old: version for old, version in each.here.items() if self._memories.tells_of(old)}
                for old, version in (each.shared | further).items():
                    found[old] = max(version, found.get(old, version))
            self._visible = {old: version for old, version in found.items() if old in self.outlines}
        return self._visible

    def digest(self, old: int) -> str:
        """Of its index. Old ranks with the same index have the same pieces."""
        return self._digests[old]

    def index(self, old: int) -> LogicalIndex | None:
        """Its index, if one like it was read here."""
        return self._indexes.get(self._digests[old])

    # Their shards

    async def look(self) -> None:
        """Find their shards, and who can read from whom. Collective. Errors: ``RecoveryError``; ``GroupError``."""
        own = dealt(self._ranks.rank, self._ranks.world_size, self._layout.world_size)

        async def look() -> ReachableVersions:
            await self._find(own, inside=True)
            shared = {tier.index for tier in self._hierarchy.tiers if tier.seen_by_all}
            here = self._newest(range(len(self._hierarchy.tiers)))
            return ReachableVersions(
                self._newest(shared), here, max((copy.key.last for copy in self.nbytes), default=0)
            )

        doing = "looking for what other ranks have saved"
        self._seen = await self._ranks.gather(doing, look, more_s=TOLD_S, kind=ReachableVersions)

    async def find_shared(self, olds: Collection[int]) -> bool:
        """What the tiers that all see hold of these as well. Returns whether any was not looked for before. Errors:
        ``RecoveryError``."""
        more = set(olds) - self._looked_for
        if more:
            await self._find(more, inside=False)
            self._looked_for |= more
        return bool(more)

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
            ask = partial(self._listed, tier, prefixes(olds) if tier.seen_by_all else [""])
            within_s = self._memories.answer_s if tier.is_other_node else deadline_s
            return tier, await patiently(ask, tier, within_s, within_s, not tier.is_other_node)

        async def find() -> list[tuple[OpenTier, dict[Copy, int] | TierError]]:
            own = [tier for tier in self._hierarchy.tiers if not tier.is_other_node and (inside or tier.seen_by_all)]
            return await asyncio.gather(*map(listed, [*own, *await self._memories.holding(olds)]))

        finding = self._ranks.scheduler.call(find(), what="looking for shards", deadline_s=deadline_s + TOLD_S)
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

    async def _listed(self, tier: OpenTier, wanted: Sequence[str]) -> dict[Copy, int]:
        found: dict[Copy, int] = {}

        async def listed(some: Sequence[str]) -> None:
            async for info in tier.listed(some):
                key = keys.parse(info.key)
                if not isinstance(key, ShardKey):
                    continue
                if key.stream is Stream.CONSTANT or self._lineage.admits(key.generation, key.first):
                    found[Copy(tier.index, key)] = info.nbytes

        await asyncio.gather(*(listed(wanted[lane::AT_ONCE]) for lane in range(min(AT_ONCE, len(wanted)))))
        return found

    # What their tensors are pieces of

    async def learn(self) -> None:
        """Of what their tensors are pieces, in outline: each index is read by one new rank. Collective. Errors:
        ``RecoveryError``; ``GroupError``."""
        mine = [old for old, rank in readers([each.here for each in self._seen]).items() if rank == self._ranks.rank]
        came: dict[int, _Read] = {}

        async def read() -> dict[int, Found]:
            came.update(await self._read(mine))
            return {old: each.found for old, each in came.items()}

        doing = "what the ranks that saved hold of the model"
        answers = await self._ranks.gather(doing, read, kind=dict[int, Found])
        found = {old: each for answer in answers for old, each in answer.items()}
        self.outlines = {old: found[old].outline for old in sorted(found)}
        self._digests = {old: each.index for old, each in found.items()}
        tellers: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            for named in {name for each in answer.values() for name in (each.outline.tensors, each.wholes) if name}:
                tellers.setdefault(named, []).append(rank)

        def tell() -> SharedParts:
            told = {name: content for each in came.values() for name, content in each.told.items()}
            parts = {name: part_of(content, tellers[name], self._ranks.rank) for name, content in told.items()}
            first = min(found, default=None)
            return SharedParts(parts, came[first].identity if first in came else None)

        alike = await self._ranks.gather("what they hold alike", tell, kind=SharedParts)
        told = {name: b"".join(alike[rank].parts[name] for rank in ranks) for name, ranks in tellers.items()}
        self.lists = {
            name: msgspec.msgpack.decode(told[name], type=list[LogicalTensor])
            for name in {each.tensors for each in self.outlines.values()}
        }
        self.apart = differing(
            msgspec.msgpack.decode(told[name], type=Wholes)
            for name in sorted({each.wholes for each in found.values() if each.wholes})
        )
        if found:
            (self.identity,) = (self._read_identity(each.identity) for each in alike if each.identity is not None)

    async def read(self, olds: Collection[int]) -> None:
        """Read the indexes of these, or find that they are :attr:`unread`. Errors: ``RecoveryError``."""
        self.unread |= set(olds) - (await self._read(olds)).keys()

    async def _read(self, olds: Collection[int]) -> dict[int, _Read]:
        """By old rank, what a base of it says, if one can be read."""

        slots = asyncio.Semaphore(AT_ONCE)

        async def read_one(old: int) -> _Read | None:
            async with slots:
                return await self._told_by(old)

        async def read_all() -> list[_Read | None]:
            return await asyncio.gather(*map(read_one, olds))

        within_s = self._ranks.deadline_s + ANSWER_S
        found = await self._ranks.scheduler.call(read_all(), what="reading indexes", deadline_s=within_s)
        came = {old: each for old, each in zip(olds, found, strict=True) if each is not None}
        self._indexes |= {each.found.index: each.index for each in came.values()}
        return came

    async def _told_by(self, old: int) -> _Read | None:
        """Of the newest base of it that can be read."""
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

    async def _told_in(self, tier: OpenTier, copy: Copy) -> _Read:
        """Errors: ``Corruption``; ``NotFound``; ``TierError``."""
        header = await read_header(tier, copy.key, self.nbytes[copy])
        if reason := self._lineage.disowns(copy.key.generation, header.metadata.token):
            raise Corruption(reason, tier=tier.name, key=str(copy.key))
        digest = header.object_checksum(INDEX)
        if self._digests.get(copy.key.rank, digest) != digest:
            raise Corruption("its index is not that of the rank's other bases", tier=tier.name, key=str(copy.key))
        identity, plain = [await read_object(tier, copy.key, header, name) for name in (IDENTITY, INDEX)]
        try:
            self._read_identity(identity)
            index = read_index(plain)
        except ValueError as error:
            raise Corruption(f"it is ill formed: {error}", tier=tier.name, key=str(copy.key)) from error
        outline, tensors = outline_of(index)
        told = {outline.tensors: tensors}
        wholes = ""
        if named := whole_masters(index):
            checksums = {extent.spec.name: extent.checksum or "" for extent in header.extents}
            held = {name: xxhash.xxh32_intdigest(checksums.get(each, "").encode()) for each, name in named.items()}
            content = schema.pack(Wholes((copy.key.generation, copy.key.first), dict(sorted(held.items()))))
            told[wholes := checksum_of(content)] = content
        return _Read(Found(digest, outline, wholes), index, identity, told)


def whole_masters(index: LogicalIndex) -> dict[str, str]:
    """By the shard's name, the trained tensors that the rank stores whole."""
    wholes = {whole(tensor): name for name, tensor in index.tensors.items()}
    masters = (name for name, pieces in index.stored.items() if name.startswith(MASTER) and len(pieces) == 1)
    held = {name: index.stored[name][0] for name in masters}
    return {name: wholes[piece] for name, piece in held.items() if isinstance(piece, Range) and piece in wholes}


def first_of(named: Collection[object]) -> str:
    """The first of them, in words."""
    return ", ".join(map(str, list(named)[:NAMED_MAX])) + (", ..." if len(named) > NAMED_MAX else "")


def prefixes(olds: Collection[int]) -> list[str]:
    return [rank_prefix(old) for old in sorted(olds)]

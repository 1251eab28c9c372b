"""Which of the ranks that saved hold what a new rank wants, and from which of them it takes each piece.

Of every old rank its outline is known (:mod:`tiercheck.format.index.outline`). By them the new rank chooses some that
may have all that it wants, and reads their indexes alone. An outline may promise too much: if something is missing
then, the indexes of all others that may have it are read as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from tiercheck.format.index.assemble import Assembly, Holdings, Missing, assemble
from tiercheck.format.index.logical import LogicalIndex, LogicalTensor, Role
from tiercheck.format.index.outline import Outlines, area_of, areas_of
from tiercheck.recovery.layouts.old_ranks import OldRanks
from tiercheck.recovery.layouts.renaming import renamed_index, renamed_tensors

__all__ = ["Holders", "lacking"]


class Holders:
    """The old ranks, as the new rank ``rank`` sees them, which wants ``wanted``. ``names``: by each name of a tensor
    that was saved, the one that it has here; empty: the same. Errors: ``ValueError`` if what was saved is not of one
    model."""

    def __init__(self, old: OldRanks, wanted: LogicalIndex, rank: int, names: Mapping[str, str]) -> None:
        self.wanted = wanted
        """What is taken from them. It may become less."""
        self._old = old
        self._rank = rank
        self._names = names
        lists = old.lists
        if names:
            lists = {key: renamed_tensors(tensors, names) for key, tensors in lists.items()}
        self._outlines = Outlines(old.outlines, lists)
        alike = {each.key for each in wanted.tensors.values() if self._has_shape(each)}
        self._meeting = self._outlines.meeting({k: area for k, area in areas_of(wanted).items() if k in alike})
        self._indexes: dict[str, LogicalIndex] = {}

    @property
    def tensors(self) -> Collection[LogicalTensor]:
        """Every tensor of which any of them has a piece."""
        return self._outlines.tensors.values()

    def find(self, tensor: LogicalTensor) -> LogicalTensor | None:
        """What was saved under its name."""
        return self._outlines.tensors.get(tensor.key)

    def _has_shape(self, tensor: LogicalTensor) -> bool:
        held = self.find(tensor)
        return held is not None and held.shape == tensor.shape

    # From whom

    async def cover(self, among: Collection[int]) -> Assembly:
        """The plan by which these have all that is wanted, as far as they do. Their indexes are read as need be.
        Errors: ``RecoveryError``."""
        while True:
            usable = set(among) & self._old.outlines.keys() - self._old.unread
            if not (unknown := self._unknown(self.choose(usable))):
                plan = self.plan(usable)
                unknown = self._unknown(self._further(plan, usable))
                if not unknown:
                    return plan
            await self._old.find_shared(unknown)
            await self._old.read(unknown)

    async def look_for(self, among: Collection[int], copies: int) -> bool:
        """Look for so many copies of each piece. Returns whether any was not looked for before. Errors:
        ``RecoveryError``."""
        chosen = self.choose(among, copies)
        more = await self._old.find_shared(chosen)
        await self._old.read(self._unknown(chosen - self._old.unread))
        return more

    async def learn(self, found: Collection[int]) -> None:
        """Read the indexes of those of them that may have something of what is wanted. Errors: ``RecoveryError``."""
        await self._old.read(self._unknown(self.choose(set(found) - self._old.unread, len(found))))

    def plan(self, among: Collection[int]) -> Assembly:
        """The plan by which those of them whose indexes were read have all that is wanted, as far as they do."""
        usable = {old for old in among if old in self._old.outlines and self._old.index(old) is not None}
        chosen = self.choose(usable)
        plan = self._assembled(chosen)
        if further := self._further(plan, usable) - chosen:
            plan = self._assembled(chosen | further)
        return plan

    def choose(self, usable: Collection[int], copies: int = 1) -> set[int]:
        """Of these, enough for all that is wanted by their outlines; of each piece so many copies, if there are."""
        chosen: set[int] = set()
        known: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
        for key, areas in self._meeting.items():
            buffer = self._outlines.tensors[key].role is Role.BUFFER if areas else False
            for groups in map(tuple, areas.values()):
                if (buffer, groups) not in known:
                    known[buffer, groups] = self._preferred(self._members(groups, usable), buffer=buffer)
                chosen.update(known[buffer, groups][:copies])
        return chosen

    def may_have(self, missing: Missing) -> bool:
        """Whether somebody may have it whose index was not read here."""
        return any(self._old.index(old) is None for old in self._near(missing, self._old.outlines))

    def _preferred(self, olds: list[int], *, buffer: bool) -> list[int]:
        """Old ranks that have the same, in the order in which this one takes them: the rank of its own number, and then
        such that the work is spread; buffers, which may differ, from the lowest."""
        olds = sorted(olds)
        begin = 0 if buffer or not olds else self._rank % len(olds)
        return sorted([*olds[begin:], *olds[:begin]], key=lambda old: old != self._rank)

    def _further(self, plan: Assembly, usable: Collection[int]) -> set[int]:
        """Those that may have what is missing, one for each index."""
        found = {self._old.digest(old): old for each in lacking(plan) for old in self._near(each, usable)}
        return set(found.values())

    def _near(self, missing: Missing, usable: Collection[int]) -> Iterator[int]:
        tensor = self.wanted.tensors[missing.piece.tensor]
        area = area_of(missing.piece, tensor)
        for each, groups in self._meeting.get(tensor.key, {}).items():
            if each.meets(area):
                yield from self._members(groups, usable)

    def _members(self, groups: Iterable[int], usable: Collection[int]) -> list[int]:
        return [old for group in groups for old in self._outlines.alike[group] if old in usable]

    # Their indexes

    def _unknown(self, olds: Iterable[int]) -> list[int]:
        """One for each index that was not read."""
        return list({self._old.digest(old): old for old in olds if self._old.index(old) is None}.values())

    def _assembled(self, olds: Iterable[int]) -> Assembly:
        return assemble(self.wanted, Holdings({old: self._index(old) for old in olds}), rank=self._rank)

    def _index(self, old: int) -> LogicalIndex:
        index, digest = self._old.index(old), self._old.digest(old)
        assert index is not None
        if digest not in self._indexes:
            self._indexes[digest] = renamed_index(index, self._names) if self._names else index
        return self._indexes[digest]


def lacking(plan: Assembly) -> list[Missing]:
    """What is missing, but for what has no elements."""
    return [each for each in plan.missing if each.piece.elements]

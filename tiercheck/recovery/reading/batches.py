"""Reads the batches of one plan for the replay: the next one is read while one is replayed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tiercheck.errors import DeadlineExceeded, TierError
from tiercheck.format import container
from tiercheck.policy.observation import Copy
from tiercheck.recovery.reading.copies import Failed
from tiercheck.streams.state import Record, Run

if TYPE_CHECKING:
    from tiercheck.recovery.reading.reader import Reader, VerifiedPart

__all__ = ["ANSWER_S", "Batches"]

ANSWER_S = 2.0
"""How long after its deadline a read may take to say why it failed, in seconds."""


class Batches:
    """The batches of one plan, in order, decoded for the replay. At most two of them are in memory."""

    def __init__(
        self,
        reader: Reader,
        part: VerifiedPart,
        own: Collection[Copy],
        groups: deque[tuple[Copy, ...]],
        due: int,
        left_s: float,
    ) -> None:
        self.due = due
        """The first version that :meth:`run` has not returned yet."""
        self.left_s = left_s
        """Seconds that may still be spent waiting for tiers, before another batch comes."""
        self._reader = reader
        self._part = part
        self._own = own
        self._groups = groups
        self._coming: tuple[Sequence[Copy], asyncio.Task[list[container.Shard]]] | None = None
        self._read: deque[Record] = deque()
        self._sources: dict[int, Copy] = {}

    def source_of(self, version: int) -> Copy:
        """The copy from which the version was read."""
        return self._sources[version]

    async def run(self, threads: int) -> Run:
        """The next versions, decoded by at most ``threads`` threads. Errors: ``Failed``; ``Undecodable``;
        ``DeadlineExceeded``."""
        within = bool(self._read)
        if not within:
            await self._read_group()
        # Read ahead once the memory of the group before this one is free: if runs are made while others are replayed,
        # that is so at the second run of a group, and with one thread at the first.
        if (within or self._reader.state.threads == 1) and self._groups:
            self._begin()

        def decode() -> Run:
            versions = min(self._reader.state.steps_at_once, len(self._read))
            return self._reader.state.run([self._read.popleft() for _ in range(versions)], threads=threads)

        made = await asyncio.to_thread(decode)
        self.due = made.last + 1
        return made

    def close(self) -> None:
        """Stop reading."""
        if self._coming is not None:
            self._coming[1].cancel()
            # Its error is taken, so that asyncio does not log it.
            self._coming[1].add_done_callback(lambda done: done.cancelled() or done.exception())

    def _begin(self) -> None:
        if self._coming is None:
            group = self._groups.popleft()
            self._coming = group, asyncio.ensure_future(self._reader.read(group, self._own, self.left_s))

    async def _read_group(self) -> None:
        self._begin()
        if self._coming is None:
            raise AssertionError(f"the plan ends before version {self.due}")
        (group, coming), self._coming = self._coming, None
        loop = asyncio.get_running_loop()
        began = loop.time()
        more_s = self._reader.time_to_read(group)
        await asyncio.wait({coming}, timeout=self.left_s + more_s + ANSWER_S)
        self.left_s = max(0.0, self.left_s - (loop.time() - began))
        if not coming.done():
            coming.cancel()
            raise DeadlineExceeded(
                f"reading {', '.join(str(source.key) for source in group)} did not finish in time: "
                f"{self._reader.deadline_s + more_s:.3g} s were spent waiting for tiers"
            )
        found = [coming.result()]
        self.left_s = self._reader.deadline_s
        del coming  # it would keep the memory of what is parsed below
        await asyncio.to_thread(self._take, group, found)

    def _take(self, group: Sequence[Copy], found: list[list[container.Shard]]) -> None:
        """Parse a group that was read, the one item of ``found``. It is taken out of the list, as in
        :meth:`Reader._digest`."""
        last = self._part.point.last
        for source, shard in zip(group, found.pop(), strict=True):
            try:
                differentials = self._reader.differentials(source, shard, self._part.base)
            except TierError as error:
                raise Failed(source, error) from error
            self._reader.used.append(source)
            after = self._read[-1].version if self._read else self.due - 1
            self._read.extend(each for each in differentials if after < each.version <= last)
            self._sources |= dict.fromkeys(source.key.versions, source)

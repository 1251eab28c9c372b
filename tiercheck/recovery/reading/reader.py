"""Reading one rank's part of a recovery point: once to verify all of it, and once more to replay it.

A copy that turns out to be damaged in the middle of a replay would leave the ranks at different versions, some of
them in no version at all. So nothing of the live state may change before every rank is known to be able to read *all*
of its part. There are three ways to know:

- Keep what was verified in memory until it is replayed. With it grow the memory, by a gradient a version, and the risk
  that the recovery of a long chain is killed for it.
- Verify while replaying, and go back to the base where a copy is damaged. Nothing is read twice, but a recovery that
  ends in an error leaves a state behind that never was.
- Verify everything and keep what fits, then replay, reading the rest again. That is what is done here. The second
  read costs nothing if a tier maps its objects (shared memory), and little if the page cache has them; it is
  made while the versions before are being replayed.

What is in memory beside the base and the live state is bounded by two *batches*, whatever the chain's length: a batch
is one object, or several that together hold no more versions than are replayed at a time. The chain is verified from
its end to its beginning, two batches at a time, so that the two that are verified last stay where they are: the
replay begins with them, and a chain of two batches is read once.

A copy may still go bad between the two reads. Every byte is therefore verified again in the second, and must be of
the same shard as in the first. A copy that fails is quarantined, and other sources of the versions that are still due
are taken. Only if there is none is the part :class:`Lost`: then the ranks agree to load the base again, and to
replay up to an older version, :mod:`tiercheck.recovery.restorer`.

Only damage (``Corruption``) and an object that is not there, asked for twice, cost a copy; and its form does, where the
checksums hold and this job cannot use it (``Unusable``): nothing older is restored in its place. Every other error may
pass: other copies are read meanwhile, if there are any, and else this one is tried again with growing pauses until
the deadline. Then the recovery is refused, naming tier, rank and error: the copy may be whole, so nothing older is
restored in its place.

Reads have deadlines. An object that another tier holds too may take half of the time that is left; if nothing has
come by then, its tier counts as silent, and is asked only for what no other one has.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tiercheck.errors import ConfigurationError, Corruption, DeadlineExceeded, RecoveryError, TierError, Transient
from tiercheck.format import container
from tiercheck.format.references import References, read_references
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import Stream
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.recovery.plan import Plan, Unreachable, batches, grouped, plan
from tiercheck.recovery.reading.copies import Copies, Failed, OutOfReach, Unusable
from tiercheck.replication.objects.asking import asked_twice
from tiercheck.streams.state import Rebuilt, Record, Run, StateReader, Undecodable, ill_formed_is_corrupt
from tiercheck.types import Fidelity

__all__ = ["Lost", "OutOfReach", "Reader", "VerifiedPart"]

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""A read that gives up at the deadline has so long to say why."""
BATCHES_AT_ONCE = 2
"""Batches in memory: one that is being replayed, and the next."""
OBJECTS_AT_ONCE = 4
"""Objects of a batch that are being read at a time."""


class Lost(RecoveryError):
    """In the middle of a replay the last copy of a version turned out to be damaged."""


@dataclass(frozen=True)
class VerifiedPart:
    """One rank's part of a recovery point, all of which was read and verified."""

    plan: Plan
    base: Any
    """Over memory that is kept as long as this is."""
    start: Any
    """What is loaded: the base, or if a snapshot leads from it to the point, the state that comes of the two."""
    references: References | None = None
    """To the constants that the base lacks."""

    @property
    def point(self) -> RecoveryPoint:
        return self.plan.point

    @property
    def constants(self) -> tuple[Copy, References] | None:
        """What the base refers to, and where it was read."""
        source, references = self.plan.constants, self.references
        return None if source is None or references is None else (source, references)


@dataclass
class Reader:
    """Reads what one rank needs of the copies it has, ``own``. Its coroutines run on the event loop.

    ``state`` knows what shards say. ``deadline_s`` bounds the time spent waiting for tiers: once while verifying, and
    once while replaying.
    """

    hierarchy: OpenHierarchy
    rank: int
    deadline_s: float
    state: StateReader
    lineage: Lineage
    """The job's own past: what another job wrote is no copy of it."""
    copies: Copies = field(init=False)
    used: list[Copy] = field(default_factory=list)
    """The sources of what was handed out last, in order."""
    read_bytes: int = 0
    """Taken from the tiers so far. What is read twice counts twice, unless the tier maps it."""
    _base: tuple[Copy, Copy | None, Any, References | None] | None = None
    """The base's source, that of its constants, the base, and what it says of them."""
    _digests: dict[Copy, str] = field(default_factory=dict)
    """What was verified, and the digest of its header, which holds the checksums of all the rest."""
    _held: dict[Copy, memoryview] = field(default_factory=dict)
    """What need not be read again."""

    def __post_init__(self) -> None:
        self.copies = Copies(self.hierarchy, self.rank, self.deadline_s)

    @property
    def quarantined(self) -> dict[Copy, str]:
        """Copies that failed, and why."""
        return self.copies.quarantined

    async def runs(self, part: VerifiedPart, own: Collection[Copy], *, threads: int) -> AsyncGenerator[Run, None]:
        """The differentials of a verified part from first to last, in runs to be replayed. Each is read, verified and
        decoded when it is asked for, by at most ``threads`` threads. None if a snapshot stands for them.

        Errors: ``Lost`` if the last copy of a version has gone bad since it was verified; ``OutOfReach``;
        ``DeadlineExceeded``.
        """
        if part.point.by_snapshot:
            self.used = list(part.plan.sources)
            return
        self.used = list(part.plan.leading)
        left_s = self.deadline_s
        due = part.point.anchor + 1
        chosen: tuple[Copy, ...] | Unreachable = part.plan.batches
        self.copies.troubled.clear()
        while not isinstance(chosen, Unreachable):
            stream = _Stream(self, part, own, deque(grouped(chosen, self.state.steps_at_once)), due, left_s)
            try:
                while stream.due <= part.point.last:
                    yield await stream.run(threads)  # not named here: what is replayed is to be let go
                return
            except Undecodable as error:
                source = stream.source_of(error.version)
                self.copies.quarantine(source, self._unusable(source, error.message) if error.whole else error)
            except Failed as failed:
                self.copies.note(failed)
            finally:
                stream.close()
            due, left_s = stream.due, stream.left_s
            following = partial(batches, part.point, due, self.rank, order=self.hierarchy.order)
            if pause_s := self.copies.pause(own, following, left_s):
                await asyncio.sleep(pause_s)
                left_s -= pause_s
            chosen = self.copies.choose(own, following)
        raise Lost(
            f"rank {self.rank} has no good copy of differential {chosen.version} any more: the last one went bad "
            "after it was verified"
        )

    def doubt(self, part: VerifiedPart, own: Collection[Copy], error: Exception) -> bool:
        """The state that the part's base leads to was refused: whether there is another copy of the base to try."""
        anchor = part.plan.anchor
        others = [source for source in self.copies.usable(own) if source.key == anchor.key and source != anchor]
        if others:
            why = f"it cannot be loaded: {type(error).__name__}: {error}"
            self.copies.quarantine(anchor, self._unusable(anchor, why))
            self._base = None
        return bool(others)

    def reached(self, part: VerifiedPart, rebuilt: Rebuilt) -> tuple[Fidelity, tuple[str, ...]]:
        """How true the state is that was rebuilt of the part, and why."""
        fidelity, notes = self.state.reached(part.base, rebuilt)
        if part.point.by_snapshot:
            fidelity = Fidelity.APPROXIMATE
            last, anchor = part.point.last, part.point.anchor
            notes += (f"version {last} is base {anchor} and a snapshot of what had changed since",)
        if rebuilt.residuals and part.point.last > part.point.anchor:
            notes += (
                f"error feedback has forgotten what it had left for later since version {part.point.anchor}: the "
                "restored state is not affected, but what is trained from here on differs from an uninterrupted run",
            )
        return fidelity, notes

    async def verify(self, point: RecoveryPoint, own: Collection[Copy]) -> VerifiedPart | None:
        """Read and verify all that the rank needs to get to ``point``; ``None`` if some version has no good copy
        left: then there are more in :attr:`quarantined`. Errors: ``OutOfReach``; ``DeadlineExceeded``."""
        until = asyncio.get_running_loop().time() + self.deadline_s
        choice = partial(plan, point, self.rank, order=self.hierarchy.order)
        while True:
            chosen = self.copies.choose(own, choice)
            if isinstance(chosen, Unreachable):
                log.warning("rank %d has no good copy of %s %d", self.rank, chosen.stream, chosen.version)
                self._let_go()
                return None
            try:
                base, references = await self._verified_base(chosen, own, until)
                await self._verify_batches(chosen, base, own, until)
                led = point.by_snapshot  # else the base is the point itself, or where a replay begins
                start = await self._advanced(chosen.batches[0], base, own, until) if led else base
                return VerifiedPart(chosen, base, start, references)
            except Failed as failed:
                self.copies.note(failed)
                self._let_go()
            left_s = until - asyncio.get_running_loop().time()
            if pause_s := self.copies.pause(own, choice, left_s):
                await asyncio.sleep(pause_s)

    async def _verified_base(self, chosen: Plan, own: Collection[Copy], until: float) -> tuple[Any, References | None]:
        source = chosen.anchor
        if self._base is not None and self._base[:2] == (source, chosen.constants):
            return self._base[2:]
        self._base = None  # before the next one is read
        try:
            shard = self._parsed(source, await self._get(source, own, until))
            await asyncio.to_thread(shard.verify)
            references = read_references(shard)
        except TierError as error:
            raise Failed(source, error) from error
        constants = await self._verified_constants(chosen.constants, references, own, until)
        try:
            base = await asyncio.to_thread(self._decoded_base, source, shard, constants)
        except TierError as error:
            raise Failed(source, error) from error
        self._base = source, chosen.constants, base, references
        return base, references

    async def _verified_constants(
        self, source: Copy | None, references: References | None, own: Collection[Copy], until: float
    ) -> container.Shard | None:
        """What a base refers to, all of it verified. Errors: ``Failed``, of the constants."""
        if source is None or references is None:
            return None
        name, key = self.copies.name(source), str(source.key)
        try:
            shard = container.parse(await self._get(source, own, until), key=key, tier=name)
            references.check(shard.header, tier=name)
            await asyncio.to_thread(shard.verify)
        except TierError as error:
            raise Failed(source, error) from error
        return shard

    def _decoded_base(self, source: Copy, shard: container.Shard, constants: container.Shard | None) -> Any:
        """Errors: ``Corruption``; ``Unusable``."""
        with self._form(source, shard):
            return self.state.base(shard, constants, tier=self.copies.name(source), places=self._places)

    @contextmanager
    def _form(self, source: Copy, shard: container.Shard) -> Iterator[None]:
        """What a reader inside trips over is the copy's form where its checksums hold. Errors: ``Corruption``;
        ``Unusable``."""
        try:
            with ill_formed_is_corrupt(tier=self.copies.name(source), key=str(source.key)):
                yield
        except (Corruption, ConfigurationError) as error:
            shard.verify()
            raise self._unusable(source, error.message if isinstance(error, Corruption) else str(error)) from error

    def _unusable(self, source: Copy, why: str) -> Unusable:
        return Unusable(why, tier=self.copies.name(source), key=str(source.key))

    def _led_on(self, source: Copy, base: Any, shard: container.Shard) -> Any:
        """What a snapshot leads to. Errors: ``Corruption``; ``Unusable``."""
        with self._form(source, shard):
            return self.state.led_on(base, shard, tier=self.copies.name(source))

    async def _advanced(self, source: Copy, base: Any, own: Collection[Copy], until: float) -> Any:
        """Decoded at once: nothing is read again, and what cannot be decoded is known before anything is changed."""
        try:
            shard = self._parsed(source, await self._get(source, own, until))
            return await asyncio.to_thread(self._led_on, source, base, shard)
        except TierError as error:
            raise Failed(source, error) from error

    async def _verify_batches(self, chosen: Plan, base: Any, own: Collection[Copy], until: float) -> None:
        groups = grouped(chosen.batches, self.state.steps_at_once)
        staying = {source for group in groups[:BATCHES_AT_ONCE] for source in group}
        rooms, slots = asyncio.Semaphore(BATCHES_AT_ONCE), asyncio.Semaphore(OBJECTS_AT_ONCE)
        verifying = asyncio.Semaphore(self.state.threads)
        failures: list[Exception] = []

        async def verify(source: Copy) -> None:
            async with slots:
                if failures or source in self._digests:
                    return
                try:
                    found = [await self._get(source, own, until)]
                    if source in staying or self._mapped(source):
                        self._held[source] = found[0]
                    async with verifying:
                        self._digests[source] = await asyncio.to_thread(self._digest, source, found, base)
                except Exception as error:  # noqa: BLE001  raised below, when the others have stopped
                    failures.append(Failed(source, error) if isinstance(error, TierError) else error)

        async def verify_group(group: Sequence[Copy]) -> None:
            await rooms.acquire()
            await asyncio.gather(*(verify(source) for source in group))
            if staying.isdisjoint(group):  # what stays keeps its room
                rooms.release()

        # Semaphores let in whoever came first: the last group.
        await asyncio.gather(*(verify_group(group) for group in reversed(groups)))
        for failure in failures[1:]:
            if isinstance(failure, Failed):
                self.copies.note(failure)
        if failures:
            raise failures[0]

    def _digest(self, source: Copy, found: list[memoryview], base: Any) -> str:
        """Verify every byte of what was found, and that differentials are of the base's state. It is taken out of the
        list, since a thread pool lets go of arguments some time after the result is there."""
        shard = self._parsed(source, found.pop())
        shard.verify()
        if source.key.stream is Stream.DIFFERENTIAL:
            self.differentials(source, shard, base)
        return shard.digest

    async def read(self, group: Sequence[Copy], own: Collection[Copy], seconds: float) -> list[container.Shard]:
        """The shards of verified sources once more; their tensors are verified when they are asked for.

        Errors: ``Failed``, of the first in order.
        """
        until = asyncio.get_running_loop().time() + seconds
        slots = asyncio.Semaphore(OBJECTS_AT_ONCE)

        async def read_one(source: Copy) -> container.Shard:
            async with slots:
                try:
                    shard = self._parsed(source, await self._get(source, own, until))
                except TierError as error:
                    raise Failed(source, error) from error
            if self._digests.get(source, shard.digest) != shard.digest:
                changed = Corruption(
                    "the shard was replaced after it was verified", tier=self.copies.name(source), key=str(source.key)
                )
                raise Failed(source, changed)
            return shard

        found = await asyncio.gather(*(read_one(source) for source in group), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return [each for each in found if isinstance(each, container.Shard)]

    def differentials(self, source: Copy, shard: container.Shard, base: Any) -> Sequence[Record]:
        """Errors: ``Corruption``; ``Unusable`` if there is one that is not of the base's state."""
        with self._form(source, shard):
            return self.state.records(shard, base, tier=self.copies.name(source))

    async def _get(self, source: Copy, own: Collection[Copy], until: float) -> memoryview:
        """The object, from the tier unless it is held. Errors: ``TierError``; ``Transient`` if nothing came in the
        time left, or in half of it if another tier has the object too."""
        held = self._held.get(source)
        if held is not None:
            if not self._mapped(source):
                del self._held[source]
            return held
        left_s = max(0.0, until - asyncio.get_running_loop().time())
        driver = self.hierarchy.tiers[source.tier].driver
        reading = asyncio.ensure_future(asked_twice(lambda: driver.get(str(source.key))))
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be there to ask
        try:
            wait_s = left_s / 2 if self.copies.is_in_another_tier(source, own) else left_s
            await asyncio.wait({reading}, timeout=wait_s)
            if not reading.done():
                self.copies.silent.add(source.tier)
                name = self.copies.name(source)
                raise Transient(f"nothing came within {wait_s:.3g} s", tier=name, key=str(source.key))
        finally:
            # Not waited for: a tier that does not answer may not hear of it either.
            reading.cancel()
        content = reading.result()
        self.read_bytes += content.nbytes
        return content

    def _parsed(self, source: Copy, content: memoryview) -> container.Shard:
        shard = container.parse(content, key=str(source.key), tier=self.copies.name(source))
        reason = self.lineage.disowns(source.key.generation, shard.metadata.token)
        if reason is not None:
            raise Corruption(reason, tier=self.copies.name(source), key=str(source.key))
        return shard

    def _let_go(self) -> None:
        """Of what tiers do not map: another plan may begin with other batches."""
        self._held = {source: content for source, content in self._held.items() if self._mapped(source)}

    def _mapped(self, source: Copy) -> bool:
        return self.hierarchy.tiers[source.tier].capabilities.mappable

    @property
    def _places(self) -> str:
        return ", ".join(tier.driver.url for tier in self.hierarchy.tiers)


class _Stream:
    """One plan's batches on their way to the replay; at most two of them in memory."""

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
        """The first version that was not handed out."""
        self.left_s = left_s
        """The time that is left to wait for tiers, in seconds."""
        self._reader = reader
        self._part = part
        self._own = own
        self._groups = groups
        self._coming: tuple[Sequence[Copy], asyncio.Task[list[container.Shard]]] | None = None
        self._read: deque[Record] = deque()
        self._sources: dict[int, Copy] = {}

    def source_of(self, version: int) -> Copy:
        return self._sources[version]

    async def run(self, threads: int) -> Run:
        """The next run. Errors: ``Failed``; ``Undecodable``; ``DeadlineExceeded``."""
        within = bool(self._read)
        if not within:
            await self._read_group()
        # Whoever makes one run while another is replayed has let go of the group before this one by its second run;
        # who takes turns, at once.
        if (within or self._reader.state.threads == 1) and self._groups:
            self._begin()

        def decode() -> Run:
            versions = min(self._reader.state.steps_at_once, len(self._read))
            return self._reader.state.run([self._read.popleft() for _ in range(versions)], threads=threads)

        made = await asyncio.to_thread(decode)
        self.due = made.last + 1
        return made

    def close(self) -> None:
        """Stop what is being read."""
        if self._coming is not None:
            self._coming[1].cancel()
            self._coming[1].add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks

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
        await asyncio.wait({coming}, timeout=self.left_s + ANSWER_S)
        self.left_s = max(0.0, self.left_s - (loop.time() - began))
        if not coming.done():
            coming.cancel()
            raise DeadlineExceeded(
                f"reading {', '.join(str(source.key) for source in group)} did not finish in time: "
                f"{self._reader.deadline_s:g} s were spent waiting for tiers"
            )
        found = [coming.result()]
        del coming  # what is parsed below is to be let go there
        await asyncio.to_thread(self._take, group, found)

    def _take(self, group: Sequence[Copy], found: list[list[container.Shard]]) -> None:
        """Parse a group that was read. It is taken out of the list, as in :meth:`Reader._digest`."""
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

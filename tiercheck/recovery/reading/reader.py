"""Reading one rank's part of a recovery point: once to verify all of it, and once more to replay it.

If a copy turned out to be damaged in the middle of a replay, the ranks would be at different versions, and some of them
between versions. So nothing of the live state may change before every rank knows that it can read *all* of its part.
There are three ways to know that:

- Keep what was verified in memory until it is replayed. The memory grows by a gradient with each version, and so does
  the risk that the recovery of a long chain is killed for it.
- Verify while replaying, and go back to the base if a copy is damaged. Nothing is read twice, but a recovery that
  fails leaves a state that never was.
- Verify everything and keep what fits, then replay, and read the rest again. That is what is done here. The second
  read costs nothing if a tier maps its objects (shared memory), and little if the page cache has them. It takes place
  while the versions before are being replayed.

A long base that no tier maps is verified as it comes, through a few windows
(:mod:`tiercheck.recovery.reading.landing`). It is placed in memory that the optimizer keeps. Only the trained tensors
are copied once more, and their memory is freed then. Beside the base and the live state at most two *batches* are in
memory, whatever the length of the chain: a batch is one object, or several that together hold no more versions than are
replayed at a time. The chain is verified from its end to its beginning, two batches at a time. So the two that are
verified last stay in memory, and the replay begins with them: a chain of two batches is read once.

A copy may still go bad between the two reads. So the second read verifies every byte again, and checks that it belongs
to the same shard. A copy that fails is quarantined, and the versions that are still due are read from other copies. If
there is none, the part is :class:`Lost`: the ranks then agree to load the base again, and to replay up to an older
version (:mod:`tiercheck.recovery.restorer`).

What an error means depends on its kind. Damage (``Corruption``), and an object that was missing twice, cost the copy.
So does a form that this job cannot use although the checksums hold (``Unusable``), but then nothing older is restored
in its place. Any other error may pass: other copies are read meanwhile, if there are any. If not, this one is tried
again, with growing pauses, until the deadline. Then the recovery is refused, and names tier, rank and error: the copy
may be whole, so nothing older is restored in its place.

Reads have deadlines. The read of an object that another tier holds too may take half of the time that is left. If
nothing has come by then, its tier counts as silent, and is asked only for what no other tier has. What comes gives the
time back, so that a deadline bounds silence and not the length of a checkpoint (:class:`Patience`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tiercheck.errors import ConfigurationError, Corruption, RecoveryError, TierError, Transient
from tiercheck.format import container
from tiercheck.format.references import References, read_references
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import Stream
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.recovery.plan import Plan, Unreachable, batches, grouped, plan
from tiercheck.recovery.reading.batches import ANSWER_S, Batches
from tiercheck.recovery.reading.copies import Copies, Failed, OutOfReach, Unusable
from tiercheck.recovery.reading.landing import landed
from tiercheck.recovery.reading.patience import Patience, time_to_read
from tiercheck.recovery.reading.verifying import verified
from tiercheck.replication.objects.asking import asked_twice
from tiercheck.streams.errors import Undecodable, ill_formed_is_corrupt
from tiercheck.streams.state import Rebuilt, Record, Run, StateReader
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import Fidelity

__all__ = ["ANSWER_S", "Lost", "OutOfReach", "Reader", "VerifiedPart"]

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCHES_AT_ONCE = 2
"""How many batches are in memory: one that is being replayed, and the next."""
OBJECTS_AT_ONCE = 4
"""How many objects of a batch are read at a time."""
MAPPED_MAX = 128
"""So many that a tier maps stay mapped until they are replayed: each of them holds a descriptor, and by default a
process may have 1,024. The others are mapped again."""


class Lost(RecoveryError):
    """The last copy of a version turned out to be damaged in the middle of a replay."""


@dataclass(frozen=True)
class VerifiedPart:
    """One rank's part of a recovery point, all of which was read and verified."""

    plan: Plan
    base: Any
    """The decoded base. It refers to memory that lives as long as this part."""
    start: Any
    """What is loaded: the base, or the state that a snapshot makes of it, if one leads to the point."""
    references: References | None = None
    """The base's references to constants, which it does not hold itself."""
    is_given: bool = False
    """Whether loading the base takes over its memory. Then it can be loaded only once."""

    @property
    def point(self) -> RecoveryPoint:
        return self.plan.point

    @property
    def constants(self) -> tuple[Copy, References] | None:
        """The copy of the constants that the base refers to, and the references."""
        source, references = self.plan.constants, self.references
        return None if source is None or references is None else (source, references)


@dataclass
class Reader:
    """Reads what one rank needs from its copies. Its coroutines run on the event loop.

    ``state`` decodes shards. ``deadline_s`` bounds the time in which nothing comes from the tiers. In the methods,
    ``own`` are the rank's copies.
    """

    hierarchy: OpenHierarchy
    rank: int
    deadline_s: float
    state: StateReader
    lineage: Lineage
    """The job's own past. What another job wrote does not belong to it."""
    nbytes: Mapping[Copy, int] = field(default_factory=dict)
    """How long each copy is: one that comes whole may take so much longer than the deadline."""
    copies: Copies = field(init=False)
    used: list[Copy] = field(default_factory=list)
    """The copies that the last recovery used, in order."""
    read_bytes: int = 0
    """Bytes read from the tiers so far. What is read twice counts twice, unless the tier maps it."""
    _base: tuple[Copy, Copy | None, Any, References | None, bool] | None = None
    """The copy of the base, that of its constants, the decoded base, its references, and whether loading takes over its
    memory."""
    _digests: dict[Copy, str] = field(default_factory=dict)
    """By verified copy: the digest of its header, which holds the checksums of everything else."""
    _held: dict[Copy, memoryview] = field(default_factory=dict)
    """By copy: content that need not be read again."""

    def __post_init__(self) -> None:
        self.copies = Copies(self.hierarchy, self.rank, self.deadline_s)

    @property
    def quarantined(self) -> dict[Copy, str]:
        """Copies that failed, and why."""
        return self.copies.quarantined

    def time_to_read(self, sources: Iterable[Copy]) -> float:
        """The most that these copies may take to come, in seconds, beside the deadline."""
        return time_to_read(sum(self.nbytes.get(source, 0) for source in sources))

    async def runs(self, part: VerifiedPart, own: Collection[Copy], *, threads: int) -> AsyncGenerator[Run, None]:
        """The differentials of a verified part from first to last, in runs to be replayed. Each is read, verified and
        decoded when it is asked for, by at most ``threads`` threads. None if a snapshot stands for them.

        Errors: ``Lost`` if the last copy of a version has gone bad since it was verified; ``OutOfReach``;
        ``DeadlineExceeded``.
        """
        if part.is_given:
            self._base = None  # its memory is the state's by now, and is written to
        if part.point.by_snapshot:
            self.used = list(part.plan.sources)
            return
        self.used = list(part.plan.leading)
        left_s = self.deadline_s
        due = part.point.anchor + 1
        chosen: tuple[Copy, ...] | Unreachable = part.plan.batches
        self.copies.troubled.clear()
        while not isinstance(chosen, Unreachable):
            stream = Batches(self, part, own, deque(grouped(chosen, self.state.steps_at_once)), due, left_s)
            try:
                while stream.due <= part.point.last:
                    yield await stream.run(threads)  # a name here would keep the memory of what was replayed
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
        """Loading what the part's base leads to failed. Returns whether there is another copy of the base to try."""
        anchor = part.plan.anchor
        others = [source for source in self.copies.usable(own) if source.key == anchor.key and source != anchor]
        if others:
            why = f"it cannot be loaded: {type(error).__name__}: {error}"
            self.copies.quarantine(anchor, self._unusable(anchor, why))
            self._base = None
        return bool(others)

    def reached(self, part: VerifiedPart, rebuilt: Rebuilt) -> tuple[Fidelity, tuple[str, ...]]:
        """The fidelity of the state that was rebuilt of the part, and the reasons for it."""
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
        """Read and verify all that the rank needs to get to ``point``. ``None`` if no good copy of some version is
        left; :attr:`quarantined` then has more copies. Errors: ``OutOfReach``; ``DeadlineExceeded``."""
        patience = Patience(self.deadline_s)
        choice = partial(plan, point, self.rank, order=self.hierarchy.order)
        while True:
            chosen = self.copies.choose(own, choice)
            if isinstance(chosen, Unreachable):
                if not self.copies.has_unusable(chosen.stream, chosen.version):  # else the start is refused, and why
                    log.warning("rank %d has no good copy of %s %d", self.rank, chosen.stream, chosen.version)
                self._let_go()
                return None
            try:
                base, references, is_given = await self._verified_base(chosen, own, patience)
                await self._verify_batches(chosen, base, own, patience)
                led = point.by_snapshot  # else the replay begins with the base, or the base is the point
                start = await self._advanced(chosen.batches[0], base, own, patience) if led else base
                return VerifiedPart(chosen, base, start, references, is_given)
            except Failed as failed:
                self.copies.note(failed)
                self._let_go()
            if pause_s := self.copies.pause(own, choice, patience.left_s):
                await asyncio.sleep(pause_s)

    async def _verified_base(
        self, chosen: Plan, own: Collection[Copy], patience: Patience
    ) -> tuple[Any, References | None, bool]:
        source = chosen.anchor
        if self._base is not None and self._base[:2] == (source, chosen.constants):
            return self._base[2:]
        self._base = None  # before the next one is read
        try:
            shard = await self._read_base(source, own, patience)
            references = read_references(shard)
        except TierError as error:
            raise Failed(source, error) from error
        constants = await self._verified_constants(chosen.constants, references, own, patience)
        try:
            base = await asyncio.to_thread(self._decoded_base, source, shard, constants)
        except TierError as error:
            raise Failed(source, error) from error
        self._base = source, chosen.constants, base, references, shard.is_given
        return base, references, shard.is_given

    async def _read_base(self, source: Copy, own: Collection[Copy], patience: Patience) -> container.Shard:
        """The base, with every byte verified. A long base that its tier does not map is verified as it comes, and the
        optimizer may keep the memory of its tensors."""
        capabilities = self.hierarchy.tiers[source.tier].capabilities
        if source not in self._held and capabilities.ranged_get and not capabilities.mappable:
            name, parsed = self.copies.name(source), partial(self._parsed_header, source)
            came = partial(patience.came, source)
            landing = partial(landed, key=str(source.key), tier=name, parsed=parsed, came=came)
            found = await self._asked(source, own, patience, landing)
            if found is not None:
                self.read_bytes += found.nbytes
                return found
        shard = self._parsed(source, await self._get(source, own, patience))
        await verified([shard], self.state.threads)
        return shard

    async def _verified_constants(
        self, source: Copy | None, references: References | None, own: Collection[Copy], patience: Patience
    ) -> container.Shard | None:
        """The constants that a base refers to, with every byte verified. Errors: ``Failed``, for their copy."""
        if source is None or references is None:
            return None
        name, key = self.copies.name(source), str(source.key)
        try:
            shard = container.parse(await self._get(source, own, patience), key=key, tier=name)
            references.check(shard.header, tier=name)
            await verified([shard], self.state.threads)
        except TierError as error:
            raise Failed(source, error) from error
        return shard

    def _decoded_base(self, source: Copy, shard: container.Shard, constants: container.Shard | None) -> Any:
        """Errors: ``Corruption``; ``Unusable``."""
        with self._form(source, shard):
            return self.state.base(shard, constants, tier=self.copies.name(source), places=self._places)

    @contextmanager
    def _form(self, source: Copy, shard: container.Shard) -> Iterator[None]:
        """A context in which a shard is decoded. If that fails although its checksums hold, the copy has another form
        than this job's state. Errors: ``Corruption``; ``Unusable``."""
        try:
            with ill_formed_is_corrupt(tier=self.copies.name(source), key=str(source.key)):
                yield
        except (Corruption, ConfigurationError) as error:
            shard.verify()
            raise self._unusable(source, error.message if isinstance(error, Corruption) else str(error)) from error

    def _unusable(self, source: Copy, why: str) -> Unusable:
        return Unusable(why, tier=self.copies.name(source), key=str(source.key))

    def _led_on(self, source: Copy, base: Any, shard: container.Shard) -> Any:
        """The state that a snapshot makes of the base. Errors: ``Corruption``; ``Unusable``."""
        with self._form(source, shard):
            return self.state.led_on(base, shard, tier=self.copies.name(source))

    async def _advanced(self, source: Copy, base: Any, own: Collection[Copy], patience: Patience) -> Any:
        """The state that a snapshot makes of the base. It is decoded while everything is verified: so it is not read
        again, and a snapshot that cannot be decoded is known before anything is changed."""
        try:
            shard = self._parsed(source, await self._get(source, own, patience))
            return await asyncio.to_thread(self._led_on, source, base, shard)
        except TierError as error:
            raise Failed(source, error) from error

    async def _verify_batches(self, chosen: Plan, base: Any, own: Collection[Copy], patience: Patience) -> None:
        groups = grouped(chosen.batches, self.state.steps_at_once)
        staying = {source for group in groups[:BATCHES_AT_ONCE] for source in group}
        rooms, slots = asyncio.Semaphore(BATCHES_AT_ONCE), asyncio.Semaphore(OBJECTS_AT_ONCE)
        verifying = asyncio.Lock()  # one shard at a time, on all threads
        failures: list[Exception] = []

        async def verify(source: Copy) -> None:
            async with slots:
                if failures or source in self._digests:
                    return
                try:
                    found = [await self._get(source, own, patience)]
                    if source in staying or (self._mapped(source) and len(self._held) < MAPPED_MAX):
                        self._held[source] = found[0]
                    async with verifying:
                        self._digests[source] = await self._digest(source, found, base)
                except Exception as error:  # noqa: BLE001  raised below, once the others have stopped
                    failures.append(Failed(source, error) if isinstance(error, TierError) else error)

        async def verify_group(group: Sequence[Copy]) -> None:
            await rooms.acquire()
            await asyncio.gather(*(verify(source) for source in group))
            if staying.isdisjoint(group):  # a batch that stays in memory keeps its place
                rooms.release()

        # A semaphore admits in order, so the last group is verified first.
        await asyncio.gather(*(verify_group(group) for group in reversed(groups)))
        for failure in failures[1:]:
            if isinstance(failure, Failed):
                self.copies.note(failure)
        if failures:
            raise failures[0]

    async def _digest(self, source: Copy, found: list[memoryview], base: Any) -> str:
        """Verify every byte of the one item of ``found``, and that its differentials belong to the base's state. It is
        taken out of the list, since a thread pool keeps arguments for a while after the result is there."""
        shards = [await asyncio.to_thread(lambda: self._parsed(source, found.pop()))]
        await verified(shards, self.state.threads)
        return await asyncio.to_thread(self._digest_of_base, source, shards, base)

    def _digest_of_base(self, source: Copy, shards: list[container.Shard], base: Any) -> str:
        shard = shards.pop()
        if source.key.stream is Stream.DIFFERENTIAL:
            self.differentials(source, shard, base)
        return shard.digest

    async def read(self, group: Sequence[Copy], own: Collection[Copy], seconds: float) -> list[container.Shard]:
        """The shards of verified copies, read once more. Their tensors are verified when they are used.

        Errors: ``Failed``, for the first copy in order.
        """
        patience = Patience(seconds)
        slots = asyncio.Semaphore(OBJECTS_AT_ONCE)

        async def read_one(source: Copy) -> container.Shard:
            async with slots:
                try:
                    shard = self._parsed(source, await self._get(source, own, patience))
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
        """The differentials in a shard. Errors: ``Corruption``; ``Unusable`` if one does not belong to the base's
        state."""
        with self._form(source, shard):
            return self.state.records(shard, base, tier=self.copies.name(source))

    async def _get(self, source: Copy, own: Collection[Copy], patience: Patience) -> memoryview:
        """The object's bytes, read from its tier unless they are in memory. Errors: ``TierError``; ``Transient`` if
        nothing came in the time that is left (in half of it, if another tier has the object too)."""
        held = self._held.get(source)
        if held is not None:
            if not self._mapped(source):
                del self._held[source]
            return held
        more_s = self.time_to_read([source])
        content = await self._asked(source, own, patience, lambda driver: driver.get(str(source.key)), more_s)
        patience.came(source, content.nbytes)
        self.read_bytes += content.nbytes
        return content

    async def _asked(
        self,
        source: Copy,
        own: Collection[Copy],
        patience: Patience,
        ask: Callable[[TierDriver], Awaitable[T]],
        more_s: float = 0.0,
    ) -> T:
        """The answer of the copy's tier. ``more_s``: how much longer it may take than what is left. Errors: as
        :meth:`_get`."""
        driver = self.hierarchy.tiers[source.tier].driver
        reading = asyncio.ensure_future(asked_twice(lambda: ask(driver)))
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # so that nobody logs its error
        shared = self.copies.is_in_another_tier(source, own)
        try:
            while not reading.done():
                arrivals = patience.arrivals
                wait_s = (patience.left_s / 2 if shared else patience.left_s) + more_s
                await asyncio.wait({reading}, timeout=wait_s)
                if reading.done() or patience.arrivals > arrivals:
                    continue
                self.copies.silent.add(source.tier)
                name = self.copies.name(source)
                raise Transient(f"nothing came within {wait_s:.3g} s", tier=name, key=str(source.key))
        finally:
            # Not waited for: a tier that does not answer may not react to a cancellation either.
            reading.cancel()
        return reading.result()

    def _parsed(self, source: Copy, content: memoryview) -> container.Shard:
        shard = container.parse(content, key=str(source.key), tier=self.copies.name(source))
        self._check_own(source, shard.metadata)
        return shard

    def _parsed_header(self, source: Copy, beginning: memoryview, nbytes: int) -> container.Shard:
        """A shard of ``nbytes``, of which ``beginning`` holds the header. Errors: as :meth:`_parsed`."""
        key, tier = str(source.key), self.copies.name(source)
        header = container.parse_header(beginning, nbytes, key=key, tier=tier)
        self._check_own(source, header.metadata)
        return container.Shard(header, beginning, key=key, tier=tier)

    def _check_own(self, source: Copy, metadata: container.ShardMetadata) -> None:
        reason = self.lineage.disowns(source.key.generation, metadata.token)
        if reason is not None:
            raise Corruption(reason, tier=self.copies.name(source), key=str(source.key))

    def _let_go(self) -> None:
        """Free what no tier maps: another plan may begin with other batches."""
        self._held = {source: content for source, content in self._held.items() if self._mapped(source)}

    def _mapped(self, source: Copy) -> bool:
        return self.hierarchy.tiers[source.tier].capabilities.mappable

    @property
    def _places(self) -> str:
        return ", ".join(tier.driver.url for tier in self.hierarchy.tiers)

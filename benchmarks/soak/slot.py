"""One task that puts, gets, deletes and lists, and holds every answer against the ledger."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial

from xxhash import xxh3_64_intdigest as xxh3_64

from benchmarks.soak.attempts import Outcome, TierBackoff
from benchmarks.soak.content import Damaged, Stamp, part_of, payload_of, read_stamp, size_of
from benchmarks.soak.ledger import Counted, OwnKey, PoolAccounting, State
from benchmarks.soak.losses import Losses
from tiercheck.errors import AlreadyExists, NotFound, PreconditionFailed, Unsupported
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ByteRange, ObjectInfo, PutMode

__all__ = ["Slot"]

HELD_MAX = 4


class Slot:
    """The tasks of a soak each have one. ``linger_s``: how long after a call of unknown outcome it may still act."""

    def __init__(
        self,
        number: int,
        ledger: PoolAccounting,
        attempts: TierBackoff,
        losses: Losses,
        chance: random.Random,
        *,
        linger_s: float,
        large_bytes: int,
    ) -> None:
        self.number = number
        self.ledger = ledger
        self.attempts = attempts
        self.losses = losses
        self.chance = chance
        self.capabilities = attempts.driver.capabilities
        self._linger_s = linger_s
        self._large_bytes = large_bytes
        self._own = tuple(ledger.own_keys(number))
        self._etags: dict[str, str] = {}
        self._abandoned: set[OwnKey] = set()
        self._held: list[tuple[memoryview, int]] = []
        self._seen: dict[OwnKey, int] = {}
        # What an earlier incarnation was killed in the middle of is of unknown outcome.
        until = time.monotonic() + linger_s
        self._doubtful = {own: until for own in self._own if ledger.begun(own) != ledger.acknowledged(own)}

    def count(self, what: Counted) -> None:
        self.ledger.count(self.number, what)

    async def one_operation(self) -> None:
        """Something on a key of its own, or a look at another's."""
        await self._resolve_some()
        self._check_held()
        clear = [own for own in self._own if own not in self._doubtful and own not in self._abandoned]
        foreign = self.chance.choice(self.ledger.keys)
        on_own: list[tuple[Callable[[OwnKey], Awaitable[None]], int]] = [
            (self.put, 20),
            (self.reserve_and_publish, 10 if self.capabilities.mappable else 0),
            (self.delete, 8),
            (self.get, 12),
            (self.ranged_get, 8),
            (self.stat, 6),
            (self.create, 5),
            (self.update, 5),
        ]
        if clear and self.chance.random() < 0.75:
            operation = self.chance.choices([each for each, _ in on_own], [weight for _, weight in on_own])[0]
            await operation(self.chance.choice(clear))
        elif self.chance.random() < 0.7:
            await self.foreign_get(foreign)
        else:
            await self.list_objects()

    # Changes.

    async def put(self, own: OwnKey) -> None:
        self.count(Counted.PUTS)
        state, stamp = self._begin_put(own)
        payload = payload_of(stamp)
        self._settle(own, state, await self.attempts.call(lambda driver: driver.put(own.key, payload), own.key))

    async def reserve_and_publish(self, own: OwnKey) -> None:
        self.count(Counted.RESERVATIONS)
        state, stamp = self._begin_put(own)
        spare = self.chance.choice((0, 1, 5000))

        async def publish(driver: TierDriver) -> ObjectInfo:
            reservation = await driver.reserve(own.key, stamp.nbytes + spare)
            try:
                filled = 0
                for piece in payload_of(stamp):
                    reservation.buffer[filled : filled + piece.nbytes] = piece
                    filled += piece.nbytes
                return await reservation.publish(stamp.nbytes)
            except BaseException:
                await reservation.drop()
                raise

        self._settle(own, state, await self.attempts.call(publish, own.key))

    async def delete(self, own: OwnKey) -> None:
        self.count(Counted.DELETES)
        state = self.ledger.begin(own, present=False)
        self._settle(own, state, await self.attempts.call(lambda driver: driver.delete([own.key]), own.key))

    async def create(self, own: OwnKey) -> None:
        self.count(Counted.CREATES)
        expected: type[Exception] | None = AlreadyExists if self.ledger.acknowledged(own).present else None
        await self._conditional(own, PutMode.CREATE, expected)

    async def update(self, own: OwnKey) -> None:
        self.count(Counted.UPDATES)
        etag = self._etags.get(own.key)
        if etag is None or self.chance.random() < 0.2:
            await self._conditional(own, PutMode.UPDATE("no such etag"), PreconditionFailed)
        else:
            await self._conditional(own, PutMode.UPDATE(etag), None)

    async def _conditional(self, own: OwnKey, mode: PutMode, expected: type[Exception] | None) -> None:
        """Nobody else writes to this key: whether the condition holds is known beforehand."""
        if not self.capabilities.conditional_put:
            expected = Unsupported
        state, stamp = self._begin_put(own)
        payload = payload_of(stamp)
        outcome = await self.attempts.call(lambda driver: driver.put(own.key, payload, mode=mode), own.key)
        if expected is not None and isinstance(outcome.error, expected):
            return
        if expected is not None and outcome.done:
            self._lost(own, "a condition was ignored", f"{mode} should raise {expected.__name__}")
        self._settle(own, state, outcome)

    def _begin_put(self, own: OwnKey) -> tuple[State, Stamp]:
        state = self.ledger.begin(own, present=True)
        return state, self._stamp(own, state)

    def _stamp(self, own: OwnKey, state: State) -> Stamp:
        return Stamp(own.key, own.slot, state.sequence, size_of(own.key, state.sequence, self._large_bytes))

    def _settle(self, own: OwnKey, state: State, outcome: Outcome[ObjectInfo] | Outcome[None]) -> None:
        """Enter a change's outcome."""
        if outcome.done:
            self._acknowledge(own, state, outcome.value)
        elif outcome.doubtful:
            self._doubtful[own] = time.monotonic() + self._linger_s
        elif not outcome.full:
            self._lost(own, "a change was refused without reason", f"{type(outcome.error).__name__}: {outcome.error}")

    def _acknowledge(self, own: OwnKey, state: State, info: ObjectInfo | None) -> None:
        self.ledger.acknowledge(own, state)
        self._etags.pop(own.key, None)
        if info is not None:
            self._etags[own.key] = info.etag
            self._check_info(own, state, info)

    async def _resolve_some(self) -> None:
        """Look at what calls of unknown outcome have left, once none of them can act any more."""
        now = time.monotonic()
        for own in [own for own, until in self._doubtful.items() if until <= now]:
            outcome = await self.attempts.plain(partial(stamped, key=own.key), own.key)
            if outcome.doubtful or outcome.full:
                self._doubtful[own] = time.monotonic() + 0.1
                continue
            del self._doubtful[own]
            self._resolve(own, outcome)

    def _resolve(self, own: OwnKey, outcome: Outcome[Stamp]) -> None:
        begun, acknowledged = self.ledger.begun(own), self.ledger.acknowledged(own)
        if isinstance(outcome.error, NotFound):
            matches = [state for state in (begun, acknowledged) if not state.present]
        elif outcome.value is not None:
            found = outcome.value
            matches = [state for state in (begun, acknowledged) if state.present and found == self._stamp(own, state)]
        else:
            matches = []
        if not matches:
            text = f"neither {begun} nor {acknowledged} but {outcome.value or outcome.error}"
            self._lost(own, "a call of unknown outcome left something else", text)
            return
        self.count(Counted.TURNED_OUT_NEW if matches[0] == begun else Counted.TURNED_OUT_OLD)
        self._etags.pop(own.key, None)
        self.ledger.acknowledge(own, matches[0])

    # Looks at its own keys, whose state is known exactly.

    async def get(self, own: OwnKey) -> None:
        self.count(Counted.GETS)
        state = self.ledger.acknowledged(own)
        hold = self.chance.random() < 0.3
        into = None
        if self.chance.random() < 0.5:
            into = memoryview(bytearray(self._stamp(own, state).nbytes + self.chance.choice((0, 1, 100))))
        outcome = await self.attempts.call(lambda driver: driver.get(own.key, into=into), own.key)
        content = outcome.value
        if content is None:
            self._check_absence(own, state, outcome)
            return
        self._check_content(own, state, content)
        if hold:
            self._held = [*self._held[1 - HELD_MAX :], (content, xxh3_64(content))]
        else:
            content.release()

    async def ranged_get(self, own: OwnKey) -> None:
        self.count(Counted.RANGED_GETS)
        state = self.ledger.acknowledged(own)
        stamp = self._stamp(own, state)
        start = self.chance.randint(0, stamp.nbytes)
        stop = self.chance.randint(start, stamp.nbytes)
        outcome = await self.attempts.call(lambda driver: driver.get(own.key, range=ByteRange(start, stop)), own.key)
        if isinstance(outcome.error, Unsupported) and not self.capabilities.ranged_get:
            return
        if outcome.value is None:
            self._check_absence(own, state, outcome)
        elif not state.present:
            self._lost(own, "a deleted object is back", f"{stop - start} bytes were read")
        elif bytes(outcome.value) != part_of(stamp, start, stop):
            self._lost(own, "a range holds other bytes", f"[{start}, {stop}) of {stamp}")

    async def stat(self, own: OwnKey) -> None:
        self.count(Counted.STATS)
        state = self.ledger.acknowledged(own)
        outcome = await self.attempts.call(lambda driver: driver.stat(own.key), own.key)
        if outcome.value is None:
            self._check_absence(own, state, outcome)
            return
        self._check_info(own, state, outcome.value)
        if outcome.value.etag != self._etags.setdefault(own.key, outcome.value.etag):
            self._lost(own, "an etag changed by itself", f"{outcome.value} was {self._etags[own.key]!r}")

    def _check_absence(self, own: OwnKey, state: State, outcome: Outcome[memoryview] | Outcome[ObjectInfo]) -> None:
        if outcome.doubtful or (isinstance(outcome.error, NotFound) and not state.present):
            return
        what = "an object is gone" if isinstance(outcome.error, NotFound) else "a read was refused without reason"
        self._lost(own, what, f"{type(outcome.error).__name__}: {outcome.error}; it should be {state}")

    def _check_info(self, own: OwnKey, state: State, info: ObjectInfo) -> None:
        expected = self._stamp(own, state)
        if not state.present:
            self._lost(own, "a deleted object is back", str(info))
        elif (info.key, info.nbytes) != (own.key, expected.nbytes):
            self._lost(own, "an object has another size", f"{info} should be {expected}")

    def _check_content(self, own: OwnKey, state: State, content: memoryview) -> None:
        try:
            found = read_stamp(own.key, content)
        except Damaged as damage:
            self._lost(own, "an object is damaged", f"{damage}; it should be {state}")
            return
        if not state.present:
            self._lost(own, "a deleted object is back", str(found))
        elif found != self._stamp(own, state):
            self._lost(own, "an acknowledged put is not what is read", f"{found} should be {self._stamp(own, state)}")

    def _check_held(self) -> None:
        """What was read stays as it was, whatever has become of the object since."""
        for content, digest in self._held:
            if xxh3_64(content) != digest:
                self.losses.report("a buffer that was read has changed", None, f"{content.nbytes} bytes")

    # Looks at what others change at the same time: the answer lies between two bounds.

    async def foreign_get(self, own: OwnKey) -> None:
        self.count(Counted.GETS)
        low = self.ledger.acknowledged(own)
        outcome = await self.attempts.call(lambda driver: stamped(driver, own.key), own.key)
        high = self.ledger.begun(own)
        if outcome.doubtful or outcome.full:
            return
        if isinstance(outcome.error, NotFound):
            in_between = high.sequence > low.sequence + 1
            if low.present and high.present and not in_between:
                self.losses.report("an object is gone", own.key, f"it should be between {low} and {high}")
            return
        if outcome.value is None:
            error = outcome.error
            self.losses.report("a read was refused without reason", own.key, f"{type(error).__name__}: {error}")
            return
        self._check_bounds(own, low, outcome.value, high)

    def _check_bounds(self, own: OwnKey, low: State, found: Stamp, high: State) -> None:
        sequence = found.sequence
        expected = self._stamp(own, State(sequence, True))
        if found.writer < 0:
            self.losses.report("an object is damaged", own.key, found.key)
            return
        if not low.sequence <= sequence <= high.sequence or (sequence == low.sequence and not low.present):
            self.losses.report("a read is stale, or of the future", own.key, f"{found} between {low} and {high}")
        elif found != expected:
            self.losses.report("an object is another's", own.key, f"{found} should be {expected}")
        elif sequence < self._seen.get(own, 0):
            self.losses.report("a reader saw time go back", own.key, f"{found} after {self._seen[own]}")
        self._seen[own] = max(sequence, self._seen.get(own, 0))

    async def list_objects(self) -> None:
        self.count(Counted.LISTS)
        prefix = self.chance.choice(("", "soak/", f"soak/{self.chance.randrange(self.ledger.slots):02d}/", "soak/00/a"))
        keys = [own for own in self.ledger.keys if own.key.startswith(prefix)]
        low = {own: self.ledger.acknowledged(own) for own in keys}
        still = {own for own in keys if self.ledger.begun(own) == low[own]}
        outcome = await self.attempts.call(lambda driver: listed(driver, prefix), prefix)
        if outcome.doubtful:
            return
        if outcome.value is None:
            error = outcome.error
            self.losses.report("a listing was refused", prefix, f"{type(error).__name__}: {error}")
            return
        high = {own: self.ledger.begun(own) for own in keys}
        self._check_listing(prefix, outcome.value, low, high)
        found = {info.key for info in outcome.value}
        for own in still:
            if high[own] == low[own] and (own.key in found) != low[own].present:
                self.losses.report("a listing is wrong", own.key, f"listed: {own.key in found}; it is {low[own]}")

    def _check_listing(
        self, prefix: str, infos: list[ObjectInfo], low: dict[OwnKey, State], high: dict[OwnKey, State]
    ) -> None:
        encoded = [info.key.encode() for info in infos]
        if any(first >= second for first, second in itertools.pairwise(encoded)):
            self.losses.report("a listing is out of order", prefix, str([info.key for info in infos]))
        for info in infos:
            own = self.ledger.by_key.get(info.key)
            if own is None:
                if prefix or not info.key.startswith(("counters/", "claims/")):
                    self.losses.report("a listing names what nobody put", info.key, str(info))
                continue
            sequences = range(low[own].sequence, high[own].sequence + 1)
            if all(info.nbytes != size_of(own.key, sequence, self._large_bytes) for sequence in sequences):
                self.losses.report("a listing shows a part of an object", info.key, f"{info}, operations {sequences}")

    def _lost(self, own: OwnKey, what: str, text: str) -> None:
        """Report it, and leave the key alone from here on: one loss is told once."""
        self._abandoned.add(own)
        self.losses.report(what, own.key, text)


async def stamped(driver: TierDriver, key: str) -> Stamp:
    """The object's stamp, all of it checked. A damaged one has a stamp that nobody wrote."""
    with await driver.get(key) as content:
        try:
            return read_stamp(key, content)
        except Damaged as damage:
            return Stamp(f"{key} ({damage})", -1, -1, content.nbytes)


async def listed(driver: TierDriver, prefix: str) -> list[ObjectInfo]:
    return [info async for info in driver.list(prefix)]

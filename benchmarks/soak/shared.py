"""What all slots fight for: counters that each increments by compare-and-swap, and claims that one creates.

A counter's content is one number a slot, and a slot only ever raises its own. So whoever reads it can say of each
increment whether it is there, and an increment of unknown outcome is known by the next look.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest as xxh3_64

from benchmarks.soak.content import Damaged, Stamp, payload_of
from benchmarks.soak.ledger import CLAIMS, COUNTERS, Claim, Counted, PoolAccounting
from benchmarks.soak.slot import Slot, stamped
from tiercheck.errors import AlreadyExists, NotFound, PreconditionFailed, Unsupported
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import PutMode

__all__ = ["Shared", "claim_key", "counter_key", "read_counter"]

CLAIM_BYTES = 200


def counter_key(counter: int) -> str:
    return f"counters/{counter}"


def claim_key(number: int) -> str:
    return f"claims/{number:04d}"


def counter_content(values: list[int]) -> bytes:
    fields = struct.pack(f"<{len(values)}Q", *values)
    return fields + xxh3_64(fields).to_bytes(8, "little")


def counter_values(content: memoryview, slots: int) -> list[int]:
    """Errors: ``Damaged``."""
    fields, digest = bytes(content[:-8]), bytes(content[-8:])
    if len(fields) != slots * 8 or xxh3_64(fields) != int.from_bytes(digest, "little"):
        raise Damaged(f"the counter's {content.nbytes} bytes are not those that were written")
    return list(struct.unpack(f"<{slots}Q", fields))


async def read_counter(driver: TierDriver, counter: int, slots: int) -> tuple[str | None, list[int]]:
    """Its etag and values; no etag, and zeros, where nobody has incremented it yet. Errors: ``Damaged``."""
    key = counter_key(counter)
    try:
        # The etag first: where the counter changes in between, the swap must fail.
        etag = (await driver.stat(key)).etag
        with await driver.get(key) as content:
            return etag, counter_values(content, slots)
    except NotFound:
        return None, [0] * slots


class Shared:
    """The part of a slot that races for what it does not own."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._accounting: PoolAccounting = slot.ledger
        self._number = slot.number
        # Increments of unknown outcome may have come about; a refused one must not.
        self._doubtful = {
            counter
            for counter in range(COUNTERS)
            if self._accounting.increments_begun(counter, self._number)
            > self._accounting.increments_acknowledged(counter, self._number)
        }

    async def one_operation(self) -> None:
        """An increment, an attempt to claim, or a look at a claim."""
        kind = self._slot.chance.random()
        if kind < 0.6:
            await self.increment(self._slot.chance.randrange(COUNTERS))
        elif kind < 0.8:
            await self.claim()
        else:
            await self.look_at_claim(self._slot.chance.randrange(CLAIMS))

    # Counters.

    async def increment(self, counter: int) -> None:
        """One try; where another slot was faster, there is another time."""
        slot, ledger = self._slot, self._accounting
        slot.count(Counted.INCREMENTS)
        low = [ledger.increments_acknowledged(counter, other) for other in range(ledger.slots)]
        outcome = await slot.attempts.call(lambda driver: counted(driver, counter, ledger.slots), counter_key(counter))
        if outcome.value is None:
            if not outcome.doubtful and not outcome.full:
                self._lost(counter, "a counter cannot be read", f"{type(outcome.error).__name__}: {outcome.error}")
            return
        etag, values = outcome.value
        if not self._check(counter, low, values):
            return
        values[self._number] += 1
        value = values[self._number]
        ledger.begin_increment(counter, self._number, value)
        mode = PutMode.CREATE if etag is None else PutMode.UPDATE(etag)
        content = counter_content(values)
        swap = await slot.attempts.call(
            lambda driver: driver.put(counter_key(counter), [content], mode=mode), counter_key(counter)
        )
        if swap.done:
            ledger.acknowledge_increment(counter, self._number, value)
            self._doubtful.discard(counter)
        elif swap.doubtful:
            self._doubtful.add(counter)
        elif not swap.full and not isinstance(swap.error, AlreadyExists | PreconditionFailed | Unsupported):
            self._lost(counter, "an increment was refused without reason", f"{type(swap.error).__name__}: {swap.error}")
        if swap.done != slot.capabilities.conditional_put and (swap.done or isinstance(swap.error, Unsupported)):
            self._lost(counter, "a capability lies", f"conditional_put is {slot.capabilities.conditional_put}")

    def _check(self, counter: int, low: list[int], values: list[int]) -> bool:
        """Hold the values against the ledger; enters what has become of an increment of unknown outcome."""
        ledger, own = self._accounting, self._number
        for other, value in enumerate(values):
            high = ledger.increments_begun(counter, other)
            if not low[other] <= value <= high:
                text = f"slot {other} counted {value}, which should be between {low[other]} and {high}"
                self._lost(counter, "an increment is lost", text)
                return False
        if values[own] > low[own]:
            if counter not in self._doubtful:
                self._lost(counter, "a refused increment came about", f"slot {own} counted {values[own]}")
            ledger.acknowledge_increment(counter, own, values[own])
            self._doubtful.discard(counter)
        return True

    def _lost(self, counter: int, what: str, text: str) -> None:
        self._slot.losses.report(what, counter_key(counter), text)

    # Claims.

    async def claim(self) -> None:
        """Try to create the next claim that this slot has not tried."""
        slot, ledger, own = self._slot, self._accounting, self._number
        free = (number for number in range(CLAIMS) if ledger.claim(number, own) is Claim.UNTRIED)
        number = next(free, None)
        if number is None:
            return
        slot.count(Counted.CLAIMS)
        key = claim_key(number)
        ledger.set_claim(number, own, Claim.BEGUN)
        payload = payload_of(Stamp(key, own, number, CLAIM_BYTES))
        outcome = await slot.attempts.call(lambda driver: driver.put(key, payload, mode=PutMode.CREATE), key)
        if outcome.done:
            ledger.set_claim(number, own, Claim.WON)
            if not slot.capabilities.conditional_put:
                slot.losses.report("a capability lies", key, "CREATE should raise Unsupported")
        elif outcome.full or isinstance(outcome.error, AlreadyExists):
            ledger.set_claim(number, own, Claim.LOST)
            if not outcome.full:
                await self.look_at_claim(number)
        elif outcome.refused and not isinstance(outcome.error, Unsupported):
            slot.losses.report("a claim was refused without reason", key, f"{outcome.error}")

    async def look_at_claim(self, number: int) -> None:
        """It is the winner's, whole, and stays so."""
        ledger, key = self._accounting, claim_key(number)
        won = {other for other in range(ledger.slots) if ledger.claim(number, other) is Claim.WON}
        outcome = await self._slot.attempts.call(lambda driver: stamped(driver, key), key)
        if isinstance(outcome.error, NotFound):
            if won:
                self._slot.losses.report("a claim is gone", key, f"slots {won} won it")
        elif outcome.value is not None:
            for text in claim_faults(ledger, number, outcome.value):
                self._slot.losses.report("a claim is not its winner's", key, text)


async def counted(driver: TierDriver, counter: int, slots: int) -> tuple[str | None, list[int]]:
    """``read_counter``, with values that nobody wrote for a damaged one."""
    try:
        return await read_counter(driver, counter, slots)
    except Damaged:
        return None, [2**63] * slots


def claim_faults(ledger: PoolAccounting, number: int, found: Stamp) -> list[str]:
    """What is wrong with a claim of which ``found`` was read."""
    states = {slot: ledger.claim(number, slot) for slot in range(ledger.slots)}
    winners = [slot for slot, state in states.items() if state is Claim.WON]
    faults = []
    if found != Stamp(claim_key(number), found.writer, number, CLAIM_BYTES):
        faults.append(f"{found} is no claim")
    if len(winners) > 1:
        faults.append(f"the slots {winners} were all told that they created it")
    if winners and found.writer not in winners:
        faults.append(f"slot {winners[0]} won it, and slot {found.writer} has it")
    if states.get(found.writer) not in (Claim.WON, Claim.BEGUN):
        faults.append(f"slot {found.writer} has it, which was told that it lost")
    return faults

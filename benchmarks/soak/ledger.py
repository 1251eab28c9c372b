"""What was begun and what was acknowledged: the oracle, in a mapped file that every process shares.

Words in a mapping outlive the process that wrote them, ``kill -9`` included. Each word has one writer, the slot it
belongs to (a *slot* is one task of one process; it owns its keys, and nobody else writes to those), and is written
in one piece. So a reader that notes what was acknowledged before its read, and what was begun by the end of it, knows
the bounds between which the answer must lie.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

__all__ = ["CLAIMS", "COUNTERS", "NAMES", "Claim", "Counted", "OwnKey", "PoolAccounting", "State"]

NAMES = ("a", "a-b/c", "a.b", "b/a", "b/a-c", "ü")
"""Each slot's keys: their order in bytes is not the order of a directory walk."""
COUNTERS = 3
CLAIMS = 256
WORD_BYTES = 8


class Claim(IntEnum):
    """How a slot's attempt to create a claim went."""

    UNTRIED = 0
    BEGUN = 1
    WON = 2
    LOST = 3


class Counted(IntEnum):
    """What each slot counts."""

    PUTS = 0
    RESERVATIONS = 1
    CREATES = 2
    UPDATES = 3
    DELETES = 4
    GETS = 5
    RANGED_GETS = 6
    STATS = 7
    LISTS = 8
    INCREMENTS = 9
    CLAIMS = 10
    CANCELLED = 11
    INJECTED = 12
    TRANSIENT = 13
    FULL = 14
    TURNED_OUT_NEW = 15
    TURNED_OUT_OLD = 16
    OPENS = 17


OPERATIONS = tuple(Counted)[: Counted.CANCELLED]


@dataclass(frozen=True)
class State:
    """A key's state after an operation: there or not. Sequence 0 is the state before the first."""

    sequence: int
    present: bool

    @property
    def word(self) -> int:
        return self.sequence << 1 | self.present

    @classmethod
    def of(cls, word: int) -> State:
        return cls(word >> 1, bool(word & 1))


@dataclass(frozen=True)
class OwnKey:
    """One key, and its place in the ledger."""

    key: str
    slot: int
    index: int


class PoolAccounting:
    """The mapped file. ``slots`` is the number of tasks in all processes; make it with :meth:`create`, once."""

    def __init__(self, path: Path, slots: int) -> None:
        self.slots = slots
        with path.open("r+b") as file:
            self._mapping = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._mapping).cast("Q")
        assert len(self._words) == words_of(slots)
        self.keys = tuple(
            OwnKey(f"soak/{slot:02d}/{name}", slot, slot * len(NAMES) + index)
            for slot in range(slots)
            for index, name in enumerate(NAMES)
        )
        self.by_key = {own.key: own for own in self.keys}
        self._counters_at = len(self.keys) * 2
        self._claims_at = self._counters_at + COUNTERS * slots * 2
        self._counted_at = self._claims_at + CLAIMS * slots

    @classmethod
    def create(cls, path: Path, slots: int) -> PoolAccounting:
        """A new file: nothing begun, nothing there."""
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, words_of(slots) * WORD_BYTES)
        return cls(path, slots)

    def close(self) -> None:
        self._words.release()
        self._mapping.close()

    # The states of keys.

    def begun(self, own: OwnKey) -> State:
        return State.of(self._words[own.index * 2])

    def acknowledged(self, own: OwnKey) -> State:
        return State.of(self._words[own.index * 2 + 1])

    def begin(self, own: OwnKey, *, present: bool) -> State:
        """The next operation on ``own`` starts; returns the state after it."""
        state = State(self.begun(own).sequence + 1, present)
        self._words[own.index * 2] = state.word
        return state

    def acknowledge(self, own: OwnKey, state: State) -> None:
        """The operation that leads to ``state`` is known to be done."""
        self._words[own.index * 2 + 1] = state.word

    # Counters: how often each slot incremented each.

    def increments_begun(self, counter: int, slot: int) -> int:
        return self._words[self._counter(counter, slot)]

    def increments_acknowledged(self, counter: int, slot: int) -> int:
        return self._words[self._counter(counter, slot) + 1]

    def begin_increment(self, counter: int, slot: int, value: int) -> None:
        self._words[self._counter(counter, slot)] = value

    def acknowledge_increment(self, counter: int, slot: int, value: int) -> None:
        self._words[self._counter(counter, slot) + 1] = value

    def _counter(self, counter: int, slot: int) -> int:
        return self._counters_at + (counter * self.slots + slot) * 2

    # Claims: keys that many try to create, and one does.

    def claim(self, number: int, slot: int) -> Claim:
        return Claim(self._words[self._claims_at + number * self.slots + slot])

    def set_claim(self, number: int, slot: int, claim: Claim) -> None:
        self._words[self._claims_at + number * self.slots + slot] = claim

    # Statistics of each slot.

    def count(self, slot: int, what: Counted) -> None:
        self._words[self._counted_at + slot * len(Counted) + what] += 1

    def counted(self, what: Counted) -> int:
        return sum(self._words[self._counted_at + slot * len(Counted) + what] for slot in range(self.slots))

    def operations_of(self, slot: int) -> int:
        start = self._counted_at + slot * len(Counted)
        return sum(self._words[start + what] for what in OPERATIONS)

    def operations(self) -> int:
        return sum(map(self.operations_of, range(self.slots)))

    def own_keys(self, slot: int) -> Iterator[OwnKey]:
        return (own for own in self.keys if own.slot == slot)


def words_of(slots: int) -> int:
    return slots * (len(NAMES) * 2 + COUNTERS * 2 + CLAIMS + len(Counted))

"""The server's side of puts, without I/O: credit is given, chunks land in reserved memory, the outcome is kept.

States of a put::

    RESERVING  --memory-->  RECEIVING  --last chunk-->  PUBLISHING  --outcome-->  remembered
         \\--no memory--> remembered     \\--abort, silence--> dropped

A chunk counts once its checksum was verified. A put is known by an id that its client drew; beginning it again
resumes it, and once it is over, answers with its outcome. So a lost answer changes nothing.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from tiercheck.errors import TierError, Transient
from tiercheck.format.copying import copy_with_xxh3
from tiercheck.keys import validate_key
from tiercheck.tiers.peer.checksums import KnownChecksums
from tiercheck.tiers.peer.messages import (
    CHUNKS_MAX,
    AbortPut,
    BadFrame,
    BeginPut,
    ChunkTaken,
    Delete,
    Done,
    Failure,
    Forgotten,
    PutChunk,
    PutState,
    checksum,
)
from tiercheck.tiers.peer.server.effects import (
    DeleteObjects,
    Desk,
    DropMemory,
    Memory,
    PublishMemory,
    ReserveMemory,
    StoreWhole,
    failure_of,
)
from tiercheck.tiers.peer.server.limits import CHUNK_BYTES_MIN
from tiercheck.types import Buffer, ObjectInfo, PutMode

__all__ = ["ABORTED", "Incoming", "Outcomes", "Phase", "Puts"]

ABORTED = "Aborted"
"""The error of a put that its own client gave up."""
MODES = ("overwrite", "create", "update")
SILENT_S = 5.0
"""A sender that has said nothing for that long gives its credit back where others wait for some."""
QUEUED_S = 60.0
"""How long a message may have been under way: its sender's ``age_ms`` is that much too small at most."""


class Phase(Enum):
    RESERVING = "reserving"
    RECEIVING = "receiving"
    PUBLISHING = "publishing"
    DROPPING = "dropping"


@dataclass
class Incoming:
    """A put under way. ``peer`` and ``request_id``: whom to answer."""

    begin: BeginPut
    peer: bytes
    request_id: int
    touched: float
    count: int
    phase: Phase = Phase.RESERVING
    memory: Memory | None = None
    received: bytearray = field(default_factory=bytearray)
    """A bit for each chunk that is there, lowest first."""
    checksums: array[int] = field(default_factory=lambda: array("Q"))
    missing: int = 0
    credit: int = 0
    aborted: bool = False
    is_waiting: bool = False
    """For credit, in the line of those that do."""

    def chunk_range(self, index: int) -> tuple[int, int]:
        start = index * self.begin.chunk_bytes
        return start, min(start + self.begin.chunk_bytes, self.begin.nbytes)

    def has(self, index: int) -> bool:
        return bool(self.received[index >> 3] >> (index & 7) & 1)


class Outcomes:
    """What became of recent puts and deletes, the oldest forgotten first."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._kept: OrderedDict[bytes, tuple[Done | Failure, float]] = OrderedDict()
        self._forgotten_until = float("-inf")

    def keep(self, outcome: Done | Failure, now: float) -> None:
        self._kept[outcome.transfer] = (outcome, now)
        if len(self._kept) > self._maximum:
            _, (_, self._forgotten_until) = self._kept.popitem(last=False)

    def get(self, transfer: bytes) -> Done | Failure | None:
        found = self._kept.get(transfer)
        return found[0] if found else None

    def may_have_forgotten(self, since: float) -> bool:
        """Whether something that began at ``since`` could be over and forgotten."""
        return since <= self._forgotten_until

    def __len__(self) -> int:
        return len(self._kept)


class Puts:
    """All puts of a server, and its deletes, whose repetition must not lie either."""

    def __init__(self, desk: Desk, incarnation: int, known: KnownChecksums) -> None:
        self._desk = desk
        self._incarnation = incarnation
        self._known = known
        self.outcomes = Outcomes(desk.limits.outcomes)
        self.under_way: dict[bytes, Incoming] = {}
        self.credit_bytes = 0
        self.whole_bytes = 0
        """Of objects that came whole, in a message, and are not stored yet."""
        self.objects = 0
        self.nbytes = 0
        self._without_credit: deque[Incoming] = deque()
        self._deleting: dict[bytes, tuple[bytes, int]] = {}

    # Messages.

    def begin(self, peer: bytes, request_id: int, begin: BeginPut, data: Buffer | None, now: float) -> None:
        outcome = self.outcomes.get(begin.transfer)
        if outcome is not None:
            self._desk.reply(peer, request_id, outcome)
            return
        put = self.under_way.get(begin.transfer)
        if put is not None:
            put.peer, put.request_id, put.touched = peer, request_id, now
            if put.phase is Phase.RECEIVING:
                self._reply_state(put)
                self._want_credit(put)
            elif put.phase is Phase.RESERVING:
                none_yet = bytes((put.count + 7) // 8)
                state = PutState(begin.transfer, self._incarnation, 0, none_yet, reserving=True)
                self._desk.reply(peer, request_id, state)
            return
        began = now - begin.age_ms / 1000 - QUEUED_S
        forgotten = begin.age_ms and self.outcomes.may_have_forgotten(began)
        if begin.incarnation != self._incarnation or forgotten:
            self._desk.reply(peer, request_id, Forgotten(begin.transfer, self._incarnation))
            return
        put = Incoming(begin, peer, request_id, now, self._check(begin, data))
        if len(self.under_way) >= self._desk.limits.transfers:
            failure = Failure(begin.transfer, "Transient", f"{len(self.under_way)} puts are under way; try again later")
            self._desk.reply(peer, request_id, failure)
            return
        self.under_way[begin.transfer] = put
        if data is not None:
            put.phase = Phase.PUBLISHING
            self.whole_bytes += begin.nbytes
            mode = PutMode(begin.mode, begin.etag if begin.mode == "update" else None)
            task = StoreWhole(begin.namespace, begin.key, data, mode)
            self._desk.ask(task, lambda outcome, now: self._stored(put, outcome, now))
        else:
            self._desk.ask(
                ReserveMemory(begin.namespace, begin.key, begin.nbytes, lambda: not put.aborted),
                lambda outcome, now: self._reserved(put, outcome, now),
            )

    def _check(self, begin: BeginPut, data: Buffer | None) -> int:
        """The number of chunks. Errors: ``BadFrame`` for what no client of ours sends."""
        if begin.mode not in MODES:
            raise BadFrame("malformed", "a put's mode is none of the three")
        try:
            validate_key(begin.key)
        except ValueError as error:
            raise BadFrame("malformed", str(error)) from None
        if data is not None:
            nbytes = memoryview(data).nbytes
            if nbytes != begin.nbytes:
                raise BadFrame("truncated", f"a put of {begin.nbytes} bytes comes with {nbytes}")
            if checksum(data) != begin.checksum:
                raise BadFrame("corrupt", "an object's checksum is not that of its bytes")
            return 1
        if not CHUNK_BYTES_MIN <= begin.chunk_bytes <= self._desk.limits.chunk_bytes:
            raise BadFrame("malformed", f"chunks of {begin.chunk_bytes} bytes are not taken")
        count = -(-begin.nbytes // begin.chunk_bytes)
        if not 1 <= count <= CHUNKS_MAX:
            raise BadFrame("malformed", f"an object cannot have {count} chunks")
        return count

    def take_chunk(self, peer: bytes, request_id: int, chunk: PutChunk, data: Buffer, now: float) -> None:
        put = self.under_way.get(chunk.transfer)
        if put is None:
            outcome = self.outcomes.get(chunk.transfer)
            self._desk.drop("replayed" if outcome else "unasked")
            self._desk.reply(peer, request_id, outcome or Forgotten(chunk.transfer, self._incarnation))
            return
        if chunk.index >= put.count:
            raise BadFrame("malformed", f"chunk {chunk.index} of {put.count}")
        if put.phase is not Phase.RECEIVING or put.memory is None:
            self._desk.drop("replayed" if put.phase is Phase.PUBLISHING else "unasked")
            return
        put.peer, put.touched = peer, now
        if put.has(chunk.index):
            self._desk.drop("replayed")
            self._desk.reply(peer, request_id, ChunkTaken(chunk.transfer, chunk.index))
            return
        start, stop = put.chunk_range(chunk.index)
        nbytes = memoryview(data).nbytes
        try:
            memory = put.memory.buffer
        except (TierError, RuntimeError) as error:
            self._lose(put, Transient(f"the memory of the object is gone, begin anew: {error}"), now)
            return
        # What lies there unverified is no part of the object until it is, and is written again.
        if nbytes != stop - start or copy_with_xxh3(memory[start:stop], data) != chunk.checksum:
            self._desk.drop("truncated" if nbytes != stop - start else "corrupt")
            # The sender learns at once that this chunk did not count.
            self._reply_state(put, request_id)
            return
        put.received[chunk.index >> 3] |= 1 << (chunk.index & 7)
        put.checksums[chunk.index] = chunk.checksum
        put.missing -= 1
        self._desk.reply(peer, request_id, ChunkTaken(chunk.transfer, chunk.index))
        self._return_credit(put, put.missing)
        if put.missing and not put.credit:
            # It was silent until its credit was taken back: it may not go on as if it had some.
            self._reply_state(put, request_id)
            self._want_credit(put)
        if not put.missing:
            put.phase = Phase.PUBLISHING
            begin = put.begin
            mode = PutMode(begin.mode, begin.etag if begin.mode == "update" else None)
            self._desk.ask(PublishMemory(put.memory, mode), lambda outcome, now: self._published(put, outcome, now))

    def abort(self, peer: bytes, request_id: int, abort: AbortPut, now: float) -> None:
        outcome = self.outcomes.get(abort.transfer)
        put = self.under_way.get(abort.transfer)
        if put is None:
            if outcome is None:
                outcome = Failure(abort.transfer, ABORTED, "")
                self.outcomes.keep(outcome, now)
            self._desk.reply(peer, request_id, outcome)
            return
        put.peer, put.request_id, put.aborted = peer, request_id, True
        if put.phase is Phase.RECEIVING:
            self._drop(put)

    def delete(self, peer: bytes, request_id: int, delete: Delete, now: float) -> None:
        outcome = self.outcomes.get(delete.transfer)
        if outcome is not None:
            self._desk.reply(peer, request_id, outcome)
            return
        repeated = delete.transfer in self._deleting
        self._deleting[delete.transfer] = (peer, request_id)
        if not repeated:
            self._desk.ask(
                DeleteObjects(delete.namespace, delete.keys),
                lambda outcome, now: self._deleted(delete.transfer, outcome, now),
            )

    def tick(self, now: float) -> None:
        """Drop the puts whose client has been silent for too long, and before that give their credit to others."""
        self._take_back_credit(now - SILENT_S)
        oldest = now - self._desk.limits.idle_s
        for put in list(self.under_way.values()):
            if put.touched < oldest and put.phase is Phase.RECEIVING:
                self._desk.drop("abandoned")
                self._drop(put)

    # Outcomes of tasks.

    def _reserved(self, put: Incoming, outcome: object, now: float) -> None:
        if isinstance(outcome, BaseException):
            self._finish(put, failure_of(outcome, put.begin.transfer), now)
            return
        put.memory = cast(Memory, outcome)  # that is what its task gives
        put.received = bytearray((put.count + 7) // 8)
        put.checksums = array("Q", bytes(8 * put.count))
        put.missing = put.count
        put.touched = now
        if put.aborted:
            self._drop(put)
            return
        put.phase = Phase.RECEIVING
        self._want_credit(put)
        if not put.credit:
            self._reply_state(put)

    def _stored(self, put: Incoming, outcome: object, now: float) -> None:
        self.whole_bytes -= put.begin.nbytes
        self._published(put, outcome, now)

    def _published(self, put: Incoming, outcome: object, now: float) -> None:
        put.memory = None
        if isinstance(outcome, ObjectInfo):
            self.objects += 1
            self.nbytes += outcome.nbytes
            if put.checksums:
                self._known.keep(put.begin.namespace, outcome, put.begin.chunk_bytes, put.checksums)
            self._finish(put, Done(put.begin.transfer, outcome.nbytes, outcome.etag), now)
        else:
            assert isinstance(outcome, BaseException)
            self._finish(put, failure_of(outcome, put.begin.transfer), now)

    def _dropped(self, put: Incoming, outcome: object, now: float) -> None:
        del self.under_way[put.begin.transfer]
        put.memory = None
        if isinstance(outcome, BaseException):
            self._desk.drop("driver")
        if put.aborted:
            failure = Failure(put.begin.transfer, ABORTED, "")
            self.outcomes.keep(failure, now)
            self._desk.reply(put.peer, put.request_id, failure)

    def _deleted(self, transfer: bytes, outcome: object, now: float) -> None:
        peer, request_id = self._deleting.pop(transfer)
        if isinstance(outcome, BaseException):
            self._desk.reply(peer, request_id, failure_of(outcome, transfer))
            return
        done = Done(transfer, 0, "")
        self.outcomes.keep(done, now)
        self._desk.reply(peer, request_id, done)

    # Details.

    def _drop(self, put: Incoming) -> None:
        assert put.memory is not None
        put.phase = Phase.DROPPING
        self._return_credit(put, 0)
        self._desk.ask(DropMemory(put.memory), lambda outcome, now: self._dropped(put, outcome, now))

    def _lose(self, put: Incoming, error: Transient, now: float) -> None:
        """Its memory is somebody else's affair: the put is over."""
        assert put.memory is not None
        put.phase = Phase.DROPPING
        self._desk.drop("driver")
        self._return_credit(put, 0)
        self._desk.ask(DropMemory(put.memory), lambda *_: None)
        self._finish(put, failure_of(error, put.begin.transfer), now)

    def _finish(self, put: Incoming, outcome: Done | Failure, now: float) -> None:
        del self.under_way[put.begin.transfer]
        # What may pass is remembered too: a driver that says so may have stored the object, and to do it again under
        # the same id could deny that. To try again is another put.
        self.outcomes.keep(outcome, now)
        self._desk.reply(put.peer, put.request_id, outcome)

    def _reply_state(self, put: Incoming, request_id: int | None = None) -> None:
        state = PutState(put.begin.transfer, self._incarnation, put.credit, bytes(put.received))
        self._desk.reply(put.peer, put.request_id if request_id is None else request_id, state)

    def _want_credit(self, put: Incoming) -> None:
        if not put.credit and not put.is_waiting:
            put.is_waiting = True
            self._without_credit.append(put)
            self._give_credit()

    def _take_back_credit(self, silent_since: float) -> None:
        """From those that do not use it, while others wait. Their memory stays; they ask again when they go on.

        It goes to the next in line, and, where that one is silent too, on to the next after it.
        """
        self._give_credit()  # lets go of those in line that are over
        for put in list(self.under_way.values()):
            if not self._without_credit:
                return
            if put.credit and put.touched < silent_since and put.phase is Phase.RECEIVING:
                self._desk.drop("credit taken back")
                self._return_credit(put, 0)
                self._reply_state(put)

    def _give_credit(self) -> None:
        """Let those that wait send, first come, first served, while there is credit."""
        while self._without_credit:
            put = self._without_credit[0]
            if put.phase is not Phase.RECEIVING:
                self._without_credit.popleft().is_waiting = False
                continue
            chunk_bytes = put.begin.chunk_bytes
            chunks = min(max(put.begin.credit, 1), put.missing)
            free = (self._desk.limits.in_flight_bytes - self.credit_bytes) // chunk_bytes
            if not free:
                return
            self._without_credit.popleft().is_waiting = False
            put.credit = min(chunks, free)
            self.credit_bytes += put.credit * chunk_bytes
            self._reply_state(put)

    def _return_credit(self, put: Incoming, still_needed: int) -> None:
        if put.credit > still_needed:
            self.credit_bytes -= (put.credit - still_needed) * put.begin.chunk_bytes
            put.credit = still_needed
            self._give_credit()

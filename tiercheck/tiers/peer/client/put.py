"""The client's side of a put, without I/O."""

from __future__ import annotations

import math
from collections.abc import Callable

from tiercheck.errors import Closed, TierError, Transient, Unauthorized
from tiercheck.tiers.peer.client.content import PayloadChunks
from tiercheck.tiers.peer.client.protocol import Caller, error_of
from tiercheck.tiers.peer.client.transfer import Transferring
from tiercheck.tiers.peer.messages import (
    AbortPut,
    BadFrame,
    BeginPut,
    ChunkTaken,
    Done,
    Failure,
    Forgotten,
    Message,
    PutChunk,
    PutState,
    checksum,
)
from tiercheck.types import Buffer, ObjectInfo, PutMode

__all__ = ["Putting"]

RESERVING_S_MAX = 600.0
"""For so long a peer may make memory for an object: 600 GB, at a gigabyte a second."""


class Putting(Transferring):
    """Sends an object chunk by chunk, as the server's credit allows.

    The chunks' buffers are released by whoever sent the last of them.
    """

    def __init__(
        self, namespace: str, key: str, chunks: PayloadChunks, mode: PutMode, new_transfer: Callable[[], bytes]
    ) -> None:
        super().__init__(namespace, key, new_transfer)
        self.what = f"putting {key!r}"
        self._chunks = chunks
        self._nbytes = chunks.nbytes
        self._mode = mode
        self._cancelling = False
        self._may_be_stored = False
        """All of it was sent to a server that has forgotten it: whatever another one says, nobody knows."""
        self._incarnation = 0
        self._began = 0.0
        self._begins = 0
        self._credit = 0
        self._credit_counted = False
        """Credit has come since a chunk was last taken: more of it is no progress."""
        self._taken: set[int] = set()
        self.allowed_nbytes: float = math.inf
        """So much of the object may be sent by now. Another thread raises it: the next tick sees it."""

    def _ask(self, caller: Caller, link: int, now: float) -> None:
        """Begin; or ask what has arrived; or abort."""
        if self._cancelling:
            caller.send(self, link, AbortPut(self.transfer))
        else:
            self._begin(caller, link, now)

    def _begin(self, caller: Caller, link: int, now: float) -> None:
        settings = caller.settings
        if not self._begins:
            self._began, self._incarnation = now, caller.incarnation
        data = self._chunks.chunk(0, self._nbytes) if self._nbytes <= settings.chunk_bytes else None
        begin = BeginPut(
            transfer=self.transfer,
            namespace=self._namespace,
            key=self.key,
            nbytes=self._nbytes,
            mode=self._mode.kind,
            etag=self._mode.etag or "",
            chunk_bytes=settings.chunk_bytes,
            credit=max(1, settings.credit_bytes // settings.chunk_bytes),
            incarnation=self._incarnation,
            age_ms=max(1, int((now - self._began) * 1000)) if self._begins else 0,
            checksum=0 if data is None else checksum(data),
        )
        self._begins += 1
        if data is not None:
            self._next = 1
        caller.send(self, link, begin, data)

    def receive(
        self, caller: Caller, link: int, request_id: int, message: Message, data: Buffer | None, now: float
    ) -> None:
        match message:
            case ChunkTaken(_, index):
                if index in self._outstanding:
                    self._acknowledged(caller, index, now)
                    caller.starve(self)
            case PutState():
                self._compare(caller, link, request_id, message, now)
            case Done():
                caller.finish(self, ObjectInfo(self.key, message.nbytes, message.etag))
            case Failure():
                caller.finish(self, error_of(message, self.key))
            case Forgotten():
                self._begin_anew(caller, message, now)
            case _:
                raise BadFrame("unasked", f"{type(message).__name__} answers no put")

    def _compare(self, caller: Caller, link: int, request_id: int, state: PutState, now: float) -> None:
        """What was sent over that link before the question, or over a link that broke, and is not there, is lost."""
        if len(state.received) != (self._count(caller) + 7) // 8:
            raise BadFrame("malformed", "a put's state has another number of chunks")
        if state.reserving and now - self._began < RESERVING_S_MAX:
            self.moved(now)
        if state.credit and not self._credit_counted:
            self._credit_counted = True
            self.moved(now)
        self._credit = state.credit
        caller.incarnation = state.incarnation
        for index in list(self._outstanding):
            if state.received[index >> 3] >> (index & 7) & 1:
                self._acknowledged(caller, index, now)
        # It has dropped what it had, since nothing came for long, and began anew.
        dropped = [index for index in self._taken if not state.received[index >> 3] >> (index & 7) & 1]
        self._taken.difference_update(dropped)
        self._lost.extend(dropped)
        self._find_lost(caller, link, request_id)
        self.pump(caller, now)

    def _acknowledged(self, caller: Caller, index: int, now: float) -> None:
        self._settle(caller, index)
        self._taken.add(index)
        self._credit_counted = False
        self.moved(now)

    def _begin_anew(self, caller: Caller, answer: Forgotten, now: float) -> None:
        """The server knows nothing of this put: it was restarted, or has dropped it."""
        is_whole = self._nbytes <= caller.settings.chunk_bytes
        if self._all_sent(caller) and not (is_whole and self._begins == 1):
            self._may_be_stored = True
        caller.incarnation = answer.incarnation
        if self._cancelling:
            caller.finish(self, TierError("cancelled"))
        elif self._mode.conditional and self._may_be_stored:
            restarted = TierError(f"peer {caller.settings.peer} was restarted before it could answer", key=self.key)
            caller.finish(self, restarted)
        else:
            self._give_back(caller)
            self._next, self._begins, self._credit = 0, 0, 0
            self._credit_counted = False
            self._lost.clear()
            self._taken.clear()
            self._start_anew(caller, now)

    def refused(self, caller: Caller, error: Unauthorized) -> None:
        self._may_be_stored = self._may_be_stored or self._all_sent(caller)
        caller.finish(self, error)

    def told(self, error: Exception) -> Exception:
        if not self._may_be_stored or not isinstance(error, TierError) or isinstance(error, Transient | Closed):
            return error
        message = f"{error.message}; the object may have been stored or not: look before another {self._mode.kind}"
        return Transient(message, key=self.key)

    def pump(self, caller: Caller, now: float) -> None:
        """Send what credit, the server's and the client's own, allows."""
        while not self._cancelling and len(self._outstanding) < self._credit:
            index = self._following(caller)
            link = caller.next_link()
            if index is None or link is None:
                return
            start, stop = self._range(caller, index)
            if (held := stop > self.allowed_nbytes) and not self._outstanding:
                self.moved(now)  # it is not the peer that keeps it waiting
            if held or not caller.take_credit(stop - start):
                self._lost.appendleft(index)
                caller.starve(self)
                return
            data = self._chunks.chunk(start, stop)
            request_id = caller.send(self, link, PutChunk(self.transfer, index, checksum(data)), data)
            self._outstanding[index] = (link, request_id)

    def _following(self, caller: Caller) -> int | None:
        """The next chunk to send: a lost one, or one that was never sent."""
        while self._lost:
            index = self._lost.popleft()
            if index not in self._taken:
                return index
        if self._next < self._count(caller):
            self._next += 1
            return self._next - 1
        return None

    def lost(self, caller: Caller, link: int, now: float) -> None:
        # Nothing more is sent before the server has said what arrived.
        self._credit = 0
        self.start(caller, now)

    def given_up(self, caller: Caller) -> None:
        if self._begins and (link := caller.next_link()) is not None:
            caller.send(self, link, AbortPut(self.transfer))

    def cancel(self, caller: Caller, now: float) -> None:
        self._cancelling = True
        if self._begins:
            self.start(caller, now)
        else:
            caller.finish(self, TierError("cancelled"))

    def _all_sent(self, caller: Caller) -> bool:
        return self._begins > 0 and self._next >= self._count(caller)

    def _count(self, caller: Caller) -> int:
        return max(1, -(-self._nbytes // caller.settings.chunk_bytes))

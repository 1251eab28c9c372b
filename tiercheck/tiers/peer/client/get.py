"""The client's side of a get, without I/O: it asks for chunks, as many at once as it has credit for."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from tiercheck.errors import CapacityExceeded
from tiercheck.format.copying import copy_with_xxh3
from tiercheck.tiers.peer.client.protocol import Caller, error_of
from tiercheck.tiers.peer.client.transfer import Transferring
from tiercheck.tiers.peer.messages import (
    CHUNKS_MAX,
    BadFrame,
    BeginGet,
    Data,
    EndGet,
    Failure,
    Forgotten,
    GetChunk,
    GetState,
    Message,
    checksum,
)
from tiercheck.tiers.peer.server.limits import CHUNK_BYTES_MAX
from tiercheck.types import Buffer, ByteRange

__all__ = ["Getting"]

HEAP_BYTES_MAX = 2 * CHUNK_BYTES_MAX
"""Up to here memory that was used before is taken again, see :mod:`~tiercheck.tiers.peer.server.heap`."""


class Getting(Transferring):
    """Fetches an object, or ``wanted`` of it, into ``into`` or into memory of its own (the result either way)."""

    def __init__(
        self,
        namespace: str,
        key: str,
        wanted: ByteRange | None,
        into: memoryview | None,
        new_transfer: Callable[[], bytes],
    ) -> None:
        super().__init__(namespace, key, new_transfer)
        self.what = f"getting {key!r}"
        self._wanted = wanted
        self._into = into
        self._target: memoryview | None = None
        self._etag: str | None = None
        self._opening = 0
        self._count = 0
        self._arrived: set[int] = set()

    def _ask(self, caller: Caller, link: int, now: float) -> None:
        wanted = ByteRange(0, 0) if self._wanted is None else self._wanted
        begin = BeginGet(
            transfer=self.transfer,
            namespace=self._namespace,
            key=self.key,
            whole=self._wanted is None,
            start=wanted.start,
            stop=wanted.stop,
            chunk_bytes=caller.settings.chunk_bytes,
        )
        caller.send(self, link, begin)

    def receive(
        self, caller: Caller, link: int, request_id: int, message: Message, data: Buffer | None, now: float
    ) -> None:
        match message:
            case Data():
                self._take(caller, request_id, message, data, now)
            case GetState():
                self._opened(caller, link, request_id, message, data, now)
            case Failure():
                caller.finish(self, error_of(message, self.key))
            case Forgotten():
                # Another object may be there by now; the answer's etag will tell.
                self._give_back(caller)
                self._opening = 0
                self._start_anew(caller, now)
            case _:
                raise BadFrame("unasked", f"{type(message).__name__} answers no get")

    def _opened(
        self, caller: Caller, link: int, request_id: int, state: GetState, data: Buffer | None, now: float
    ) -> None:
        if self._wanted is not None and state.nbytes != len(self._wanted):
            raise BadFrame("malformed", "a range has another length than was asked for")
        if data is not None and (memoryview(data).nbytes != state.nbytes or checksum(data) != state.checksum):
            raise BadFrame("corrupt", "an object's checksum is not that of its bytes")
        if state.etag != self._etag or self._target is None or data is not None:
            if not self._prepare(caller, state):
                return
            self.moved(now)
        if state.opening != self._opening:
            # What was asked of an earlier one is answered by nothing any more.
            self._opening = state.opening
            self._give_back(caller)
        if data is not None:
            assert self._target is not None
            self._target[:] = data
            self._finish(caller)
            return
        self._find_lost(caller, link, request_id)
        self.pump(caller, now)

    def _prepare(self, caller: Caller, state: GetState) -> bool:
        """Room for an object that is new to us. False if there is none, and the get is over."""
        self._give_back(caller)
        self._arrived.clear()
        self._lost.clear()
        self._etag, self._nbytes, self._next = state.etag, state.nbytes, 0
        self._count = -(-state.nbytes // caller.settings.chunk_bytes)
        if self._count > CHUNKS_MAX:
            caller.finish(self, CapacityExceeded(f"{state.nbytes} bytes are too many for one get", key=self.key))
            return False
        if self._into is not None:
            if self._into.nbytes < state.nbytes:
                message = f"into has {self._into.nbytes} bytes; {self.key!r} needs {state.nbytes}"
                caller.finish(self, ValueError(message))
                return False
            self._target = self._into[: state.nbytes]
            return True
        try:
            self._target = untouched_memory(state.nbytes)
        except (MemoryError, OverflowError, OSError, ValueError):
            error = CapacityExceeded(f"this process has no memory for {state.nbytes} bytes", key=self.key)
            caller.finish(self, error)
            return False
        return True

    def _take(self, caller: Caller, request_id: int, message: Data, data: Buffer | None, now: float) -> None:
        index = message.index
        asked = self._outstanding.get(index)
        # The request's number tells it from what was asked before, of an object that was there before.
        if asked is None or asked[1] != request_id or self._target is None:
            raise BadFrame("unasked", f"chunk {index} was not asked for, or has arrived")
        start, stop = self._range(caller, index)
        self._settle(caller, index)
        whole = data is not None and memoryview(data).nbytes == stop - start
        if data is None or not whole or copy_with_xxh3(self._target[start:stop], data) != message.checksum:
            self._lost.append(index)
            caller.starve(self)
            raise BadFrame("corrupt", f"chunk {index} is not what was sent; it is asked for again")
        self._arrived.add(index)
        self.moved(now)
        if len(self._arrived) == self._count:
            self._finish(caller)
        else:
            caller.starve(self)

    def pump(self, caller: Caller, now: float) -> None:
        """Ask for as much as the client has credit for."""
        while self._opening:  # 0: what to ask of is not known yet
            index = self._lost.popleft() if self._lost else self._next
            if index >= self._count:
                return
            if index == self._next:
                self._next += 1
            link = caller.next_link()
            if link is None or not caller.take_credit(self._length(caller, index)):
                self._lost.appendleft(index)
                caller.starve(self)
                return
            wanted = GetChunk(self.transfer, index, self._opening)
            self._outstanding[index] = (link, caller.send(self, link, wanted))

    def release(self, caller: Caller) -> None:
        super().release(caller)
        link = caller.next_link()
        if self._count > 1 and link is not None:
            caller.send(self, link, EndGet(self.transfer))
        self._target = self._into = None

    def _finish(self, caller: Caller) -> None:
        assert self._target is not None
        caller.finish(self, self._target if self._into is not None else self._target.toreadonly())


def untouched_memory(nbytes: int) -> memoryview:
    """Room for that much, of which a page is taken only once something arrives for it: ``nbytes`` is a peer's word."""
    if nbytes <= HEAP_BYTES_MAX:
        return memoryview(bytearray(nbytes))
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

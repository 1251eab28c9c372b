"""A payload of many buffers as the bodies of requests, without joining them.

A request takes its body chunk by chunk as the connection takes it, and each chunk is copied just before it is handed
over: neither the event loop, nor TLS, nor a connection that closes slowly ever holds a buffer of the caller's. A
chunk fits the processor's cache, so that the copy costs next to nothing.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable, Iterator

from tiercheck.runtime.waiting import settled
from tiercheck.tiers.s3.checksums import Checksum
from tiercheck.types import Payload

__all__ = ["CHUNK_BYTES", "Body", "Buffers"]

CHUNK_BYTES = 256 << 10
CHECKSUM_STEP_BYTES = 16 << 20
"""A checksum looks up for a cancellation after so many bytes."""
INLINE_BYTES_MAX = 256 << 10
"""Less is summed up without a thread."""


class Buffers:
    """Views of a payload's buffers, addressed as one run of bytes; ``close`` releases every view."""

    def __init__(self, payload: Payload) -> None:
        self._views: list[memoryview] = []
        for buffer in payload:
            self._views.append(memoryview(buffer))
        ends = list(itertools.accumulate(view.nbytes for view in self._views))
        self._starts = [0, *ends]
        self.nbytes = ends[-1] if ends else 0
        self.closed = False

    def close(self) -> None:
        self.closed = True
        for view in self._views:
            view.release()

    def __enter__(self) -> Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes ``[start, stop)`` in place, buffer by buffer."""
        if self.closed:
            raise OSError("the payload was taken back")
        index = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            begin, end = self._starts[index], self._starts[index + 1]
            upto = min(end, stop)
            if upto > start:
                yield self._views[index][start - begin : upto - begin]
                start = upto
            index += 1

    def copy(self, start: int, stop: int) -> bytes:
        return b"".join(self.pieces(start, stop))

    async def checksum(self, checksum: Checksum, start: int, stop: int) -> int:
        """Over ``[start, stop)``, in a thread if it takes long. Cancellation waits for the thread."""

        def step(value: int, begin: int, end: int) -> int:
            for piece in self.pieces(begin, end):
                value = checksum.update(piece, value)
            return value

        if stop - start <= INLINE_BYTES_MAX:
            return step(0, start, stop)
        value = 0
        for begin in range(start, stop, CHECKSUM_STEP_BYTES):
            end = min(begin + CHECKSUM_STEP_BYTES, stop)
            value = await settled(asyncio.to_thread(step, value, begin, end))
        return value


class Body:
    """``[start, stop)`` of a payload as a request's body: a length, and an asynchronous iterator over chunks.

    It has ``read`` and ``seek`` too, by which botocore tells a stream from a value, and rewinds it.
    """

    def __init__(self, buffers: Buffers, start: int, stop: int, progress: Callable[[], None]) -> None:
        self._buffers = buffers
        self._start = start
        self._stop = stop
        self._at = start
        self._progress = progress

    @property
    def handed_over(self) -> bool:
        """The server may have it all, and may act on it: from now on only its answer tells."""
        return self._at == self._stop

    def __len__(self) -> int:
        return self._stop - self._start

    def tell(self) -> int:
        return self._at - self._start

    def seek(self, offset: int, whence: int = 0) -> int:
        origin = (self._start, self._at, self._stop)[whence]
        self._at = min(max(origin + offset, self._start), self._stop)
        return self.tell()

    def read(self, nbytes: int = -1) -> bytes:
        end = self._stop if nbytes < 0 else min(self._at + nbytes, self._stop)
        chunk = self._buffers.copy(self._at, end)
        self._at = end
        return chunk

    def __aiter__(self) -> Body:
        return self

    async def __anext__(self) -> bytes:
        self._progress()
        if self._at == self._stop:
            raise StopAsyncIteration
        return self.read(CHUNK_BYTES)

"""Getting an object: parts in parallel, each written where it belongs, and the whole verified.

The first request asks for the whole object, since its size is not known yet, and goes on reading from the front; the
others fetch parts from the back, until they meet. So a small object is one request, and a large one needs no request
ahead of the others. But if the caller has brought room for more than a part, a HEAD comes first, and then parts
alone: what the server has begun to send of the whole when the two ends meet is lost, a tenth of the time of a large
object. All requests after the first ask for the ETag of the first, so that the bytes are of one put.

After a failure a part goes on from where it broke.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import re
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiobotocore.response import AioStreamingBody

from tiercheck.errors import Corruption, PreconditionFailed, Transient, Unsupported
from tiercheck.runtime.waiting import settled, together
from tiercheck.tiers.s3.checksums import Checksum, stored_checksum
from tiercheck.tiers.s3.client import Answer, Progress, S3Client
from tiercheck.tiers.s3.failures import Refused
from tiercheck.tiers.s3.payload import INLINE_BYTES_MAX
from tiercheck.tiers.s3.settings import S3Settings
from tiercheck.types import ByteRange

__all__ = ["PART_BYTES_MAX", "Download", "get_part_bytes"]

READS_MAX = 5
"""An object that is overwritten while it is read is read again, so many times."""
PART_BYTES_MAX = 32 << 20
"""Of a large object, up to so much is asked for at once: a request takes the processor as long as 4 MiB of an answer.
Beyond that little is won, and the connections come to an end at different times."""
MAPPED_BYTES_MIN = 1 << 20
SMALL_BYTES_MAX = 64 << 10
"""A get of so much waits for no transfer: the coordinator reads the header of every rank's shard."""
PIECE_BYTES_MAX = 1 << 20
"""The most that is taken from the client at once: a piece is still in the processor's cache when it is checksummed."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)\Z")


class Changed(Exception):
    """The object is no longer the one whose first bytes were read; never leaves the driver."""


@dataclass
class RangeProgress:
    """``[start, stop)`` of what is wanted, of which ``[start, at)`` has arrived, with ``checksum``."""

    start: int
    stop: int
    at: int
    checksum: int = 0


class Download:
    """One get of ``name``; errors speak of ``key``."""

    def __init__(self, client: S3Client, key: str, name: str) -> None:
        self._client = client
        self._key = key
        self._name = name

    async def run(self, range: ByteRange | None, into: memoryview | None) -> memoryview:
        if range is not None and len(range) == 0:
            return await self._nothing(range, into)
        damaged: Corruption | None = None
        for _ in itertools.repeat(None, READS_MAX):
            try:
                return await _Read(self, range, into).run()
            except Changed:
                continue
            except Corruption as error:
                # Once more: it may have happened on the way. Twice the same is the object.
                if damaged is not None:
                    raise
                damaged = error
            except Refused as error:
                if error.code != "InvalidRange" or range is None:
                    raise
                raise self.past_the_end(range, await self._size()) from None
        raise Transient(
            f"the object was overwritten {READS_MAX} times while it was read", tier=self._client.tier, key=self._key
        )

    async def _nothing(self, range: ByteRange, into: memoryview | None) -> memoryview:
        nbytes = await self._size()
        if range.stop > nbytes:
            raise self.past_the_end(range, nbytes)
        return memoryview(b"") if into is None else into[:0]

    async def _size(self) -> int:
        return int((await self._client.ask("HeadObject", self._key, Key=self._name))["ContentLength"])

    def past_the_end(self, range: ByteRange, nbytes: int) -> ValueError:
        return ValueError(f"{range} reaches past the end of {self._key!r}, which has {nbytes} bytes")

    @property
    def client(self) -> S3Client:
        return self._client

    @property
    def key(self) -> str:
        return self._key

    @property
    def name(self) -> str:
        return self._name


class _Read:
    """One try at reading all of it. ``_learn`` sets up the parts once the first answer has told the size."""

    def __init__(self, download: Download, range: ByteRange | None, into: memoryview | None) -> None:
        self._of = download
        self._client = download.client
        self._range = range
        self._into = into
        self._target: memoryview | None = None
        self._start = 0
        self._etag = ""
        self._expected: tuple[Checksum, str] | None = None
        self._parts: list[RangeProgress] = []
        self._left: deque[RangeProgress] = deque()
        self._learnt = asyncio.Event()

    async def run(self) -> memoryview:
        workers = 0 if self._is_small else self._client.settings.parts_in_flight - 1
        first = self._described() if self._may_be_large else self._front()
        await together([first, *(self._back() for _ in range(workers))])
        target = self._target
        assert target is not None
        try:
            await self._verify()
        except BaseException:
            target.release()
            raise
        return target if self._into is not None else target.toreadonly()

    @property
    def _is_small(self) -> bool:
        return self._range is not None and len(self._range) <= SMALL_BYTES_MAX

    @property
    def _may_be_large(self) -> bool:
        room_bytes = 0 if self._into is None else self._into.nbytes
        return self._range is None and room_bytes > self._client.settings.part_bytes

    async def _described(self) -> None:
        """Ask what the object is like, then be a worker like the others."""
        try:
            self._learn(await self._client.ask("HeadObject", self._of.key, Key=self._of.name, ChecksumMode="ENABLED"))
        finally:
            self._learnt.set()
        await self._back()

    async def _front(self) -> None:
        """The first request, read from the front; after a failure on the way, a worker like the others."""
        try:
            await self._client.retrying(self._read_front, self._of.key)
        finally:
            self._learnt.set()
        await self._back()

    async def _read_front(self) -> None:
        if self._target is not None:
            return
        arguments: dict[str, Any] = {"Key": self._of.name, "ChecksumMode": "ENABLED"}
        if self._range is not None:
            stop = min(self._range.stop, self._range.start + get_part_bytes(len(self._range), self._client.settings))
            arguments["Range"] = f"bytes={self._range.start}-{stop - 1}"
        async with self._client.receiving(small=self._is_small) as progress:
            answer = await self._client.begin_get(**arguments)
            async with answer["Body"] as body:
                self._learn(answer)
                for part in self._parts if self._range is None else self._parts[:1]:
                    if not self._left or self._left[0] is not part:
                        break
                    self._left.popleft()
                    try:
                        await self._fill(part, body, progress)
                    except BaseException:
                        self._left.appendleft(part)
                        raise

    def _learn(self, answer: Answer) -> None:
        """Size, ETag and checksum from the first answer, or from a HEAD, and from them where the bytes go."""
        nbytes = int(answer["ContentLength"])
        if self._range is not None:
            _, _, nbytes = self._content_range(answer)
            if self._range.stop > nbytes:
                raise self._of.past_the_end(self._range, nbytes)
        wanted = ByteRange(0, nbytes) if self._range is None else self._range
        if self._into is not None and self._into.nbytes < len(wanted):
            raise ValueError(f"into has {self._into.nbytes} bytes; {self._of.key!r} needs {len(wanted)}")
        self._target = self._into[: len(wanted)] if self._into is not None else allocated(len(wanted))
        self._start = wanted.start
        self._etag = answer["ETag"]
        self._expected = stored_checksum(answer) if len(wanted) == nbytes else None
        size = get_part_bytes(len(wanted), self._client.settings)
        self._parts = [RangeProgress(at, min(at + size, len(wanted)), at) for at in range(0, len(wanted), size)]
        self._left.extend(self._parts)
        self._learnt.set()

    async def _back(self) -> None:
        """Fetch the last part that nobody has taken, until none is left."""
        await self._learnt.wait()
        while self._left:
            part = self._left.pop()
            try:
                await self._client.retrying(partial(self._read_part, part), self._of.key)
            except PreconditionFailed:
                raise Changed from None

    async def _read_part(self, part: RangeProgress) -> None:
        """What is missing of it: after a failure, no more than that."""
        if part.at == part.stop:
            return
        start, stop = self._start + part.at, self._start + part.stop
        async with self._client.receiving() as progress:
            answer = await self._client.begin_get(
                Key=self._of.name, Range=f"bytes={start}-{stop - 1}", IfMatch=self._etag
            )
            async with answer["Body"] as body:
                if self._content_range(answer)[:2] != (start, stop):
                    raise ConnectionError(f"the server sent {answer['ContentRange']}, not {start}-{stop - 1}")
                await self._fill(part, body, progress)

    async def _fill(self, part: RangeProgress, body: AioStreamingBody, progress: Progress) -> None:
        """One part from an answer's body to where it belongs, and its checksum."""
        target = self._target
        assert target is not None
        checksum = None if self._expected is None else self._expected[0]
        # Of each piece while it is in the cache, if that is quick: later it would come from memory again.
        update = checksum.update if checksum is not None and checksum.quick else None

        while part.at < part.stop:
            with target[part.at : min(part.stop, part.at + PIECE_BYTES_MAX)] as place:
                nbytes = await body.readinto(place)
                if not nbytes:
                    raise ConnectionError(f"the answer ended {part.stop - part.at} bytes early")
                if update is not None:
                    with place[:nbytes] as piece:
                        part.checksum = update(piece, part.checksum)
            part.at += nbytes
            progress()

    async def _sum(self, checksum: Checksum, part: RangeProgress) -> None:
        assert self._target is not None
        with self._target[part.start : part.stop] as data:
            if data.nbytes <= INLINE_BYTES_MAX:
                part.checksum = checksum.update(data, 0)
            else:
                part.checksum = await settled(asyncio.to_thread(checksum.update, data, 0))

    async def _verify(self) -> None:
        """The parts' checksums, put together, against the one the server holds for the object."""
        if self._expected is None:
            return
        checksum, expected = self._expected
        if not checksum.quick:
            await together(self._sum(checksum, part) for part in self._parts)
        value = 0
        for part in self._parts:
            value = checksum.combine(value, part.checksum, part.stop - part.start)
        if checksum.encode(value) != expected:
            raise Corruption(
                f"the {checksum.name} of what arrived is {checksum.encode(value)}, and the server holds {expected}",
                tier=self._client.tier,
                key=self._of.key,
            )

    def _content_range(self, answer: Answer) -> tuple[int, int, int]:
        """``start``, ``stop`` (past the end) and the object's size."""
        match = _CONTENT_RANGE.match(answer.get("ContentRange") or "")
        if match is None:
            raise Unsupported(
                "the server answers a range with something else", tier=self._client.tier, key=self._of.key
            )
        return int(match[1]), int(match[2]) + 1, int(match[3])


def get_part_bytes(nbytes: int, settings: S3Settings) -> int:
    """What is asked for at once of so much: the same for each connection, and as few times as can be."""
    rounds = -(-nbytes // (PART_BYTES_MAX * settings.parts_in_flight)) or 1
    return max(settings.part_bytes, -(-nbytes // (rounds * settings.parts_in_flight)))


def allocated(nbytes: int) -> memoryview:
    """Memory of one's own; for a large object straight from the kernel, which need not be zeroed a second time."""
    if nbytes < MAPPED_BYTES_MIN:
        return memoryview(bytearray(nbytes))
    return memoryview(mmap.mmap(-1, nbytes))

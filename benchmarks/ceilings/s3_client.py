"""aiobotocore used directly, with its defaults, at the part size and concurrency that do best here."""

from __future__ import annotations

import asyncio
import io
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

__all__ = ["RawClient", "Shape"]

PART_BYTES = (8 << 20, 16 << 20, 64 << 20)
CONCURRENCY = (1, 2, 4, 8)
KEY = "raw/object"


@dataclass(frozen=True)
class Shape:
    """So many parts of so many bytes at once. A part as large as the object: one request, not multipart."""

    part_bytes: int
    concurrency: int


class RawClient:
    """One object moved through one client. ``into`` takes what is read."""

    def __init__(self, endpoint_url: str, bucket: str, source: memoryview, into: memoryview) -> None:
        config = AioConfig(max_pool_connections=max(CONCURRENCY))
        self._making = get_session().create_client("s3", endpoint_url=endpoint_url, config=config)
        self._client: Any = None
        self._bucket = bucket
        self._source = source
        self._into = into
        self.put_shape = Shape(PART_BYTES[0], 1)
        self.get_shape = self.put_shape

    async def __aenter__(self) -> Self:
        self._client = await self._making.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._making.__aexit__(kind, error, traceback)

    async def calibrate_put(self, repetitions: int = 1) -> None:
        """Find the shape in which a put takes the shortest time."""
        self.put_shape = await best(self._shapes(), self._put, repetitions)

    async def calibrate_get(self, repetitions: int = 2) -> None:
        """Find the shape in which a get takes the shortest time; puts the object first."""
        await self.put()
        self.get_shape = await best(self._shapes(), self._get, repetitions)

    async def put(self) -> float:
        """Seconds until the object is stored."""
        return await self._put(self.put_shape)

    async def get(self) -> float:
        """Seconds until all of it is in ``into``."""
        return await self._get(self.get_shape)

    def _shapes(self) -> list[Shape]:
        nbytes = self._source.nbytes
        several = [Shape(*pair) for pair in itertools.product(PART_BYTES, CONCURRENCY) if pair[0] < nbytes]
        return [Shape(nbytes, 1), *several]

    async def _put(self, shape: Shape) -> float:
        begun = time.perf_counter()
        where = {"Bucket": self._bucket, "Key": KEY}
        if shape.part_bytes >= self._source.nbytes:
            await self._client.put_object(**where, Body=io.BytesIO(self._source))
            return time.perf_counter() - begun
        upload = {**where, "UploadId": (await self._client.create_multipart_upload(**where))["UploadId"]}

        async def put_part(start: int) -> dict[str, Any]:
            number = start // shape.part_bytes + 1
            body = io.BytesIO(self._source[start : start + shape.part_bytes])
            answer = await self._client.upload_part(**upload, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            parts = await at_once(put_part, range(0, self._source.nbytes, shape.part_bytes), shape.concurrency)
            await self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        except BaseException:
            await self._client.abort_multipart_upload(**upload)
            raise
        return time.perf_counter() - begun

    async def _get(self, shape: Shape) -> float:
        begun = time.perf_counter()

        async def get_part(start: int) -> None:
            end = min(start + shape.part_bytes, self._into.nbytes)
            answer = await self._client.get_object(Bucket=self._bucket, Key=KEY, Range=f"bytes={start}-{end - 1}")
            async with answer["Body"] as body:
                while piece := await body.raw_stream.content.readany():
                    self._into[start : start + len(piece)] = piece
                    start += len(piece)
            if start != end:
                raise ConnectionError(f"the server sent {start} bytes up to {end}")

        await at_once(get_part, range(0, self._into.nbytes, shape.part_bytes), shape.concurrency)
        return time.perf_counter() - begun


async def at_once(work: Callable[[int], Awaitable[Any]], starts: Iterable[int], concurrency: int) -> list[Any]:
    """``work`` for each of ``starts``, so many at a time; the results in order."""
    room = asyncio.Semaphore(concurrency)

    async def one(start: int) -> Any:
        async with room:
            return await work(start)

    return list(await asyncio.gather(*map(one, starts)))


async def best(shapes: Iterable[Shape], measure: Callable[[Shape], Awaitable[float]], repetitions: int) -> Shape:
    """The shape whose best repetition is shortest."""
    taken = {shape: min([await measure(shape) for _ in range(repetitions)]) for shape in shapes}
    return min(taken, key=taken.__getitem__)

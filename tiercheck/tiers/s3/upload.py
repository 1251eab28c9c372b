"""Putting an object: in one request, or in parts that are sent in parallel and published by the last request."""

from __future__ import annotations

import base64
import math
from typing import Any

from tiercheck.errors import (
    AlreadyExists,
    Corruption,
    NotFound,
    PreconditionFailed,
    TierError,
    Unsupported,
)
from tiercheck.runtime.turns import next_part
from tiercheck.runtime.waiting import each_of, settled
from tiercheck.tiers.s3.checksums import CRC32C
from tiercheck.tiers.s3.client import COMPLETION_PATIENCE, Answer, S3Client
from tiercheck.tiers.s3.failures import InDoubt, Refused
from tiercheck.tiers.s3.names import TOKEN_FIELD, etag_in, etag_of, new_token, server_etag
from tiercheck.tiers.s3.payload import Buffers
from tiercheck.tiers.s3.settings import SINGLE_PUT_BYTES_MAX
from tiercheck.types import PutMode, bytes_text

__all__ = ["Upload"]

PARTS_MAX = 10_000
PART_ALIGNMENT_BYTES = 1 << 20


class Upload:
    """One put of ``buffers`` under ``name``; errors speak of ``key``."""

    def __init__(self, client: S3Client, key: str, name: str, buffers: Buffers) -> None:
        self._client = client
        self._key = key
        self._name = name
        self._buffers = buffers
        self._token = new_token()
        self._published = False

    async def run(self, mode: PutMode) -> str:
        """Publish; returns the etag. A condition holds for one request only, so a conditional put is one request."""
        if not mode.conditional and self._buffers.nbytes > self._client.settings.part_bytes:
            return etag_of(await self._in_parts(), self._token)
        if self._buffers.nbytes > SINGLE_PUT_BYTES_MAX:
            raise Unsupported(
                f"a conditional put holds at most {bytes_text(SINGLE_PUT_BYTES_MAX)}, not "
                f"{bytes_text(self._buffers.nbytes)}: put a small record that names the object instead",
                tier=self._client.tier,
                key=self._key,
            )
        return etag_of(await self._at_once(mode), self._token)

    async def _at_once(self, mode: PutMode) -> str:
        condition = await self._condition(mode)
        value = await self._buffers.checksum(CRC32C, 0, self._buffers.nbytes)
        try:
            answer = await self._client.send(
                "PutObject",
                self._key,
                self._buffers,
                0,
                self._buffers.nbytes,
                Key=self._name,
                Metadata={TOKEN_FIELD: self._token},
                **{CRC32C.field: CRC32C.encode(value)},
                **self._client.settings.put_arguments,
                **condition,
            )
        except InDoubt as doubt:
            ours = await self._settle(doubt)
            if ours is not None:
                return ours
            if mode.kind == "create" and isinstance(doubt.__cause__, PreconditionFailed):
                raise self._lost(mode) from doubt
            raise
        except (PreconditionFailed, NotFound) as error:
            # The answer to an earlier try may have been lost: then it is our own object that is in the way.
            ours = await self._ours()
            if ours is not None:
                return ours
            if isinstance(error, NotFound) and mode.etag is None:
                raise  # no condition has failed
            raise self._lost(mode) from error
        return str(answer["ETag"])

    async def _condition(self, mode: PutMode) -> dict[str, str]:
        """The request's condition. S3 compares its own ETag; the put's token is compared here, just before.

        In between, nobody notices a client that puts the very bytes that were there already. Whoever races over a
        record gives it content of its own.
        """
        if mode.kind == "create":
            return {"IfNoneMatch": "*"}
        if mode.etag is None:
            return {}
        expected = server_etag(mode.etag)
        if expected is None:
            raise self._lost(mode)
        try:
            current = await self._client.ask("HeadObject", self._key, Key=self._name)
        except NotFound as error:
            raise self._lost(mode) from error
        if etag_in(current) != mode.etag:
            raise self._lost(mode)
        return {"IfMatch": f'"{expected}"'}

    def _lost(self, mode: PutMode) -> TierError:
        if mode.kind == "create":
            return AlreadyExists("there is an object under this key already", tier=self._client.tier, key=self._key)
        return PreconditionFailed(f"the etag is not {mode.etag!r}", tier=self._client.tier, key=self._key)

    async def _ours(self) -> str | None:
        """The server's ETag of the object, if it is the one this put has made."""
        try:
            found = await self._client.ask("HeadObject", self._key, Key=self._name)
        except NotFound:
            return None
        return str(found["ETag"]) if found.get("Metadata", {}).get(TOKEN_FIELD) == self._token else None

    async def _settle(self, doubt: InDoubt) -> str | None:
        """As :meth:`_ours`, or ``None`` if nobody can tell. Nor does ``None`` itself say that nothing was published:
        another client may have replaced it, and the server may still come to it."""
        try:
            return await self._ours()
        except TierError as error:
            doubt.add_note(f"and the object cannot be looked at: {error.message}")
            return None

    # In parts.

    async def _in_parts(self) -> str:
        begun = await settled(self._begin(), undo=lambda answer: settled(self._abort(answer["UploadId"])))
        upload_id = begun["UploadId"]
        try:
            parts, whole = await self._send_parts(upload_id)
            return await self._complete(upload_id, parts, whole, begun.get("ChecksumType") == "FULL_OBJECT")
        except BaseException as reason:
            if not self._published and (left := await settled(self._abort(upload_id))) is not None:
                reason.add_note(f"the parts sent for {self._key!r} stay until a later open sweeps them: {left}")
            raise

    async def _begin(self) -> Answer:
        return await self._client.ask(
            "CreateMultipartUpload",
            self._key,
            Key=self._name,
            Metadata={TOKEN_FIELD: self._token},
            ChecksumAlgorithm=CRC32C.name,
            ChecksumType="FULL_OBJECT",
            **self._client.settings.put_arguments,
        )

    async def _send_parts(self, upload_id: str) -> tuple[list[dict[str, Any]], int]:
        """All parts, a few at a time; the checksum of the whole beside them."""
        bounds = part_bounds(self._buffers.nbytes, self._client.settings.part_bytes)
        sent: list[tuple[dict[str, Any], int]] = [({}, 0)] * len(bounds)

        async def send(part: tuple[int, tuple[int, int]]) -> None:
            index, (start, stop) = part
            sent[index] = await self._send_part(upload_id, index + 1, start, stop)

        await each_of(enumerate(bounds), send, self._client.settings.parts_in_flight)
        whole = 0
        for (_, value), (start, stop) in zip(sent, bounds, strict=True):
            whole = CRC32C.combine(whole, value, stop - start)
        return [part for part, _ in sent], whole

    async def _send_part(self, upload_id: str, number: int, start: int, stop: int) -> tuple[dict[str, Any], int]:
        await next_part(stop - start)
        value = await self._buffers.checksum(CRC32C, start, stop)
        encoded = {CRC32C.field: CRC32C.encode(value)}
        answer = await self._client.send(
            "UploadPart",
            self._key,
            self._buffers,
            start,
            stop,
            Key=self._name,
            UploadId=upload_id,
            PartNumber=number,
            **encoded,
        )
        return {"PartNumber": number, "ETag": answer["ETag"], **encoded}, value

    async def _complete(self, upload_id: str, parts: list[dict[str, Any]], whole: int, full_object: bool) -> str:
        """The request that publishes. ``full_object``: the server has agreed to check the whole object's checksum."""
        encoded = CRC32C.encode(whole)
        check: dict[str, Any] = {CRC32C.field: encoded, "ChecksumType": "FULL_OBJECT"} if full_object else {}

        async def publish() -> Answer:
            answer = await self._client.ask(
                "CompleteMultipartUpload",
                self._key,
                patience=COMPLETION_PATIENCE,
                Key=self._name,
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
                **check,
            )
            self._published = True
            return answer

        try:
            answer = await settled(publish())
        except InDoubt as doubt:
            ours = await self._settle(doubt)
            if ours is None:
                raise
            self._published = True
            return ours
        except (Refused, NotFound):
            # Completed by an earlier try whose answer was lost, or aborted by somebody: the object's token tells.
            ours = await self._ours()
            if ours is None:
                raise
            self._published = True
            return ours
        self._check(answer.get(CRC32C.field), encoded, parts)
        return str(answer["ETag"])

    def _check(self, found: str | None, whole: str, parts: list[dict[str, Any]]) -> None:
        """That the checksum the server reports, of the whole object or of its parts' checksums, is ours."""
        if found is None:
            return
        expected = composite([base64.b64decode(part[CRC32C.field]) for part in parts]) if "-" in found else whole
        if found.partition("-")[0] != expected:
            raise Corruption(
                f"the server published an object with the {CRC32C.name} {found}, not {expected}",
                tier=self._client.tier,
                key=self._key,
            )

    async def _abort(self, upload_id: str) -> TierError | None:
        """Give back what the parts take up. Returns what went wrong: it must not hide what led here."""
        try:
            await self._client.ask("AbortMultipartUpload", self._key, Key=self._name, UploadId=upload_id)
        except Refused as error:
            return None if error.code == "NoSuchUpload" else error
        except TierError as error:
            return error
        return None


def part_bounds(nbytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """Bounds of equal parts (but for the last), larger than ``part_bytes`` if there would be too many."""
    size = max(part_bytes, math.ceil(nbytes / PARTS_MAX / PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES)
    return [(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]


def composite(parts: list[bytes]) -> str:
    """The checksum of part checksums, as servers without ``FULL_OBJECT`` report it, without its ``-N``."""
    return CRC32C.encode(CRC32C.update(b"".join(parts), 0))

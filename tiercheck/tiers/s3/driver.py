"""The S3 driver: the protocol's calls, each handed to the module that knows how."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from tiercheck.errors import TierError, Unauthorized, Unsupported
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.s3.client import S3Client
from tiercheck.tiers.s3.download import Download
from tiercheck.tiers.s3.failures import Refused, to_open_error
from tiercheck.tiers.s3.listing import Listing
from tiercheck.tiers.s3.names import Names, etag_in
from tiercheck.tiers.s3.payload import Buffers
from tiercheck.tiers.s3.probe import abandoned, check_layout, dead_probes, delete_names, probe, sweep
from tiercheck.tiers.s3.settings import S3Settings
from tiercheck.tiers.s3.upload import Upload
from tiercheck.tiers.url import TierURL
from tiercheck.types import ByteRange, Capabilities, Leftover, ObjectInfo, Payload, PutMode, Usage

__all__ = ["S3Driver"]

log = logging.getLogger(__name__)

BUFFERED_BYTES_A_TRANSFER = 1 << 20
"""A chunk, its copy in the connection's own buffer, and the HTTP client's read buffers; a part's size is no factor."""
BUFFERED_BYTES = 8 << 20
"""A page of a listing, and idle connections."""


class S3Driver(TierDriver):
    """``s3://bucket/prefix?option=value&...``: S3 and whatever speaks its protocol. Needs ``tiercheck[s3]``.

    Credentials come from where every AWS tool finds them, and never from the URL: the environment
    (``AWS_ACCESS_KEY_ID``...), a profile, a container's or an instance's role.

    ============================ ==========================================================================
    option (default)             meaning
    ============================ ==========================================================================
    ``endpoint_url`` (AWS)       ``https://host:port`` of another store
    ``region`` (environment's,   the bucket's region
    else ``us-east-1``)
    ``profile`` (environment's)  a profile of the AWS configuration
    ``addressing`` (``auto``)    ``path``, ``virtual``, or ``auto``: path if there is an ``endpoint_url``
    ``survives`` (``rack``)      ``rack``, or ``site`` if the bucket is replicated elsewhere
    ``part`` (``16MiB``)         unit of transfer; larger objects go in parts, in parallel. At least 5 MiB. Large
                                 objects are read in larger parts, of up to 32 MiB
    ``parts_in_flight`` (8)      transfers at once, of all calls together
    ``conditional`` (``auto``)   ``on``, ``off``, or ``auto``: tried at open
    ``listing`` (``auto``)       ``flat`` (the server lists in byte order), ``tree``, or ``auto``: tried at open
    ``access`` (``write``)       ``read``: nothing is tried (``auto``: ``tree``) or swept, puts and deletes are refused
    ``shards`` (1)               names begin with one of so many prefixes; all clients must agree on it
    ``storage_class``            of new objects, such as ``EXPRESS_ONEZONE``
    ``sse``, ``sse_kms_key``     encryption at rest: ``AES256`` or ``aws:kms``
    ``timeout`` (``60s``)        a request without progress for so long is tried again
    ``deadline`` (``120s``)      so long it is tried again
    ``abandoned_after``          an upload nobody has added to for so long is aborted by whoever opens the tier
    (``24h``)                    next
    ============================ ==========================================================================

    Memory: ``memory_bytes`` beyond the caller's buffers, whatever the size of the objects: payloads are sent from
    where they lie, and gets arrive where they are wanted.

    Integrity: each request's body carries a CRC32C, which the server verifies; a multipart object that of the whole. A
    whole get verifies what the server holds, if it says so; CRC64NVME and CRC32 too, if others put the object.

    Conditional puts are one request, so they hold at most 5 GiB. If the server ignores conditions,
    ``capabilities.conditional_put`` is false once the driver is open, and ``CREATE`` and ``UPDATE`` raise
    ``Unsupported``. The condition of an ``UPDATE`` is S3's, on content, and a check of the put's own token just before:
    of two clients that race to put *the same bytes* that are there already, both may be told that they won.

    A listing does not tell etags (``capabilities.lists_etags`` is false): they hold a token of the put, which S3 keeps
    in the object's metadata and tells in a request of its own.
    """

    def __init__(self, settings: S3Settings, url: str | None = None) -> None:
        self.settings = settings
        self._url = url or f"s3://{settings.bucket}" + (f"/{settings.prefix}" if settings.prefix else "")
        self._names = Names(settings)
        self._client = S3Client(settings, self._url)
        self._opened = False
        self._listing = Listing(self._client, self._names, flat=False)
        self._conditions = settings.conditional != "off" and settings.access == "write"
        self._sweeping: asyncio.Task[None] | None = None

    @classmethod
    def from_url(cls, url: TierURL) -> S3Driver:
        return cls(S3Settings.from_url(url), url.text)

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """Before the first open, what ``auto`` is hoped to find."""
        return Capabilities(
            survives=self.settings.survives,
            conditional_put=self._conditions,
            lists_etags=False,
            part_bytes=self.settings.part_bytes,
            parts_in_flight=self.settings.parts_in_flight,
        )

    @property
    def memory_bytes(self) -> int:
        """The most that a put or a get of any size takes beside the caller's buffers and a new result."""
        return BUFFERED_BYTES + self.settings.parts_in_flight * BUFFERED_BYTES_A_TRANSFER

    @property
    def retries(self) -> int:
        """Requests that had to be repeated since the driver was made."""
        return self._client.retries

    def facts(self) -> Mapping[str, str]:
        """``trouble``: bucket, endpoint and what the last try of a request that is tried again has met."""
        trouble = self._client.trouble
        return {"trouble": f"{self.settings.place}: {trouble}"} if trouble else {}

    async def open(self) -> None:
        """Connect, check, and try out what ``auto`` leaves open. What dead clients left is aborted in the background.

        Errors: ``ConfigurationError`` (bucket, region, endpoint, profile, another number of shards),
        ``Unauthorized``, ``Transient`` if the endpoint does not answer in time, or nothing has listened there for
        some seconds.
        """
        await self._open(writing=self.settings.access == "write")

    async def open_to_read(self) -> None:
        """As with ``access=read``. Errors: as :meth:`open`."""
        await self._open(writing=False)

    async def _open(self, *, writing: bool) -> None:
        if self._opened:
            raise RuntimeError(f"{self._url} is open already")
        self._client.opening = True
        try:
            await self._client.open()
            await check_layout(self._client, self._names)
            await self._find_out(writing)
        except TierError as error:
            await self._client.close()
            raise to_open_error(error, self.settings, self._url) from error
        except BaseException:
            await self._client.close()
            raise
        finally:
            self._client.opening = False
        self._opened = True

    async def _find_out(self, writing: bool) -> None:
        settings = self.settings
        conditions, flat = settings.conditional == "on", settings.listing == "flat"
        if writing:
            if "auto" in (settings.conditional, settings.listing):
                found = await probe(self._client, self._names)
                conditions = found.conditions if settings.conditional == "auto" else conditions
                flat = found.ordered if settings.listing == "auto" else flat
            self._sweeping = asyncio.create_task(self._sweep())
        self._conditions = conditions and writing
        self._listing = Listing(self._client, self._names, flat=flat)

    async def _sweep(self) -> None:
        """Housekeeping, which nobody waits for. It takes rights that to write does not; who lacks them is told."""
        try:
            await sweep(self._client, self._names)
        except (Unauthorized, Refused) as error:
            log.warning(
                "%s: abandoned uploads are left lying (%s); allow ListBucketMultipartUploads, ListMultipartUploadParts "
                "and AbortMultipartUpload, or give the bucket a lifecycle rule that aborts them",
                self._url,
                error.message,
            )
        except TierError as error:
            log.warning("%s: abandoned uploads are left for the next open (%s)", self._url, error.message)

    async def leftovers(self) -> Sequence[Leftover]:
        """Uploads that nobody has added to for ``abandoned_after``, how long they are is not asked; and empty objects
        that old, by which a client has tried out the server."""
        self._client.check_open()
        if self._sweeping is not None:
            await asyncio.wait({self._sweeping})
        found = await abandoned(self._client)
        uploads = [Leftover("unfinished upload", upload["Key"], None, idle_s) for upload, idle_s in found]
        probes = await dead_probes(self._client, self._names)
        return (*uploads, *(Leftover("object of a probe", name, 0, age_s) for name, age_s in probes.items()))

    async def close(self) -> None:
        self._opened = False
        sweeping, self._sweeping = self._sweeping, None
        if sweeping is not None:
            sweeping.cancel()
            await asyncio.wait({sweeping})
        await self._client.close()

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        name = self._names.name(key)
        self._check_writable(key)
        if mode.conditional and not self._conditions:
            raise Unsupported("the server has no conditional writes, or they are off", tier=self._url, key=key)
        with Buffers(payload) as buffers:
            etag = await Upload(self._client, key, name, buffers).run(mode)
            return ObjectInfo(key, buffers.nbytes, etag)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        name = self._names.name(key)
        self._client.check_open(key)
        return await Download(self._client, key, name).run(range, into)

    async def stat(self, key: str) -> ObjectInfo:
        name = self._names.name(key)
        answer = await self._client.ask("HeadObject", key, Key=name)
        return ObjectInfo(key, int(answer["ContentLength"]), etag_in(answer))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        self._client.check_open()
        async with contextlib.aclosing(self._listing.infos(prefix)) as found:
            async for info in found:
                yield info

    async def delete(self, keys: Iterable[str]) -> None:
        doomed = list(dict.fromkeys(self._names.name(key) for key in keys))
        self._check_writable(None)
        await delete_names(self._client, doomed)

    async def usage(self) -> Usage:
        """The sum of a listing; unfinished uploads are not in it. S3 has no limit that it tells of."""
        self._client.check_open()
        return Usage(await self._listing.used_bytes(), None)

    def _check_writable(self, key: str | None) -> None:
        self._client.check_open(key)
        if self.settings.access == "read":
            raise Unauthorized("the tier is open for reading only (access=read)", tier=self._url, key=key)

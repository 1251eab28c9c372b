"""Objects in any store that obstore speaks to."""

from __future__ import annotations

import abc
import asyncio
import atexit
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError

from tiercheck import errors
from tiercheck.keys import validate_key
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives, Usage, bytes_text
from tiercheck_obstore.exit import let_foreign_threads_out
from tiercheck_obstore.failures import mapped_errors
from tiercheck_obstore.parts import parts_of

if TYPE_CHECKING:
    from obstore import Attributes, GetResult, ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ObjectStore

__all__ = ["ObstoreDriver", "Settings"]

T = TypeVar("T")

CONTROL = ".tiercheck/"
"""Where the driver tries conditions; nobody else's keys lie there, and no listing shows it."""
CONDITIONAL_BYTES_MAX = 256 << 20
"""A conditional put is one request, whose content lies in memory."""
PARTS_MAX = 10_000
"""Of one upload: as S3 and GCS have it. Azure takes 50,000."""
ATTEMPTS = 8
LIST_PAGE = 1000
_ETAG = re.compile(r'[^"*\s]+\Z')

atexit.register(let_foreign_threads_out)


@dataclass(frozen=True)
class Settings:
    """What the URLs of all stores share. ``conditional``: ``None`` to find out at open."""

    survives: Survives = Survives.RACK
    part_bytes: int = 8 << 20
    parts_in_flight: int = 4
    conditional: bool | None = None
    deadline_s: float = 60.0


class _Overwritten(Exception):
    """Parts of one get came from two puts; it begins again."""


class _Abandoned(Exception):
    """Stops an upload whose caller was cancelled; never leaves the driver."""


class ObstoreDriver(TierDriver):
    """The protocol over an obstore store; subclasses say which store, and what its etags are worth.

    A put of up to one part is one request; a larger one is a multipart upload that appears when it is completed. The
    caller's buffers are copied part by part: obstore keeps what it is given beyond the call (its memory store even as
    the object). So a put takes ``part x (parts_in_flight + 2)`` of memory, and a get into a buffer
    ``part x parts_in_flight``.

    A cancelled put waits until the request under way is over, at most ``deadline``, since nobody could say otherwise
    whether it publishes later. An upload broken off leaves its parts in the store, unseen; have the bucket expire them
    (Azure does so by itself after a week).
    """

    def __init__(self, url: str, settings: Settings) -> None:
        self._url = url
        self._settings = settings
        self._store: ObjectStore | None = None
        self._facts: dict[str, str] = {}
        self._capabilities = Capabilities(
            survives=settings.survives,
            conditional_put=bool(settings.conditional),
            part_bytes=settings.part_bytes,
            parts_in_flight=settings.parts_in_flight,
        )

    # What a subclass supplies.

    @abc.abstractmethod
    def connect(self) -> ObjectStore:
        """The store. Nothing needs to be asked of it yet. Errors: ``ConfigurationError`` or obstore's own."""

    # What a subclass may replace: what tells two puts of an object apart. By default the store's own etag does.

    def new_attributes(self) -> Attributes | None:
        """What a put writes beside the content."""
        return None

    def info_of_put(self, key: str, nbytes: int, etag: str, attributes: Attributes | None) -> ObjectInfo:
        """What a put reports, given the store's etag and what was written beside the content."""
        return ObjectInfo(key, nbytes, etag)

    async def head(self, key: str) -> ObjectInfo:
        """What ``stat`` reports. Raises obstore's errors."""
        meta = await obstore.head_async(self.store, key)
        return ObjectInfo(key, meta["size"], self.own_etag(meta["e_tag"], key))

    async def infos_of(self, metas: Sequence[ObjectMeta]) -> Sequence[ObjectInfo]:
        """What ``list`` reports of some of the objects."""
        return [ObjectInfo(meta["path"], meta["size"], self.own_etag(meta["e_tag"], meta["path"])) for meta in metas]

    async def update_version(self, key: str, etag: str) -> UpdateVersion:
        """What the store is to compare in an ``UPDATE``. Errors: ``PreconditionFailed`` where it cannot be ``etag``."""
        if not _ETAG.match(etag):  # an empty one, or *, would be no condition at all
            raise errors.PreconditionFailed(f"the etag should be {etag!r}", tier=self._url, key=key)
        return {"e_tag": f'"{etag}"'}

    async def own_put(self, key: str, attributes: Attributes | None) -> PutResult | None:
        """The result of the put that wrote ``attributes``, where its object is there; ``None`` where it is not, or
        cannot be told. Asked where a condition failed: the store may have done a request whose answer was lost, and
        have refused its repetition. Raises obstore's errors.
        """
        return None

    def own_etag(self, etag: str | None, key: str) -> str:
        """The store's etag without its quotes, which some servers leave out of listings."""
        if not etag:
            message = "the store gives no etag, so nobody can tell when the object changes"
            raise errors.TierError(message, tier=self._url, key=key)
        return etag.strip('"')

    # The protocol.

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """``conditional_put`` is known once the driver is open, unless the URL says it."""
        return self._capabilities

    def facts(self) -> Mapping[str, str]:
        return dict(self._facts)

    @property
    def store(self) -> ObjectStore:
        """The open store, also for tests that look past the driver. Errors: ``Closed``."""
        if self._store is None:
            raise errors.Closed("the driver is not open", tier=self._url)
        return self._store

    async def open(self) -> None:
        if self._store is not None:
            raise RuntimeError(f"{self._url} is open already")
        self._facts = {"client": f"obstore {obstore.__version__}"}
        with mapped_errors(self._url):
            self._store = self.connect()
        try:
            conditional = self._settings.conditional
            if conditional is None:
                conditional, found = await self._try_conditions()
                self._facts["conditional puts"] = found
            else:
                await self._call(self._probe_access())
                self._facts["conditional puts"] = "as the URL says"
            self._capabilities = replace(self._capabilities, conditional_put=conditional)
        except BaseException:
            self._store = None
            raise

    async def open_to_read(self) -> None:
        """Nothing is written, so that read-only credentials do; whether conditions hold is not tried."""
        if self._store is not None:
            raise RuntimeError(f"{self._url} is open already")
        with mapped_errors(self._url):
            self._store = self.connect()
        try:
            await self._call(self._probe_access())
        except BaseException:
            self._store = None
            raise

    async def close(self) -> None:
        self._store = None

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        self._check(key)
        if mode.conditional and not self._capabilities.conditional_put:
            raise errors.Unsupported("the store takes no conditional puts", tier=self._url, key=key)
        views = [memoryview(buffer) for buffer in payload]
        try:
            return await self._put(key, views, mode)
        finally:
            for view in views:
                view.release()

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        self._check(key)
        for _ in _attempts():
            with contextlib.suppress(_Overwritten):
                return await self._call(self._get(key, range, into), key)
        raise errors.Transient(f"the object was overwritten during each of {ATTEMPTS} reads", tier=self._url, key=key)

    async def stat(self, key: str) -> ObjectInfo:
        self._check(key)
        return await self._call(self.head(key), key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """In byte order whatever the store's is: the listing is read whole, then sorted (about 300 bytes an object)."""
        folder = prefix.rpartition("/")[0]  # stores list folders; the rest of a prefix is compared here
        found: list[ObjectMeta] = []
        self._check_open()
        if not prefix or can_begin_a_key(prefix):
            pages = obstore.list(self.store, folder or None, chunk_size=LIST_PAGE)
            with mapped_errors(self._url):
                async for page in pages:
                    found += [meta for meta in page if meta["path"].startswith(prefix) and is_ours(meta["path"])]
        found.sort(key=lambda meta: meta["path"].encode())
        for start in range(0, len(found), LIST_PAGE):
            self._check_open()
            for info in await self.infos_of(found[start : start + LIST_PAGE]):
                yield info

    async def delete(self, keys: Iterable[str]) -> None:
        checked = [self._check(key) for key in keys]
        self._check_open()
        for start in range(0, len(checked), LIST_PAGE):
            await self._delete(checked[start : start + LIST_PAGE])

    async def usage(self) -> Usage:
        """The sum of a listing: what the tier is billed for. No limit is known."""
        self._check_open()
        used = 0
        with mapped_errors(self._url):
            async for page in obstore.list(self.store, chunk_size=LIST_PAGE):
                used += sum(meta["size"] for meta in page if is_ours(meta["path"]))
        return Usage(used, None)

    # Putting.

    async def _put(self, key: str, views: Sequence[memoryview], mode: PutMode) -> ObjectInfo:
        nbytes = sum(view.nbytes for view in views)
        if mode.conditional and nbytes > CONDITIONAL_BYTES_MAX:
            most = bytes_text(CONDITIONAL_BYTES_MAX)
            raise errors.Unsupported(f"a conditional put takes at most {most}, not {nbytes}", tier=self._url, key=key)
        attributes = self.new_attributes()
        if mode.conditional or nbytes <= self._settings.part_bytes:
            content = next(parts_of(views, max(nbytes, 1)), b"")
            result = await self._uncut(self._put_whole(key, content, mode, attributes), key)
        else:
            result = await self._put_parts(key, views, attributes)
        return self.info_of_put(key, nbytes, self.own_etag(result["e_tag"], key), attributes)

    async def _put_whole(self, key: str, content: bytes, mode: PutMode, attributes: Attributes | None) -> PutResult:
        if mode.kind == "overwrite":
            return await obstore.put_async(self.store, key, content, attributes=attributes, use_multipart=False)
        if mode.kind == "create":
            try:
                return await obstore.put_async(self.store, key, content, attributes=attributes, mode="create")
            except (AlreadyExistsError, PreconditionError):
                own = await self.own_put(key, attributes)
            message = "there is an object under this key already"
            refused: errors.TierError = errors.AlreadyExists(message, tier=self._url, key=key)
        else:
            refused = errors.PreconditionFailed(f"the etag should be {mode.etag!r}", tier=self._url, key=key)
            try:
                version = await self.update_version(key, mode.etag or "")
                return await obstore.put_async(self.store, key, content, attributes=attributes, mode=version)
            except (FileNotFoundError, errors.NotFound, PreconditionError, AlreadyExistsError):
                own = await self.own_put(key, attributes)
        if own is None:
            raise refused
        return own

    async def _put_parts(self, key: str, views: Sequence[memoryview], attributes: Attributes | None) -> PutResult:
        abandoned = False

        async def parts() -> AsyncIterator[bytes]:
            for part in parts_of(views, self._part_bytes(sum(view.nbytes for view in views))):
                if abandoned:
                    raise _Abandoned
                yield part

        upload = obstore.put_async(
            self.store,
            key,
            parts(),
            attributes=attributes,
            use_multipart=True,
            chunk_size=self._part_bytes(sum(view.nbytes for view in views)),
            max_concurrency=self._settings.parts_in_flight,
        )
        running = asyncio.ensure_future(upload)
        try:
            with mapped_errors(self._url, key):
                return await asyncio.shield(running)
        except asyncio.CancelledError:
            abandoned = True
            await _over(running)
            raise

    def _part_bytes(self, nbytes: int) -> int:
        """Of an upload: larger ones if the store does not take so many."""
        return max(self._settings.part_bytes, -(-nbytes // PARTS_MAX))

    async def _uncut(self, work: Coroutine[Any, Any, T], key: str) -> T:
        """``work``, which is over when this returns, even by cancellation."""
        running = asyncio.ensure_future(work)
        try:
            with mapped_errors(self._url, key):
                return await asyncio.shield(running)
        except asyncio.CancelledError:
            await _over(running)
            raise

    # Getting.

    async def _get(self, key: str, wanted: ByteRange | None, into: memoryview | None) -> memoryview:
        part = self._settings.part_bytes
        start = 0 if wanted is None else wanted.start
        stop = start + part if wanted is None else min(wanted.stop, start + part)
        first = await self._first(key, start, stop)
        meta = await obstore.head_async(self.store, key) if first is None else first.meta
        size = meta["size"]
        end = size if wanted is None else wanted.stop
        if end > size or start > size:
            raise ValueError(f"{wanted} reaches past the end of {key!r}, which has {size} bytes")
        nbytes = end - start
        if into is not None and into.nbytes < nbytes:
            raise ValueError(f"into has {into.nbytes} bytes; {key!r} needs {nbytes}")
        if first is None:
            if nbytes:
                raise _Overwritten
            return memoryview(b"") if into is None else into[:0]
        head = await self._content(first, first, start, min(end, stop), key)
        if into is None and nbytes <= part:
            return head
        target = memoryview(bytearray(nbytes)) if into is None else into[:nbytes]
        target[: head.nbytes] = head
        await self._rest(key, first, target, start, end)
        return target.toreadonly() if into is None else target

    async def _first(self, key: str, start: int, stop: int) -> GetResult | None:
        """The answer to a request for the first part; ``None`` where there is nothing to be asked for."""
        if start == stop:
            return None
        try:
            return await obstore.get_async(self.store, key, options={"range": (start, stop)})
        except GenericError:
            # Stores refuse a range that begins at the end, as in an empty object.
            if (await obstore.head_async(self.store, key))["size"] <= start:
                return None
            raise

    async def _rest(self, key: str, first: GetResult, target: memoryview, start: int, end: int) -> None:
        part = self._settings.part_bytes
        slots = asyncio.Semaphore(self._settings.parts_in_flight)

        async def fetch(at: int) -> None:
            async with slots:
                stop = min(at + part, end)
                result = await obstore.get_async(self.store, key, options={"range": (at, stop)})
                content = await self._content(result, first, at, stop, key)
                target[at - start : stop - start] = content

        pending = [asyncio.ensure_future(fetch(at)) for at in range(start + part, end, part)]
        try:
            await asyncio.gather(*pending)
        finally:
            for each in pending:
                each.cancel()
            if pending:
                await asyncio.wait(pending)

    async def _content(self, result: GetResult, first: GetResult, start: int, stop: int, key: str) -> memoryview:
        """The bytes of one answer, once it is clear that they are those asked for, and of the same put."""
        same = (result.meta["e_tag"], result.meta["size"]) == (first.meta["e_tag"], first.meta["size"])
        if not same:
            raise _Overwritten
        content = memoryview(await result.bytes_async())
        stop = min(stop, result.meta["size"])
        if tuple(result.range) != (start, stop) or content.nbytes != stop - start:
            message = f"asked for the bytes [{start}, {stop}), the store sent {content.nbytes} from {result.range}"
            raise errors.Corruption(message, tier=self._url, key=key)
        return content

    # Deleting.

    async def _delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        try:
            await self._call(obstore.delete_async(self.store, keys))
        except (errors.NotFound, errors.Unsupported):
            # One that was missing may have ended the batch, and not every server takes batches.
            for key in dict.fromkeys(keys):
                with contextlib.suppress(errors.NotFound):
                    await self._call(obstore.delete_async(self.store, key), key)

    # Opening.

    async def _try_conditions(self) -> tuple[bool, str]:
        """Whether the store honours CREATE and UPDATE, and what was seen; tried on an object of the driver's own."""
        key = f"{CONTROL}probe-{secrets.token_hex(8)}"
        await self._call(obstore.put_async(self.store, key, b"0", use_multipart=False))
        try:
            found = await self._conditions_hold(key)
        except errors.TierError:
            with contextlib.suppress(errors.TierError):  # what has failed says more
                await self._call(obstore.delete_async(self.store, key), key)
            raise
        with contextlib.suppress(errors.NotFound):
            await self._call(obstore.delete_async(self.store, key), key)
        return found

    async def _conditions_hold(self, key: str) -> tuple[bool, str]:
        try:
            await self._call(obstore.put_async(self.store, key, b"1", mode="create"), key)
        except errors.AlreadyExists:
            pass
        except (errors.PreconditionFailed, errors.Unsupported) as error:
            return False, f"none: CREATE is refused ({error.message})"
        else:
            return False, "none: the store ignores the condition of CREATE"
        before = await self._call(self.head(key), key)
        try:
            version = await self.update_version(key, before.etag)
            await self._call(obstore.put_async(self.store, key, b"2", mode=version), key)
        except (errors.PreconditionFailed, errors.Unsupported) as error:
            return False, f"none: UPDATE is refused ({error.message})"
        try:
            await self._call(obstore.put_async(self.store, key, b"3", mode=version), key)
        except (errors.PreconditionFailed, errors.AlreadyExists):
            return True, "CREATE and UPDATE were tried, and hold"
        return False, "none: the store ignores the condition of UPDATE"

    async def _probe_access(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            await obstore.head_async(self.store, f"{CONTROL}probe")

    # Helpers.

    def _check(self, key: str) -> str:
        validate_key(key)
        if key.startswith(CONTROL):
            raise ValueError(f"the key {key!r} is the driver's own: nothing may lie under {CONTROL}")
        if self._store is None:
            raise errors.Closed("the driver is not open", tier=self._url, key=key)
        return key

    def _check_open(self) -> None:
        _ = self.store

    async def _call(self, work: Awaitable[T], key: str | None = None) -> T:
        with mapped_errors(self._url, key):
            return await work


def _attempts() -> Iterable[int]:
    return range(ATTEMPTS)


async def _over(running: asyncio.Future[Any]) -> None:
    """Wait for the end of what cannot be stopped; another cancellation cannot hurry it either."""
    while not running.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([running])
    if not running.cancelled():
        running.exception()  # it was seen; the cancellation is what is raised


def can_begin_a_key(prefix: str) -> bool:
    """Whether keys can have this prefix. No request is made for one that cannot: stores make something else of it."""
    return all(part not in ("", ".", "..") for part in prefix.split("/")[:-1])


def is_ours(key: str) -> bool:
    """Whether a name in the store is an object of the tier's."""
    return not key.startswith(CONTROL)

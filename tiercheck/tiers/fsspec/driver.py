"""Any fsspec file system as a tier: ``fsspec+PROTOCOL://LOCATION?option=value``, such as

- ``fsspec+sftp://user@host/scratch/run?survives=rack``
- ``fsspec+abfs://container/run?survives=site&fs.account_name=...``

A directory is refused: ``nvme://`` is the driver for it, or ``lustre://`` if several nodes mount it.

Options that begin with ``fs.`` go to the file system's constructor: numbers, ``true``, ``false``, ``null``, and JSON
are converted; what looks secret stays text. Better than in a URL, secrets are kept in the environment, or in
fsspec's own configuration files (``~/.config/fsspec/*.json``). The others are TierCheck's:

- ``survives``: the widest failure the data outlives. Default: ``node`` for a server, since nobody but the user knows
  whether it stands in the same rack; ``memory://`` survives nothing, and cannot be said to.
- ``part`` (8MiB), ``parts_in_flight`` (4): how objects are cut, and how many pieces of one are read at a time.
- ``deadline`` (60): seconds that the file system may make no progress.
- ``publish``: ``close`` or ``rename``, for a file system that is not known here; see :class:`FsspecDriver`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import fsspec
from fsspec.core import url_to_fs

from tiercheck.errors import (
    Closed,
    ConfigurationError,
    NotFound,
    TierError,
    Transient,
    Unsupported,
)
from tiercheck.keys import validate_key
from tiercheck.runtime.waiting import together
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.fsspec.backends import CONTROL, Backend, Reading
from tiercheck.tiers.fsspec.errors import first_line, map_foreign_errors
from tiercheck.tiers.fsspec.probe import probe, probe_reading
from tiercheck.tiers.fsspec.protocols import argument, known_protocol, shown_url
from tiercheck.tiers.fsspec.workers import Ticket, Workers
from tiercheck.tiers.url import TierURL, number_from, seconds_from, size_from
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives, Usage

__all__ = ["FsspecDriver"]

T = TypeVar("T")

LIST_PAGE = 256
PART_BYTES_MAX = 5 << 30
PARTS_IN_FLIGHT_MAX = 256


class FsspecDriver(TierDriver):
    """A tier in any fsspec file system that publishes whole objects, by one of two ways.

    Atomicity: ``close`` (object stores): nothing shows before the file is closed. ``rename`` (SFTP): a
    temporary file under ``.tiercheck/tmp`` is moved onto the key, by a move that replaces atomically. A probe at open
    tries it. A file system that is not known here needs ``publish=close`` or ``publish=rename``, on the word of the
    user if the probe cannot see it (whether a move is atomic); one that can do neither is refused.

    Durability: SFTP: the file is fsynced, if the server knows
    ``fsync@openssh.com``; its directory cannot be, so a server that loses power may forget the newest puts. Object
    stores: theirs.

    Conditional puts: none, whatever the backend says. Most check and write in two steps, some overwrite when told not
    to, and none but the stores' own interface can compare an etag.

    Reads: up to a part at once, larger ones in parts, by ranged requests or by seeking in an open file, whichever the
    probe found to return what was asked for. If there are parts, the object's etag is compared before and after, so
    that the bytes are those of one put; if the probe found that etags do not tell puts of one length apart, objects
    are read at once, and ranges refused. Over SFTP parts are read one after the other, through one open file.

    Threads: everything goes through fsspec's blocking interface in threads of the driver's own, for asynchronous file
    systems too (whose coroutines then run on fsspec's own loop): files open for writing exist only there.
    Cancellation: waits for the thread; one that hangs past the deadline is left alone, and can neither touch a buffer
    nor, unless it is publishing at that moment, publish. A later put of that key waits for it.

    Memory: a put holds at most 4 parts, a get ``parts_in_flight`` of them, besides the result.
    """

    def __init__(
        self,
        protocol: str,
        location: str,
        *,
        options: Mapping[str, Any] | None = None,
        survives: Survives | None = None,
        part_bytes: int = 8 << 20,
        parts_in_flight: int = 4,
        deadline_s: float = 60.0,
        publish: str | None = None,
    ) -> None:
        self._options = dict(options or {})
        self._url = shown_url(protocol, location, self._options)
        self._target = f"{protocol}://{location}"
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError as error:
            raise ConfigurationError(f"fsspec knows no file system {protocol}://: {error}") from None
        except ImportError as error:
            raise ConfigurationError(f"the file system {protocol}:// cannot be loaded: {error}") from error
        self._protocol = known_protocol(protocol, publish, url=self._url)
        if self._protocol.needs_path and "/" not in location:
            raise ConfigurationError(f"{self._url} names no directory; write an absolute one, as in scheme://host/dir")
        survives = self._protocol.survives if survives is None else survives
        if survives > self._protocol.survives_max:
            raise ConfigurationError(
                f"{self._url} cannot survive a {survives.name.lower()} failure: it is this process's memory"
            )
        if part_bytes < 1 or parts_in_flight < 1 or not 0 < deadline_s < float("inf"):
            raise ConfigurationError(f"part, parts_in_flight and deadline of {self._url} must be positive and finite")
        self._capabilities = Capabilities(
            survives=survives, part_bytes=part_bytes, parts_in_flight=min(parts_in_flight, self._protocol.threads)
        )
        self._deadline_s = deadline_s
        self._workers: Workers | None = None
        self._backend: Backend | None = None
        self._connecting = threading.Lock()
        self._writing = True
        self._facts: dict[str, str] = {}

    @classmethod
    def from_url(cls, url: TierURL) -> FsspecDriver:
        """Errors: ``ConfigurationError`` for an unknown protocol or option."""
        foreign = {name[3:]: argument(name, text) for name, text in url.options.items() if name.startswith("fs.")}
        ours = {name: text for name, text in url.options.items() if not name.startswith("fs.")}
        reader = TierURL(url.scheme, url.location, MappingProxyType(ours)).reader()
        survives = reader.take("survives", Survives.parse, None)
        part_bytes = reader.take("part", size_from(1, PART_BYTES_MAX), 8 << 20)
        parts_in_flight = reader.take("parts_in_flight", number_from(1, PARTS_IN_FLIGHT_MAX), 4)
        deadline_s = reader.take("deadline", seconds_from(0), 60.0)
        publish = reader.take("publish", str, None)
        reader.finish()
        protocol = url.scheme.partition("+")[2]
        if not protocol:
            raise ConfigurationError("say which file system: fsspec+sftp://host/path, fsspec+abfs://container/run, ...")
        return cls(
            protocol,
            url.location,
            options=foreign,
            survives=survives,
            part_bytes=part_bytes,
            parts_in_flight=parts_in_flight,
            deadline_s=deadline_s,
            publish=publish,
        )

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def facts(self) -> Mapping[str, str]:
        return MappingProxyType(dict(self._facts))

    async def open(self) -> None:
        await self._open(writing=True)

    async def open_to_read(self) -> None:
        """How ranges are read is tried on an object that is there."""
        await self._open(writing=False)

    async def _open(self, *, writing: bool) -> None:
        self._writing = writing
        if self._workers is not None:
            raise RuntimeError(f"{self._url} is open already")
        self._workers = Workers(self._protocol.threads, self._deadline_s, self._url)
        try:
            backend = await self._run(self._connected)
            ranged = backend.reading is not Reading.WHOLE
            self._capabilities = replace(self._capabilities, ranged_get=ranged)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        workers, self._workers = self._workers, None
        backend, self._backend = self._backend, None
        if workers is not None:
            await workers.close()
        if backend is not None:
            with suppress(Exception):  # the connection is gone already
                await asyncio.to_thread(backend.close)

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        self._check(key)
        if mode.conditional:
            raise Unsupported("fsspec file systems take no conditional put", tier=self._url, key=key)
        nbytes = sum(len(buffer) for buffer in payload)
        part_bytes = self._capabilities.part_bytes

        def work(backend: Backend, ticket: Ticket) -> ObjectInfo:
            backend.publish(key, cut(nbytes, part_bytes, ticket), nbytes, ticket)
            try:
                return backend.info(key)
            except FileNotFoundError as error:
                raise Transient("the object was put, and removed at once by another client") from error
            except Exception as error:
                # Whatever it is, it must not be told as the put's: that would say that nothing was put.
                raise Transient(f"the object was put, but cannot be looked at ({first_line(error)})") from error

        try:
            return await self._call(work, key, writes=(key,), lent=payload)
        except NotFound as error:
            raise TierError(
                "the tier's place (its directory, bucket or container) was removed while the tier was open",
                tier=self._url,
                key=key,
            ) from error

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        self._check(key)
        part_bytes = self._capabilities.part_bytes
        until = time.monotonic() + self._deadline_s
        while time.monotonic() < until:  # it begins anew if the object was put again meanwhile
            before = await self.stat(key)
            wanted = self._wanted(key, before, range, into)
            at_once = len(wanted) <= part_bytes or not self._capabilities.ranged_get
            with suppress(NotFound):  # deleted, or just then replaced: the next look tells
                if at_once:
                    content = await self._call(lambda backend, _: backend.read(key, range), key)
                    if range is None or len(content) == len(range):
                        return delivered(content, into, key)
                    continue
                with (memoryview(bytearray(len(wanted))) if into is None else into)[: len(wanted)] as room:
                    if await self._read_parts(key, wanted, room) and await self.stat(key) == before:
                        return room[:].toreadonly() if into is None else into[: len(wanted)]
        raise Transient(
            f"the object was put anew each time it was read, for {self._deadline_s:g} s", tier=self._url, key=key
        )

    async def stat(self, key: str) -> ObjectInfo:
        self._check(key)
        return await self._call(lambda backend, _: backend.info(key), key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        found: Iterator[ObjectInfo] | None = None

        def page(backend: Backend, ticket: Ticket) -> list[ObjectInfo]:
            nonlocal found
            found = backend.scan(prefix) if found is None else found
            infos = []
            for info in itertools.islice(found, LIST_PAGE):
                ticket.check()
                infos.append(info)
            return infos

        while infos := await self._call(page):
            for info in infos:
                yield info

    async def delete(self, keys: Iterable[str]) -> None:
        chosen = list(dict.fromkeys(keys))
        for key in chosen:
            self._check(key)

        async def remove(key: str) -> None:
            await self._call(lambda backend, _: backend.remove(key), key, writes=(key,))

        await together(remove(key) for key in chosen)

    async def usage(self) -> Usage:
        used_bytes = 0
        async for info in self.list():
            used_bytes += info.nbytes
        free_bytes = await self._call(lambda backend, _: backend.free_bytes())
        return Usage(used_bytes, None if free_bytes is None else used_bytes + free_bytes)

    # Details.

    def _check(self, key: str) -> None:
        if validate_key(key).partition("/")[0] == CONTROL:
            raise ValueError(f"the key {key!r} begins with {CONTROL!r}, which is the tier's own directory")
        for text in self._protocol.refused_in_keys:
            if text in key:
                raise Unsupported(
                    f"the file system takes {text!r} in a key for an option of its own", tier=self._url, key=key
                )

    def _wanted(self, key: str, info: ObjectInfo, range: ByteRange | None, into: memoryview | None) -> ByteRange:
        if range is not None and not self._capabilities.ranged_get:
            raise Unsupported("the file system reads objects only as a whole", tier=self._url, key=key)
        wanted = ByteRange(0, info.nbytes) if range is None else range
        if wanted.stop > info.nbytes:
            raise ValueError(f"{wanted} reaches past the end of {key!r}, which has {info.nbytes} bytes")
        if into is not None and into.nbytes < len(wanted):
            raise ValueError(f"into has {into.nbytes} bytes; {key!r} needs {len(wanted)}")
        return wanted

    async def _read_parts(self, key: str, wanted: ByteRange, room: memoryview) -> bool:
        """Fill ``room``, several parts at a time; ``False`` if the object turned out to be shorter."""
        step = self._capabilities.part_bytes
        starts = iter(range(wanted.start, wanted.stop, step))  # each thread takes the next one

        def work(backend: Backend, ticket: Ticket) -> bool:
            with backend.reader(key) as fetch:
                for start in starts:
                    ticket.check()
                    stop = min(start + step, wanted.stop)
                    content = fetch(start, stop)
                    if len(content) != stop - start:
                        return False
                    with ticket.borrowing(), room[start - wanted.start : stop - wanted.start] as part:
                        part[:] = content
            return True

        threads = min(self._parts_at_once, -(-len(wanted) // step))
        return all(await together(self._call(work, key) for _ in itertools.repeat(None, threads)))

    @property
    def _parts_at_once(self) -> int:
        backend = self._backend
        steady = backend is not None and backend.reading is Reading.STEADY
        return 1 if steady else self._capabilities.parts_in_flight

    def _connected(self, ticket: Ticket) -> Backend:
        """The file system; connected anew if the connection was lost. Runs in a thread."""
        with self._connecting:
            ticket.check()
            backend = self._backend
            if backend is not None and backend.is_alive():
                return backend
            self._backend = None
            backend = self._connect(ticket)
            if self._workers is None or self._workers.closed:
                backend.close()
                raise Closed("the driver was closed while it connected", tier=self._url)
            self._backend = backend
            return backend

    def _connect(self, ticket: Ticket) -> Backend:
        arguments = {**self._protocol.arguments(self._deadline_s), **self._options}
        try:
            # A file system of our own: one that fsspec's cache hands out is shared with others, who may close it.
            fs, root = url_to_fs(self._target, skip_instance_cache=True, **arguments)
        except TypeError as error:
            raise ConfigurationError(f"{self._url} has an option its file system does not take: {error}") from error
        except ValueError as error:
            raise ConfigurationError(f"{self._url} lacks something: {error}") from error
        backend = self._protocol.backend(
            fs, root, place=self._url, part_bytes=self._capabilities.part_bytes, deadline_s=self._deadline_s
        )
        try:
            if self._writing:
                backend.prepare()
                found = probe(backend, ticket)
            else:
                found = probe_reading(backend)
        except FileNotFoundError as error:
            backend.close()
            raise TierError(f"the tier's place is not there: {error}") from error
        except BaseException:
            backend.close()
            raise
        self._facts = {**found, **backend.facts()}
        return backend

    async def _call(
        self,
        work: Callable[[Backend, Ticket], T],
        key: str | None = None,
        *,
        writes: Iterable[str] = (),
        lent: Payload = (),
    ) -> T:
        return await self._run(lambda ticket: work(self._connected(ticket), ticket), key, writes=writes, lent=lent)

    async def _run(
        self,
        work: Callable[[Ticket], T],
        key: str | None = None,
        *,
        writes: Iterable[str] = (),
        lent: Payload = (),
    ) -> T:
        if self._workers is None:
            raise Closed("the driver is not open", tier=self._url, key=key)

        def mapped(ticket: Ticket) -> T:
            with map_foreign_errors(self._url, key):
                return work(ticket)

        with map_foreign_errors(self._url, key):
            return await self._workers.run(mapped, writes=writes, lent=lent)


def delivered(content: bytes, into: memoryview | None, key: str) -> memoryview:
    """The content as the caller of ``get`` wants it."""
    if into is None:
        return memoryview(content)
    if into.nbytes < len(content):
        raise ValueError(f"into has {into.nbytes} bytes; {key!r} needs {len(content)}")
    into[: len(content)] = content
    return into[: len(content)]


def cut(nbytes: int, part_bytes: int, ticket: Ticket) -> Iterator[bytes]:
    """The ``nbytes`` that the ticket lends, in parts, each a copy: what a thread that was given up may still hold."""
    index = at = 0  # the next byte is at this place of this buffer
    for start in range(0, nbytes, part_bytes):
        room = min(part_bytes, nbytes - start)
        pieces = []
        while room:
            with ticket.borrowing() as lent, memoryview(lent[index]) as view, view[at : at + room] as piece:
                pieces.append(bytes(piece))
                at += piece.nbytes
                room -= piece.nbytes
                if at == view.nbytes:
                    index, at = index + 1, 0
        yield pieces[0] if len(pieces) == 1 else b"".join(pieces)
        ticket.check()

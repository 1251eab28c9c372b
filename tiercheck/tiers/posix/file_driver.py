"""The asynchronous face of an :class:`~tiercheck.tiers.posix.directories.local.ObjectDirectory`.

File calls block, so they run in a few threads of the driver's own. A cancelled call waits for its thread
before it lets go: afterwards no buffer of the caller's is in use.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from tiercheck.errors import Closed, Unsupported
from tiercheck.runtime.daemon_threads import DaemonThreads
from tiercheck.runtime.turns import turns_in_threads
from tiercheck.runtime.waiting import settled
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.posix.directories.local import ObjectDirectory
from tiercheck.tiers.posix.directories.object_files import payload_bytes
from tiercheck.tiers.posix.files import close_read, map_os_errors
from tiercheck.tiers.posix.mounts import check_mounted, is_local, mount_of
from tiercheck.types import ByteRange, Capabilities, Leftover, ObjectInfo, Payload, PutMode, Survives, Usage

__all__ = ["Abandoned", "FileDriver"]

T = TypeVar("T")

THREADS = 4
LIST_PAGE = 256
ENDING_S = 5.0
"""For so long a driver that closes waits for calls. A file system whose server is gone may never return from one."""
COPIED_BYTES_MAX = 64 << 10
"""Less than this is read rather than mapped: it is faster, and holds no descriptor."""


class Abandoned(Exception):
    """Raised inside a thread whose caller was cancelled; never leaves the driver."""


class FileDriver(TierDriver):
    """A driver over an object directory; subclasses say where it is and what it survives."""

    may_hang = True
    """Whether a call may never return, since a server does not answer."""
    maps = False
    """Whether a get maps the object's file instead of reading it. A mapping of what lies on a disk or behind a network
    kills its process with SIGBUS when that does not answer, or has lost a block; a read says so."""

    def __init__(
        self, directory: ObjectDirectory, url: str, capabilities: Capabilities, mount: Path | None = None
    ) -> None:
        """``mount``: the mount point that the directory must lie on whenever the driver is opened."""
        self.directory = directory
        self._mount_point = mount
        self._url = url
        self._capabilities = capabilities
        self._threads: DaemonThreads | None = None
        self._doubts: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def is_open(self) -> bool:
        return self._threads is not None

    def doubts(self) -> Sequence[str]:
        """That other nodes cannot read what is to outlive this one."""
        return self._doubts

    def place_facts(self) -> dict[str, str]:
        """``directory``: that opening has made it, and which ones above it. A path that is misspelt shows there."""
        made = self.directory.made
        above = f", with those above it from {made[0]} on" if len(made) > 1 else ""
        return {"directory": f"was missing: made when the tier was opened{above}"} if made else {}

    def mapped_errors(self, key: str | None = None) -> AbstractContextManager[None]:
        """The driver's edge: inside, an ``OSError`` becomes the ``TierError`` it means."""
        return map_os_errors(self._url, key)

    async def open(self) -> None:
        await self._opened(self.prepare)

    async def open_to_read(self) -> None:
        await self._opened(self.prepare_to_read)

    async def _opened(self, prepare: Callable[[], None]) -> None:
        if self._threads is not None:
            raise RuntimeError(f"{self._url} is open already")
        self._threads = DaemonThreads(THREADS, f"tiercheck {self._url}")

        def check_and_prepare(_: Callable[[], None]) -> None:
            if self._mount_point is not None:
                check_mounted(self.directory.root, self._mount_point)
            prepare()

        try:
            await self.run(check_and_prepare)
        except BaseException:
            await self.close()
            raise

    async def leftovers(self) -> Sequence[Leftover]:
        return await self.run(lambda _: tuple(self.directory.leftovers()))

    async def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is None:
            return
        threads.end()
        transfer = self.directory.transfer
        ended, _ = await asyncio.wait({asyncio.wrap_future(threads.ended)}, timeout=ENDING_S if self.may_hang else None)
        if ended:
            await asyncio.to_thread(transfer.close)
        else:
            threads.ended.add_done_callback(lambda _: transfer.close())

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        self.directory.check_key(key)
        if mode.conditional and self.is_open and not self.capabilities.conditional_put:
            raise Unsupported(
                "the mount carries no locks across nodes, as far as is known, so that a put knows no conditions; mount "
                "it with them (Lustre: -o flock)",
                tier=self._url,
                key=key,
            )
        taking_turns = turns_in_threads(payload_bytes(payload), self._capabilities.part_bytes)
        return await self.run(lambda check: self.directory.store(key, payload, mode, taking_turns(check)), key)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        self.directory.check_key(key)
        if into is None:
            return await self.run(lambda check: self.fetch(key, range, check), key)
        nbytes = await self.run(lambda check: self.fetch_into(key, range, into, check), key)
        return into[:nbytes]

    async def stat(self, key: str) -> ObjectInfo:
        self.directory.check_key(key)
        return await self.run(lambda _: self.directory.info(key), key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        found = self.directory.scan(prefix)
        while page := await self.run(lambda _: list(itertools.islice(found, LIST_PAGE))):
            for item in page:
                yield item

    async def delete(self, keys: Iterable[str]) -> None:
        checked = list(keys)
        for key in checked:
            self.directory.check_key(key)

        def remove_all(check: Callable[[], None]) -> None:
            for key in checked:
                check()
                with self.mapped_errors(key):
                    self.directory.remove(key)

        await self.run(remove_all)

    async def usage(self) -> Usage:
        return await self.run(lambda _: self.measure())

    # For subclasses.

    def prepare(self) -> None:
        """Make the directory ready; runs in a thread."""
        self.directory.prepare()
        mount = mount_of(self.directory.root)
        if self._capabilities.survives >= Survives.NODE and is_local(mount):
            claimed = self._capabilities.survives.name.lower()
            self._doubts = (
                f"survives={claimed} is claimed of {self.directory.root}, which lies on {mount.type}, a file system of "
                "this node alone",
            )

    def prepare_to_read(self) -> None:
        """See that the directory is there, and change nothing; runs in a thread."""
        self.directory.prepare_to_read()

    def measure(self) -> Usage:
        """Bytes held, and the limit that the file system sets; runs in a thread."""
        used = self.directory.held_bytes()
        status = os.statvfs(self.directory.root)
        return Usage(used, used + status.f_bavail * status.f_frsize)

    async def run(
        self,
        work: Callable[[Callable[[], None]], T],
        key: str | None = None,
        undo: Callable[[T], None] | None = None,
    ) -> T:
        """``work`` in a thread, its errors mapped.

        ``work`` is given a function that raises once the caller was cancelled, and calls it where it can stop.
        If it finishes all the same, ``undo`` is given what nobody will receive.
        """
        threads = self._threads
        if threads is None:
            raise Closed("the driver is not open", tier=self._url, key=key)
        cancelled = threading.Event()

        def check() -> None:
            if cancelled.is_set():
                raise Abandoned

        # The thread lets go of what it ran, and of what that returned, only after the caller has its answer. By then
        # the buffers must be free, and what was read must be the caller's alone: a view keeps the room of its file.
        box, results = [work], list[T]()
        del work

        def call() -> None:
            with self.mapped_errors(key):
                results.append(box.pop()(check))

        job = threads.submit(call)
        future = asyncio.wrap_future(job)

        def stop(_: asyncio.Future[None]) -> None:
            cancelled.set()
            if job.cancel():
                box.clear()

        async def take_back(_: None) -> None:
            if undo is not None:
                undo(results.pop())

        await settled(future, stop=stop, undo=take_back)
        return results.pop()

    def fetch(self, key: str, range: ByteRange | None, check: Callable[[], None]) -> memoryview:
        """The bytes, mapped or read; runs in a thread."""
        fd = self.directory.open_object(key)
        try:
            nbytes = os.fstat(fd).st_size
            wanted = bounded(range, nbytes, key)
            if len(wanted) <= COPIED_BYTES_MAX or not self.maps:
                content = fresh_memory(len(wanted))
                self.directory.transfer.read(fd, wanted.start, content, check)
                self.directory.unlock_object(fd)
                return content.toreadonly()
            return self.map_object(fd, nbytes)[wanted.start : wanted.stop]
        finally:
            close_read(fd)

    def map_object(self, fd: int, nbytes: int) -> memoryview:
        """All of an open object, read-only. It holds the open file, and with it the lock that keeps it as it is."""
        return memoryview(mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ))

    def fetch_into(self, key: str, range: ByteRange | None, into: memoryview, check: Callable[[], None]) -> int:
        """Fill ``into`` with the bytes, and count them; runs in a thread."""
        fd = self.directory.open_object(key)
        try:
            wanted = bounded(range, os.fstat(fd).st_size, key)
            if into.nbytes < len(wanted):
                raise ValueError(f"into has {into.nbytes} bytes; {key!r} needs {len(wanted)}")
            with into[: len(wanted)] as part:
                self.directory.transfer.read(fd, wanted.start, part, check)
            return len(wanted)
        finally:
            try:
                self.directory.unlock_object(fd)
            finally:
                close_read(fd)


def fresh_memory(nbytes: int) -> memoryview:
    """Writable memory; of many bytes it is page-aligned, and costs nothing before it is touched."""
    return memoryview(mmap.mmap(-1, nbytes) if nbytes > COPIED_BYTES_MAX else bytearray(nbytes))


def bounded(range: ByteRange | None, nbytes: int, key: str) -> ByteRange:
    """The range asked for, or the whole object. ``ValueError`` if it reaches past the end."""
    if range is None:
        return ByteRange(0, nbytes)
    if range.stop > nbytes:
        raise ValueError(f"{range} reaches past the end of {key!r}, which has {nbytes} bytes")
    return range

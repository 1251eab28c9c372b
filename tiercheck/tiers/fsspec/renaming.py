"""File systems with directories, on which an object is published by moving a temporary file onto its key.

Modification times are set to stamps that differ from put to put, if the file system lets us: so an etag made of
them does not repeat, though SFTP, say, keeps whole seconds only.
"""

from __future__ import annotations

import abc
import asyncio
import errno
import os
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

from tiercheck.errors import Transient, Unsupported
from tiercheck.tiers.fsspec.backends import CONTROL, Backend, Parts, Reading, opened, token
from tiercheck.tiers.fsspec.errors import meaning_of
from tiercheck.tiers.fsspec.workers import Ticket

__all__ = ["MovingBackend", "RenamingBackend", "SftpBackend", "Stamps"]

T = TypeVar("T")

TEMPORARY = f"{CONTROL}/tmp"
DEBRIS_AGE_S = 24 * 3600
"""A temporary file that nobody has written to for so long is what a dead process has left."""
PUBLISH_TRIES = 5
"""Another client may remove a directory that has become empty just before a file is moved there."""


class Stamps:
    """Modification times that never repeat for a path, in steps of the file system's, near the true time.

    They are remembered by the process as long as they lie in the future; what another process has put there is seen
    on the file itself. So only a key that one process deletes and another puts again within one step, or that two put
    at the same moment, with as many bytes, can get the same stamp twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, int] = {}

    def next(self, path: str, now: int, current: int | None) -> int:
        """The next stamp of ``path``, whose file has the stamp ``current``."""
        with self._lock:
            stamp = max(now, self._last.get(path, -1) + 1, -1 if current is None else current + 1)
            self._last[path] = stamp
            if len(self._last) % 1024 == 0:
                self._last = {key: last for key, last in self._last.items() if last >= now}
            return stamp


_stamps = Stamps()


class RenamingBackend(Backend):
    """A temporary file, written whole, takes the place of the object by :meth:`replace`, which is atomic."""

    publishes = "by rename"

    def prepare(self) -> None:
        """Make the tier's directory, and remove what dead processes have left there."""
        self.fs.makedirs(self.path_of(TEMPORARY), exist_ok=True)
        for info in self._entries(TEMPORARY):
            if info["type"] == "file" and time.time() - age_stamp_s(info) > DEBRIS_AGE_S:
                self._drop(str(info["name"]))

    def publish(self, key: str, parts: Parts, nbytes: int, ticket: Ticket) -> None:
        path, temporary = self.path_of(key), self.path_of(f"{TEMPORARY}/{token()}")
        try:
            self.write(temporary, parts)
            self.stamp(temporary, path)
            self._move(temporary, path, ticket)
        except BaseException as error:
            self._drop(temporary)
            reason = self._reason(key, nbytes) if may_have_a_reason(error) else None
            if reason is not None:
                raise reason from error
            raise

    def write(self, path: str, parts: Parts) -> None:
        """Write a new file; on return its bytes are as durable as the file system can make them."""
        with opened(self.fs, path, "wb") as file:
            for part in parts:
                file.write(part)

    def stamp(self, temporary: str, path: str) -> None:
        """Give the temporary file a modification time that no earlier file at ``path`` had."""

    @abc.abstractmethod
    def replace(self, source: str, path: str) -> None:
        """Move ``source`` to ``path``, atomically in the place of what may be there."""

    def _move(self, temporary: str, path: str, ticket: Ticket) -> None:
        for attempt in range(1, PUBLISH_TRIES + 1):
            ticket.check()
            try:
                return self.replace(temporary, path)
            except FileNotFoundError:
                if attempt == PUBLISH_TRIES:
                    raise
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return None

    def _drop(self, path: str) -> None:
        with suppress(Exception):  # it is not there, or the server is not; then it is debris, and goes at some open
            self.fs.rm_file(path)

    def _reason(self, key: str, nbytes: int) -> Exception | None:
        """What it was, if the file system may only have said that something failed."""
        with suppress(Exception):  # then it cannot say more than it did
            self.fs.invalidate_cache()
            above = key.split("/")[:-1]
            folders = ("/".join(above[:n]) for n in range(1, len(above) + 1))
            if self.fs.isdir(self.path_of(key)) or any(self.fs.isfile(self.path_of(folder)) for folder in folders):
                return IsADirectoryError(errno.EISDIR, "another key lies under this one, or is what it lies under")
            free_bytes = self.free_bytes()
            if free_bytes is not None and free_bytes < max(nbytes, 1):
                return OSError(errno.ENOSPC, f"the object has {nbytes} bytes, and {free_bytes} are free")
        return None


class MovingBackend(RenamingBackend):
    """Any file system whose ``mv`` replaces a file atomically, on the word of the user (``publish=rename``)."""

    def prepare(self) -> None:
        if getattr(self.fs.mv, "__qualname__", "") == "AbstractFileSystem.mv":
            raise Unsupported(
                f"{type(self.fs).__name__} has no mv of its own: fsspec's copies the file and deletes it, and a reader "
                "may see half of the copy, so publish=rename cannot be true"
            )
        super().prepare()

    def replace(self, source: str, path: str) -> None:
        self.fs.mv(source, path)


class SftpBackend(RenamingBackend):
    """SFTP through ``sshfs`` (asyncssh): renames by the extension ``posix-rename@openssh.com``, which replaces.

    The plain rename of the protocol refuses to replace, and fsspec's ``mv`` copies if the extension is missing;
    so the extension is called by name. Data are made durable by ``fsync@openssh.com`` if the server has it.

    Modification times are whole seconds, and two processes that put one key at once may choose the same one. So an
    object is read through one open file, which the server keeps as it was, whatever is moved onto its name.
    """

    ways_of_reading = (Reading.STEADY,)

    def __init__(self, fs: Any, root: str, *, place: str, part_bytes: int, deadline_s: float) -> None:
        super().__init__(fs, root, place=place, part_bytes=part_bytes, deadline_s=deadline_s)
        self._fsync = True
        if not hasattr(fs, "client"):
            raise Unsupported(
                f"{type(fs).__module__} cannot replace a file atomically over SFTP; install sshfs: pip install sshfs"
            )
        hush_lost_connections(fs.loop)
        self._channel = self._on_loop(fs.client.start_sftp_client)

    def write(self, path: str, parts: Parts) -> None:
        with opened(self.fs, path, "wb") as file:
            for part in parts:
                file.write(part)
            if self._fsync:
                try:
                    file.fsync()
                except Exception as error:
                    if type(error).__name__ != "SFTPOpUnsupported":
                        raise
                    self._fsync = False

    def stamp(self, temporary: str, path: str) -> None:
        try:
            current = int(self.fs.info(path)["mtime"].timestamp())
        except FileNotFoundError:
            current = None
        stamp_s = _stamps.next(f"{self.place} {path}", int(time.time()), current)
        self._on_loop(lambda: self._channel.utime(temporary, (stamp_s, stamp_s)))

    def replace(self, source: str, path: str) -> None:
        try:
            self._on_loop(lambda: self._channel.posix_rename(source, path))
        except Exception as error:
            if type(error).__name__ in ("SFTPNoSuchFile", "SFTPNoSuchPath"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
            if type(error).__name__ == "SFTPOpUnsupported":
                raise Unsupported(
                    "the SFTP server lacks posix-rename@openssh.com, so it cannot replace a file atomically"
                ) from error
            raise

    def free_bytes(self) -> int | None:
        try:
            status = self._on_loop(lambda: self._channel.statvfs(self.root or "/"))
        except Exception as error:
            if type(error).__name__ == "SFTPOpUnsupported":
                return None
            raise
        return int(status.bavail * status.frsize)

    def remove_directory(self, path: str) -> None:
        # The file system's own rmdir is fsspec's default, which does nothing.
        self._on_loop(lambda: self._channel.rmdir(path))

    def facts(self) -> dict[str, str]:
        return {"fsync": "yes" if self._fsync else "no: the server lacks fsync@openssh.com, so its crash may lose puts"}

    def is_alive(self) -> bool:
        return not self.fs.client.is_closed()

    def close(self) -> None:
        self.fs.client.close()

    def _on_loop(self, call: Callable[[], Awaitable[T]]) -> T:
        """What sshfs does not offer, asked of asyncssh where its connection lives."""

        async def bounded() -> T:
            return await asyncio.wait_for(call(), self.deadline_s)

        return asyncio.run_coroutine_threadsafe(bounded(), self.fs.loop).result()


def age_stamp_s(info: dict[str, Any]) -> float:
    """When a temporary file was last written to, in seconds of the epoch; now, if the file system does not say."""
    found = info.get("mtime", info.get("modified"))
    stamp = found.timestamp() if isinstance(found, datetime) else found
    return float(stamp) if isinstance(stamp, int | float) else time.time()


def hush_lost_connections(loop: asyncio.AbstractEventLoop) -> None:
    """Keep asyncssh from logging a connection that was lost once more for every request that was under way.

    It raises the first one's exception, which is reported, and forgets to look at the other requests' tasks.
    """
    before = loop.get_exception_handler()
    if isinstance(before, _LostConnectionsHushed):
        return
    loop.call_soon_threadsafe(loop.set_exception_handler, _LostConnectionsHushed(before))


class _LostConnectionsHushed:
    def __init__(self, before: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None) -> None:
        self._before = before

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        names = {kind.__name__ for kind in type(context.get("exception")).__mro__}
        if "future" in context and names & {"ConnectionLost", "SFTPConnectionLost"}:
            return
        if self._before is None:
            loop.default_exception_handler(context)
        else:
            self._before(loop, context)


def may_have_a_reason(error: BaseException) -> bool:
    """Whether a failure may be told as what it was: not if the object may have been published all the same."""
    if not isinstance(error, Exception):
        return False
    meaning = meaning_of(error)
    return meaning is None or meaning[0] is not Transient

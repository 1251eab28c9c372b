"""A directory that many nodes mount, each by a mount that may remember a name after another node has changed it.

FUSE and NFS clients keep names and attributes for a second or more. So that what one client has put, overwritten or
deleted is so for every other one in its next call:

- A name is looked up by listing its directory, which asks the server; what the mount makes of the name has to agree,
  and is waited for. Nothing relies on a lookup alone.
- Names change under the lock, one at a time, and are looked up under it, shared: the servers of such file systems
  exchange a file's name and its attributes in more than one step.
- A directory is opened under it, too, and listed to its end: a mount may read a directory ahead as soon as it is
  opened, and what GlusterFS's server has read it remembers, also if a name has changed meanwhile. Every mount is shown
  that until the name changes again.
- A file being written lies in ``.tiercheck/tmp``, where nobody looks: else a mount that saw it half written would
  remember its size for a while after it is an object.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TypeVar

from tiercheck.errors import Transient
from tiercheck.tiers.posix.beneath import status_of
from tiercheck.tiers.posix.directories.object_files import CONTROL, TEMPORARIES, Entry, info_of
from tiercheck.tiers.posix.directories.shared import SharedDirectory
from tiercheck.tiers.posix.files import close_read, closed_on_error, unlock_and_close
from tiercheck.types import ObjectInfo

__all__ = ["RememberingDirectory"]

T = TypeVar("T")

STALE_S_MAX = 10.0
"""Longer than mounts remember names, unless told to."""
STALE_PAUSE_S = 0.02
LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RememberingDirectory(SharedDirectory):
    """See the module."""

    one_name_at_a_time = True

    def folder_for_writing(self, key: str) -> str:
        del key
        return TEMPORARIES

    def _half_written(self, folder: str) -> Iterator[str]:
        return super()._half_written(folder or TEMPORARIES)

    def names_read(self) -> AbstractContextManager[int | None]:
        return self._names_at_rest(False)

    @contextmanager
    def opened_to_sync(self, folder: str) -> Iterator[int]:
        with ExitStack() as undo:
            with self.names_read():
                fd = undo.enter_context(self.beneath.listed(folder))
                os.listdir(fd)  # noqa: PTH208  (a descriptor is no path)
            yield fd

    def look_up(self, path: str) -> os.stat_result:
        """As the server has it now; the caller holds the lock.

        Errors: ``FileNotFoundError``, ``NotADirectoryError``; ``Transient`` after :data:`STALE_S_MAX`.
        """
        return until_agreed(lambda: self._look_up_once(path), path)

    def info(self, key: str) -> ObjectInfo:
        with self._names_at_rest(False):
            return super().info(key)

    def open_object(self, key: str) -> int:
        self.check_key(key)

        def opened() -> int | None:
            """A descriptor of what the listing shows, or ``None`` if the mount opens, or remembers, another one."""
            try:
                expected = info_of(key, self.look_up(key))
            except (FileNotFoundError, NotADirectoryError):
                raise self._absent(key) from None
            fd = super(RememberingDirectory, self).open_object(key)
            with closed_on_error(fd):
                found = info_of(key, os.fstat(fd))
            if found == expected:
                return fd
            close_read(fd)
            return None

        with ExitStack() as undo:
            with self._names_at_rest(False):
                fd = until_agreed(opened, key)
                undo.callback(unlock_and_close, fd)
            undo.pop_all()
        return fd

    def scan(self, prefix: str = "", *, locked: bool = False) -> Iterator[ObjectInfo]:
        parent = prefix.rpartition("/")[0]
        if parent:
            try:
                self.check_key(parent)
                with self._names_at_rest(locked):
                    self.look_up(parent)
            except (FileNotFoundError, NotADirectoryError, ValueError):
                return  # there is no such directory, or no key is in it
        yield from super().scan(prefix, locked=locked)

    def entries(self, folder: str, start: str, locked: bool) -> list[Entry]:
        """With the status of each, once the mount agrees with the listing."""
        found = []
        # Opened under the lock, too: a mount that reads ahead may show later what it read then.
        with self._names_at_rest(locked), self.beneath.listed(folder) as fd:
            with os.scandir(fd) as listed:
                inodes = {entry.name: entry.inode() for entry in listed if entry.name.startswith(start)}
            for name, inode in inodes.items():
                if not folder and name == CONTROL:
                    continue
                path = f"{folder}/{name}" if folder else name
                try:
                    status = agreed_status(fd, name, inode) or self.look_up(path)
                except FileNotFoundError:
                    continue  # the server does not list it any more: somebody removed it who holds no lock
                if stat.S_ISLNK(status.st_mode):
                    self._tell_link(path)
                elif stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode):
                    found.append(Entry(name, stat.S_ISDIR(status.st_mode), status))
        return found

    def held_bytes(self, *, locked: bool = False) -> int:
        """Of the objects alone: to look at a file being written would be to remember its size."""
        return sum(found.nbytes for found in self.scan(locked=locked))

    def make_folder(self, path: str) -> bool:
        with suppress(FileNotFoundError):  # the mount knows by now
            self.look_up(path)
        return super().make_folder(path)

    def current_status(self, folder: int, key: str) -> os.stat_result:
        del folder
        return self.look_up(key)

    def _look_up_once(self, path: str) -> os.stat_result | None:
        """``None`` if the mount does not agree with the server about a name on the way."""
        above = self.beneath.open("", LISTED)
        try:
            *folders, last = path.split("/")
            for name in folders:
                status = listed_status(above, name, path)
                if status is None:
                    return None
                if stat.S_ISLNK(status.st_mode):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                below = os.open(name, LISTED, dir_fd=above)
                os.close(above)
                above = below
                if os.fstat(above).st_ino != status.st_ino:
                    return None
            return listed_status(above, last, path)
        except FileNotFoundError as error:
            # One that the listing shows, and the mount does not know: it remembers. (What is not listed has its path.)
            if error.filename == path:
                raise
            return None
        finally:
            os.close(above)


def listed_status(folder: int, name: str, path: str) -> os.stat_result | None:
    """What the mount makes of a name that the open directory lists; ``None`` if it does not agree.

    Errors: ``FileNotFoundError`` for ``path``, if the name is not listed.
    """
    with os.scandir(folder) as entries:
        inodes = {entry.name: entry.inode() for entry in entries}  # to its end: see the module
    if name not in inodes:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return agreed_status(folder, name, inodes[name])


def agreed_status(folder: int, name: str, inode: int) -> os.stat_result | None:
    """What the mount makes of a name that is listed with ``inode``; ``None`` if that is another file, or none."""
    with suppress(FileNotFoundError):
        status = status_of(folder, name)
        if status.st_ino == inode:
            return status
    return None


def until_agreed(look: Callable[[], T | None], path: str) -> T:
    """What ``look`` finds as soon as it finds something. Errors: ``Transient`` after :data:`STALE_S_MAX`."""
    deadline = time.monotonic() + STALE_S_MAX
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise Transient(
                f"the mount has shown an old {path} for {STALE_S_MAX:.0f} s; remount it, or ask who runs it"
            )
        time.sleep(STALE_PAUSE_S)
    return found

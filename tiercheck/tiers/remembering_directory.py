"""A directory that many nodes mount, each by a mount that may remember a name after another node has changed it.

FUSE and NFS clients keep names and attributes for a second or more. So that what one client has put, overwritten or
deleted is so for every other one in its next call:

- A name is looked up by listing its directory, which asks the server; what the mount makes of the name has to agree,
  and is waited for. Nothing relies on a lookup alone.
- Names change under the lock, one at a time, and are looked up under it, shared: the servers of such file systems
  exchange a file's name and its attributes in more than one step.
- A file being written lies in ``.tiercheck/tmp``, where nobody looks: else a mount that saw it half written would
  remember its size for a while after it is an object.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

from tiercheck.errors import Transient
from tiercheck.tiers.directory import Entry, info_of, not_found
from tiercheck.tiers.shared_directory import SharedDirectory
from tiercheck.types import ObjectInfo, PutMode

__all__ = ["RememberingDirectory"]

T = TypeVar("T")

STALE_S_MAX = 10.0
"""Longer than mounts remember names, unless told to."""
STALE_PAUSE_S = 0.02


class RememberingDirectory(SharedDirectory):
    """See the module."""

    def folder_for_writing(self, path: Path) -> Path:
        del path
        return self.control / "tmp"

    def names_changing(self, mode: PutMode) -> AbstractContextManager[int]:
        del mode
        return self.locked()

    def _names_at_rest(self, already: bool) -> AbstractContextManager[int | None]:
        return nullcontext() if already else self.locked(shared=True)

    def look_up(self, path: Path) -> os.stat_result:
        """As the server has it now; the caller holds the lock.

        Errors: ``FileNotFoundError``, ``NotADirectoryError``; ``Transient`` after :data:`STALE_S_MAX`.
        """
        return until_agreed(lambda: self._look_up_once(path), path)

    def info(self, key: str) -> ObjectInfo:
        with self._names_at_rest(False):
            return super().info(key)

    def open_object(self, key: str) -> int:
        path = self.path_of(key)

        def opened() -> int | None:
            """A descriptor of what the listing shows, or ``None`` where the mount opens, or remembers, another one."""
            try:
                expected = info_of(key, self.look_up(path))
            except (FileNotFoundError, NotADirectoryError):
                raise not_found(key) from None
            fd = super(RememberingDirectory, self).open_object(key)
            if info_of(key, os.fstat(fd)) == expected:
                return fd
            os.close(fd)
            return None

        with self._names_at_rest(False):
            return until_agreed(opened, path)

    def scan(self, prefix: str = "", *, locked: bool = False) -> Iterator[ObjectInfo]:
        parent = prefix.rpartition("/")[0]
        if parent:
            try:
                with self._names_at_rest(locked):
                    self.look_up(self.path_of(parent))
            except (FileNotFoundError, NotADirectoryError, ValueError):
                return  # there is no such directory, or no key is in it
        yield from super().scan(prefix, locked=locked)

    def entries(self, folder: Path, start: str, locked: bool) -> list[Entry]:
        """With the status of each, once the mount agrees with the listing."""
        with self._names_at_rest(locked):
            with os.scandir(folder) as listed:
                inodes = {entry.name: entry.inode() for entry in listed if entry.name.startswith(start)}
            found = []
            for name, inode in inodes.items():
                path = folder / name
                if path == self.control:
                    continue
                status = path.lstat()
                if status.st_ino != inode:
                    status = self.look_up(path)
                if stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode):
                    found.append(Entry(name, stat.S_ISDIR(status.st_mode), status))
            return found

    def held_bytes(self, *, locked: bool = False) -> int:
        """Of the objects alone: to look at a file being written would be to remember its size."""
        return sum(found.nbytes for found in self.scan(locked=locked))

    def _make_parents(self, path: Path, key: str) -> None:
        try:
            self.look_up(path.parent)
        except FileNotFoundError:
            pass  # the mount knows by now
        except NotADirectoryError:
            raise self._nested(key) from None
        super()._make_parents(path, key)

    def _look_up_once(self, path: Path) -> os.stat_result | None:
        """``None`` where the mount does not agree with the server about a name on the way."""
        above = self.root
        status = above.lstat()
        for name in path.relative_to(self.root).parts:
            with os.scandir(above) as entries:
                inode = next((entry.inode() for entry in entries if entry.name == name), None)
            if inode is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(above / name))
            above /= name
            try:
                status = above.lstat()
            except FileNotFoundError:
                return None
            if status.st_ino != inode:
                return None
        return status


def until_agreed(look: Callable[[], T | None], path: Path) -> T:
    """What ``look`` finds as soon as it finds something. Errors: ``Transient`` after :data:`STALE_S_MAX`."""
    deadline = time.monotonic() + STALE_S_MAX
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise Transient(
                f"the mount has shown an old {path} for {STALE_S_MAX:.0f} s; remount it, or ask who runs it"
            )
        time.sleep(STALE_PAUSE_S)
    return found

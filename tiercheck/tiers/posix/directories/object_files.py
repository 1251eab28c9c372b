"""Files as objects: what a file says of its object, and one that is being written."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tiercheck.errors import AlreadyExists, NotFound, PreconditionFailed, Transient
from tiercheck.tiers.posix.beneath import status_of
from tiercheck.types import ObjectInfo, Payload, PutMode

__all__ = [
    "CONTROL",
    "DEBRIS_AGE_S",
    "FOREIGN_DEBRIS_AGE_S",
    "HOST",
    "TEMPORARIES",
    "Entry",
    "Temporary",
    "check_condition",
    "info_of",
    "is_file",
    "name_in_folder",
    "not_found",
    "once_published",
    "payload_bytes",
]

CONTROL = ".tiercheck"
"""The directory, beside the objects, that is TierCheck's own; no key may begin with it."""
TEMPORARIES = f"{CONTROL}/tmp"
DEBRIS_AGE_S = 60.0
"""A younger temporary file may be one whose writer has yet to lock it."""
FOREIGN_DEBRIS_AGE_S = 24 * 3600
"""Another host's temporary file is debris once it is this old: its lock may not reach us."""
HOST = "".join(c if c.isalnum() else "_" for c in socket.gethostname())[:64] or "host"


@dataclass(frozen=True)
class Temporary:
    """A file being written: open, locked exclusively, and not yet an object.

    ``folder`` is the open directory that it lies in, and goes with it; ``None``: it is named by its whole path.
    """

    path: str
    fd: int
    stamp_ns: int
    folder: int | None = None

    @property
    def name(self) -> str:
        """The name that system calls take together with ``folder``."""
        return self.path if self.folder is None else self.path.rpartition("/")[2]

    def exists(self) -> bool:
        """Whether the name still is the file's, or anybody's."""
        try:
            os.stat(self.name, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def unlink(self) -> None:
        os.unlink(self.name, dir_fd=self.folder)


@dataclass(frozen=True)
class Entry:
    """What a listing of a directory shows. ``status``: if the listing came with it."""

    name: str
    is_directory: bool
    status: os.stat_result | None = None

    def order(self) -> bytes:
        # A directory sorts as its name with the slash: the order of keys, not of names.
        return os.fsencode(self.name) + (b"/" if self.is_directory else b"")


@contextmanager
def once_published(key: str) -> Iterator[None]:
    """What is left to do when an object has its name. Errors: ``Transient`` for whatever the system refuses.

    Not the error's usual meaning: ``CapacityExceeded``, say, would promise that nothing was published.
    """
    try:
        yield
    except OSError as error:
        raise Transient(
            f"the object is published, but may not outlive a power failure: {error.strerror or error}; put it again",
            key=key,
        ) from error


def check_condition(mode: PutMode, key: str, current: os.stat_result | None) -> None:
    """Errors: ``AlreadyExists``, ``PreconditionFailed``."""
    if mode.kind == "create" and current is not None:
        raise AlreadyExists("there is an object under this key already", key=key)
    if mode.kind == "update":
        found = None if current is None else info_of(key, current).etag
        if found != mode.etag:
            raise PreconditionFailed(f"the etag should be {mode.etag!r}, but it is {found!r}", key=key)


def payload_bytes(payload: Payload) -> int:
    return sum(memoryview(buffer).nbytes for buffer in payload)


def info_of(key: str, status: os.stat_result) -> ObjectInfo:
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return ObjectInfo(key, status.st_size, etag, status.st_mtime)


def name_in_folder(key: str) -> str:
    return key.rpartition("/")[2]


def is_file(folder: int, name: str, fd: int) -> bool:
    """Whether ``name`` is a name of the open file ``fd``."""
    try:
        return os.path.samestat(status_of(folder, name), os.fstat(fd))
    except FileNotFoundError:
        return False


def not_found(key: str) -> NotFound:
    return NotFound("there is no object under this key", key=key)

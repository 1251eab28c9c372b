"""Objects as files of a directory that many nodes mount: what the lustre driver is made of.

As in :mod:`tiercheck.tiers.directory` an object is the file ``<root>/<key>``. What differs serves a file system
whose metadata is far away:

- A file being written lies beside its target, under a name that no key can have (it holds a backslash): renaming
  inside a directory concerns one metadata server.
- Names change under a *shared* lock, so that writers do not wait for one another; a put on condition of an etag,
  and a listing, take it exclusively. A creation needs no lock: ``link`` fails where the name exists. Where the
  mount carries no locks there are none: then puts know no conditions.
- A directory's own name is made durable once, not with every put into it.
- Etags need no counter that all clients share: the part of a second in a modification time is drawn at random.

Mounts that may remember a name after it has changed are :mod:`tiercheck.tiers.remembering_directory`'s.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

from tiercheck.errors import AlreadyExists, TierError, Transient
from tiercheck.tiers.directory import (
    CONTROL,
    FOREIGN_DEBRIS_AGE_S,
    HOST,
    ObjectDirectory,
    Temporary,
    check_condition,
    info_of,
    once_published,
    payload_bytes,
)
from tiercheck.tiers.files import locked, try_lock, unlock
from tiercheck.tiers.mounts import Traits
from tiercheck.types import ObjectInfo, Payload, PutMode

__all__ = ["NO_LOCKS", "TEMPORARY_PREFIX", "SharedDirectory"]

TEMPORARY_PREFIX = f"{CONTROL}\\"
"""No key has a backslash, so that no key, and no listing, ever meets a file being written."""
DEBRIS_AGE_S = 60.0
"""A writer locks its file at once; what is unlocked and older than this has lost its writer."""
ATTEMPTS_MAX = 100
ANCHORED_MAX = 4096
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""What flock answers on a mount that carries no locks."""

T = TypeVar("T")
CreateFile = Callable[[Path, int], int]


class SharedDirectory(ObjectDirectory):
    """``traits``: what the mount promises. ``create_file(path, nbytes)`` makes and opens a new file, 0600."""

    def __init__(self, root: Path, traits: Traits) -> None:
        super().__init__(root, durable=True)
        self.traits = traits
        self.locks = traits.locks
        self.create_file: CreateFile = create_plain
        self._anchored: set[int] = set()
        self._left_over: list[Path] = []
        self._guard = threading.Lock()

    def prepare(self) -> None:
        """Make the tier's own directory (0700), find out about locks, and remove what dead writers left."""
        try:
            made = self._make_directory(self.control / "tmp")
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            raise TierError(f"the directory {self.root} cannot be made: {error.strerror}: {error.filename}") from error
        if made:
            self._sync_upwards(self.control / "tmp", made[0].parent)
        try:
            with locked(self.control / "lock"):
                self.locks = True
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.locks = False
        self.reclaim()

    # How names change; a mount that may remember old ones needs other ways.

    def folder_for_writing(self, path: Path) -> Path:
        """Where the file lies that will become ``path``."""
        return path.parent

    def names_changing(self, mode: PutMode) -> AbstractContextManager[int]:
        """Held while a put changes a name."""
        return self.locked(shared=mode.kind != "update")

    def _names_at_rest(self, already: bool) -> AbstractContextManager[int | None]:
        # Exclusively, since those who change names hold it shared.
        return nullcontext() if already else self.locked()

    @property
    def excludes_other_nodes(self) -> bool:
        """Whether the lock keeps the clients on other nodes out."""
        return self.locks and self.traits.locks

    def locked(self, *, shared: bool = False) -> AbstractContextManager[int]:
        return super().locked(shared=shared) if self.locks else nullcontext(-1)

    # Writing.

    def store(self, key: str, payload: Payload, mode: PutMode, check: Callable[[], None]) -> ObjectInfo:
        self._remove_left_over()
        nbytes = payload_bytes(payload)
        temporary = self.create_temporary_for(key, nbytes)
        try:
            self.transfer.write(temporary.fd, payload, nbytes, check)
            check()
            return self.publish(temporary, key, mode)
        finally:
            self.discard(temporary)

    def publish(self, temporary: Temporary, key: str, mode: PutMode) -> ObjectInfo:
        path = self.path_of(key)
        os.utime(temporary.fd, ns=(temporary.stamp_ns, temporary.stamp_ns))
        os.fsync(temporary.fd)
        info = info_of(key, os.fstat(temporary.fd))
        with self.names_changing(mode):
            current = self._current(path, key)
            check_condition(mode, key, current)
            self.with_parents(path, key, lambda: self._name(Path(temporary.path), path, key, mode))
        with once_published(key):
            self._sync_names(path.parent)
        return info

    def discard(self, temporary: Temporary) -> None:
        try:
            Path(temporary.path).unlink(missing_ok=True)
        except OSError:
            # The file system is away. The object's fate is decided; this file is removed when it is back.
            with self._guard:
                self._left_over.append(Path(temporary.path))
        # A lock that cannot be given back went with the connection, and what close may report, fsync has reported.
        with suppress(OSError):
            if self.locks:
                unlock(temporary.fd)
        with suppress(OSError):
            os.close(temporary.fd)

    def create_temporary_for(self, key: str, nbytes: int) -> Temporary:
        """A file to write an object of ``nbytes`` to, which will be published under ``key``."""
        path = self.path_of(key)
        temporary = self.folder_for_writing(path) / temporary_name(HOST, time.time())
        fd = self.with_parents(temporary, key, lambda: self.create_file(temporary, nbytes))
        if self.locks:
            try_lock(fd)
        # To the second by the clock, below that by chance: see the module's docstring.
        return Temporary(str(temporary), fd, time.time_ns() // 10**9 * 10**9 + secrets.randbelow(10**9))

    def with_parents(self, path: Path, key: str, step: Callable[[], T]) -> T:
        """``step()``, with the directories above ``path`` made where it finds them missing."""
        for _ in range(ATTEMPTS_MAX):
            try:
                return step()
            except NotADirectoryError:
                raise self._nested(key) from None
            except FileNotFoundError:
                # Usually the first object of its version; now and then another client has just removed the last one.
                if not self.control.is_dir():
                    raise
            with suppress(FileNotFoundError):  # one above it has been removed in between: once more
                self._make_parents(path, key)
        raise Transient("the object's directory is removed faster than it can be made; try again", key=key)

    def _name(self, source: Path, path: Path, key: str, mode: PutMode) -> None:
        """Give the file its name, in one step of the server's."""
        try:
            if mode.kind == "create":
                self.link(source, path)
            else:
                self.replace(str(source), path, None)
        except FileExistsError:
            # After an answer that was lost the kernel may have asked twice: then the name is ours.
            if not same_file(path, source):
                raise AlreadyExists("there is an object under this key already", key=key) from None
        except IsADirectoryError:
            raise self._nested(key) from None
        except FileNotFoundError:
            if source.exists():
                raise  # it is the directory that is missing
            raise Transient(
                "the file being written was taken away before it was published; try again", key=key
            ) from None

    def link(self, source: Path, path: Path) -> None:
        """Give ``source`` the name ``path`` as well, which nobody has."""
        os.link(source, path, follow_symlinks=False)

    def _remove_left_over(self) -> None:
        with self._guard:
            left_over, self._left_over = self._left_over, []
        for path in left_over:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                with self._guard:
                    self._left_over.append(path)

    def _sync_names(self, folder: Path) -> None:
        """Make the names in ``folder`` durable, and its own, and those above it up to the tier's.

        Those above it once only, where the number of the directory's inode tells it from a later one of its name.
        """
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # another client has removed what was put, and the directory with it
        try:
            os.fsync(fd)
            inode = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        if folder == self.root or inode in self._anchored:
            return
        self._sync_names(folder.parent)
        if self.traits.inodes_unique:
            with self._guard:
                if len(self._anchored) >= ANCHORED_MAX:
                    self._anchored.clear()
                self._anchored.add(inode)

    # Reading.

    def unlock_object(self, fd: int) -> None:
        """Readers take no lock: a file's content never changes once it has its name."""

    def held_bytes(self, *, locked: bool = False) -> int:
        objects = sum(found.nbytes for found in self.scan(locked=locked))
        for path in self._temporaries(self.root):
            with suppress(FileNotFoundError):  # published, or dropped
                objects += path.lstat().st_size
        return objects

    # Removing.

    def remove(self, key: str) -> None:
        path = self.path_of(key)
        with self.names_changing(PutMode.OVERWRITE):
            try:
                if not stat.S_ISREG(self.look_up(path).st_mode):
                    return
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            folder = path.parent
            while folder != self.root and remove_empty(folder):
                folder = folder.parent
        self._sync_names(folder)

    def reclaim(self) -> None:
        """Remove the files of dead writers: they lie there unlocked, or, where our lock does not reach, for a day."""
        for path in self._temporaries(self.root):
            host, made_s = parse_temporary_name(path.name)
            age_s = time.time() - made_s
            lock_reaches = self.locks and (host == HOST or (self.traits.locks and self.traits.coherent))
            if age_s > FOREIGN_DEBRIS_AGE_S or (lock_reaches and age_s > DEBRIS_AGE_S):
                self._remove_unlocked(path)

    def _remove_unlocked(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            if not self.locks or try_lock(fd):
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def _temporaries(self, folder: Path) -> Iterator[Path]:
        folders = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith(TEMPORARY_PREFIX):
                        yield Path(entry.path)
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
        except FileNotFoundError:
            return
        for below in folders:
            yield from self._temporaries(below)


def temporary_name(host: str, made_s: float) -> str:
    """The name of a file that ``host`` began to write at ``made_s``: so that its age is known without a look at it."""
    return f"{TEMPORARY_PREFIX}{host}-{int(made_s)}-{secrets.token_hex(8)}"


def parse_temporary_name(name: str) -> tuple[str, float]:
    """Host and time of a :func:`temporary_name`; one that is none has no host, and is of this moment."""
    host, _, rest = name.removeprefix(TEMPORARY_PREFIX).partition("-")
    made_s = rest.partition("-")[0]
    return (host, float(made_s)) if made_s.isdecimal() else ("", time.time())


def create_plain(path: Path, nbytes: int) -> int:
    """Make and open the file ``path``, which must not exist."""
    del nbytes
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def same_file(path: Path, other: Path) -> bool:
    """Whether both are names of one file; ``False`` where either is missing."""
    try:
        return path.samefile(other)
    except FileNotFoundError:
        return False


def remove_empty(folder: Path) -> bool:
    """Remove the directory where it is empty, or gone already."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise
        return False
    return True

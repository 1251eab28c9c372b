"""Objects as files of a directory that many nodes mount: what the lustre driver is made of.

As in :mod:`tiercheck.tiers.posix.directories.local` an object is the file ``<root>/<key>``. What differs serves
a file system whose metadata is far away:

- A file being written lies beside its target, under a name that no key can have (it holds a backslash): renaming
  inside a directory concerns one metadata server.
- A file gets a name that nobody has without any lock: ``link`` fails if somebody has it, and a listing shows the other
  names all the same. So the ranks of a large job, whose objects have names of their own, wait neither for one another
  nor for those who list. Names are listed, and go, under a *shared* lock; a put that takes the place of an object, or
  has an etag as its condition, takes it exclusively. If the mount carries no locks there are none: then puts know no
  conditions.
- A directory's own name is made durable once, not with every put into it.
- Etags need no counter that all clients share: the part of a second in a modification time is drawn at random.

Mounts that may remember a name after it has changed are :mod:`tiercheck.tiers.posix.directories.remembering`'s.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from tiercheck.errors import AlreadyExists, Unsupported
from tiercheck.tiers.posix.beneath import parent_of
from tiercheck.tiers.posix.directories.debris import leftover
from tiercheck.tiers.posix.directories.local import NOT_OURS, ObjectDirectory
from tiercheck.tiers.posix.directories.object_files import (
    CONTROL,
    DEBRIS_AGE_S,
    FOREIGN_DEBRIS_AGE_S,
    HOST,
    Temporary,
    name_in_folder,
    once_published,
    payload_bytes,
)
from tiercheck.tiers.posix.directories.place import make_place
from tiercheck.tiers.posix.files import try_lock, unlink_quietly, unlock, unlock_and_close
from tiercheck.tiers.posix.mounts import Traits
from tiercheck.types import Leftover, ObjectInfo, Payload, PutMode

__all__ = ["NO_LOCKS", "TEMPORARY_PREFIX", "SharedDirectory"]

TEMPORARY_PREFIX = f"{CONTROL}\\"
"""No key has a backslash, so that no key, and no listing, ever meets a file being written."""
RECLAIMED = f"{CONTROL}/reclaimed"
"""Modified when somebody last looked for what dead writers have left."""
ANCHORED_MAX = 4096
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""What flock answers on a mount that carries no locks."""

CreateFile = Callable[[int, Path, int], int]


class SharedDirectory(ObjectDirectory):
    """``traits``: what the mount promises. ``create_file(folder, path, nbytes)`` makes and opens a new
    file, 0600, in the directory that is open as ``folder``."""

    one_name_at_a_time = False
    """Whether the lock is held alone whenever a name changes: also for one that nobody has, and for one that goes."""

    def __init__(self, root: Path, traits: Traits) -> None:
        super().__init__(root, durable=True)
        self.traits = traits
        self.locks = traits.locks
        self.create_file: CreateFile = create_plain
        self._anchored: set[int] = set()
        self._left_over: list[str] = []
        self._guard = threading.Lock()

    def prepare(self) -> None:
        """Make the tier's own directory (0700), find out about locks, and remove what dead writers left."""
        self.made = make_place(self.beneath, durable=True)
        self.locks = True
        try:
            with self.locked():
                pass
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.locks = False
        self.reclaim()

    def prepare_to_read(self) -> None:
        super().prepare_to_read()
        self.locks = False

    # How names change; a mount that may remember old ones needs other ways.

    def folder_for_writing(self, key: str) -> str:
        """Where the file lies that will become ``key``."""
        return parent_of(key)

    def names_read(self) -> AbstractContextManager[int | None]:
        """Held from before a directory is opened until it has been listed to its end."""
        return nullcontext()

    def opened_to_sync(self, folder: str) -> AbstractContextManager[int]:
        """A descriptor of a directory, to make its names durable. Errors: ``FileNotFoundError``."""
        return self.beneath.listed(folder)

    @property
    def excludes_other_nodes(self) -> bool:
        """Whether the lock keeps the clients on other nodes out."""
        return self.locks and self.traits.locks

    def locked(self, *, shared: bool = False) -> AbstractContextManager[int]:
        return super().locked(shared=shared) if self.locks else nullcontext(-1)

    # Writing.

    def share_lock(self, temporary: Temporary) -> None:
        """Readers take none, so the writer keeps its own."""

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
        self.check_key(key)
        info = self.stamped(temporary, key)
        if not self._named_if_free(temporary, key, mode):
            with self.locked():
                self.give_name(temporary, key, mode)
        with once_published(key):
            self._sync_names(parent_of(key))
        return info

    def _named_if_free(self, temporary: Temporary, key: str, mode: PutMode) -> bool:
        """Give the file the key's name if nobody has it. Returns whether it has it now."""
        if mode.kind == "update" or self.one_name_at_a_time:
            return False
        if self.locks:
            os.close(self._open_lock())  # the tier's own directory is there still, and no link
        try:
            self.with_folder(key, mode, lambda folder, _: self._name(temporary, folder, key, PutMode.CREATE, None))
        except (AlreadyExists, Unsupported):  # or there are no hard links; what the mode makes of it is found out next
            return False
        return True

    def discard(self, temporary: Temporary) -> None:
        try:
            with suppress(FileNotFoundError):
                temporary.unlink()
        except OSError:
            # The file system is away. The object's fate is decided; this file is removed when it is back.
            with self._guard:
                self._left_over.append(os.path.relpath(temporary.path, self.root))
        # A lock that cannot be given back went with the connection, and what close may report, fsync has reported.
        with suppress(OSError):
            if self.locks:
                unlock(temporary.fd)
        for fd in (temporary.fd, temporary.folder):
            with suppress(OSError):
                if fd is not None:
                    os.close(fd)

    def create_temporary_for(self, key: str, nbytes: int) -> Temporary:
        """A file to write an object of ``nbytes`` to, which will be published under ``key``."""
        self.check_key(key)
        where, name = self.folder_for_writing(key), temporary_name(HOST, time.time())

        def step(folder: int, made: bool) -> Temporary:
            del made
            path = self.root / where / name
            # To the second by the clock, below that by chance: see the module's docstring.
            stamp_ns = time.time_ns() // 10**9 * 10**9 + secrets.randbelow(10**9)
            with ExitStack() as undo:
                fd = self.create_file(folder, path, nbytes)
                undo.callback(unlock_and_close, fd)
                undo.callback(unlink_quietly, name, folder)
                if self.locks:
                    try_lock(fd)
                temporary = Temporary(str(path), fd, stamp_ns, os.dup(folder))
                undo.pop_all()
            return temporary

        return self.with_folder(f"{where}/{name}" if where else name, PutMode.OVERWRITE, step)

    def _remove_left_over(self) -> None:
        with self._guard:
            left_over, self._left_over = self._left_over, []
        for path in left_over:
            try:
                with suppress(FileNotFoundError):
                    self.beneath.unlink(path)
            except OSError:
                with self._guard:
                    self._left_over.append(path)

    def _sync_names(self, folder: str) -> None:
        """Make the names in ``folder`` durable, and its own, and those above it up to the tier's.

        Those above it once only, if the number of the directory's inode tells it from a later one of its name.
        """
        try:
            with self.opened_to_sync(folder) as fd:
                os.fsync(fd)
                inode = os.fstat(fd).st_ino
        except FileNotFoundError:
            return  # another client has removed what was put, and the directory with it
        if not folder or inode in self._anchored:
            return
        self._sync_names(parent_of(folder))
        if self.traits.inodes_unique:
            with self._guard:
                if len(self._anchored) >= ANCHORED_MAX:
                    self._anchored.clear()
                self._anchored.add(inode)

    # Reading.

    def held_bytes(self, *, locked: bool = False) -> int:
        objects = sum(found.nbytes for found in self.scan(locked=locked))
        for path in self._half_written(""):
            with suppress(FileNotFoundError):  # published, or dropped
                status = self.beneath.status(path)
                objects += status.st_size if status.st_nlink == 1 else 0
        return objects

    # Removing.

    def remove(self, key: str) -> None:
        self.check_key(key)
        with self.locked(shared=not self.one_name_at_a_time):
            try:
                if not stat.S_ISREG(self.look_up(key).st_mode):
                    return
                self.beneath.unlink(key)
            except (FileNotFoundError, NotADirectoryError):
                return
            stays = self.beneath.remove_empty(parent_of(key))
        self._sync_names(stays)

    def reclaim(self, *, at_once: bool = False) -> None:
        """Remove the files of dead writers: they lie there unlocked, or, if our lock does not reach, for a day.

        That lists every directory there is. So of all who open the tier at a time, as the ranks of a job do, one looks;
        and not again before what was too young then may be old enough. ``at_once``: whoever has looked.
        """
        with nullcontext(True) if at_once else self._turn_to_reclaim() as is_mine:
            for path in self._half_written("") if is_mine else ():
                host, made_s = parse_temporary_name(name_in_folder(path))
                age_s = time.time() - made_s
                if age_s > FOREIGN_DEBRIS_AGE_S or (self._lock_reaches(host) and age_s > DEBRIS_AGE_S):
                    self._remove_unlocked(path)

    @contextmanager
    def _turn_to_reclaim(self) -> Iterator[bool]:
        try:
            fd = self.beneath.open(RECLAIMED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError:  # no inode is left, say
            yield True
            return
        try:
            mine = not (self._was_reclaimed(fd) or (self.locks and not try_lock(fd)) or self._was_reclaimed(fd))
            yield mine
            if mine:
                with suppress(OSError):  # full: then the next one looks as well
                    os.pwrite(fd, b"\n", 0)
        finally:
            if self.locks:
                unlock(fd)
            os.close(fd)

    @staticmethod
    def _was_reclaimed(fd: int) -> bool:
        status = os.fstat(fd)
        return bool(status.st_size) and abs(time.time() - status.st_mtime) < DEBRIS_AGE_S

    def leftovers(self) -> Iterator[Leftover]:
        for path in self._half_written(""):
            host, _ = parse_temporary_name(name_in_folder(path))
            if (found := leftover(self.beneath, path, lock_reaches=self._lock_reaches(host))) is not None:
                yield found

    def _lock_reaches(self, host: str) -> bool:
        return self.locks and (host == HOST or (self.traits.locks and self.traits.coherent))

    def _remove_unlocked(self, path: str) -> None:
        try:
            fd = self.beneath.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            if not self.locks or try_lock(fd):
                with suppress(FileNotFoundError):
                    self.beneath.unlink(path)
        finally:
            os.close(fd)

    def _half_written(self, folder: str) -> Iterator[str]:
        """The files being written, wherever they lie; no link is followed."""
        above = f"{folder}/" if folder else ""
        found, folders = [], []
        try:
            with self.names_read(), self.beneath.listed(folder) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    if entry.name.startswith(TEMPORARY_PREFIX):
                        found.append(above + entry.name)
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(above + entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return
        except PermissionError:
            if folder != NOT_OURS:
                raise
            return
        yield from found
        for below in folders:
            yield from self._half_written(below)


def temporary_name(host: str, made_s: float) -> str:
    """The name of a file that ``host`` began to write at ``made_s``: so that its age is known without a look at it."""
    return f"{TEMPORARY_PREFIX}{host}-{int(made_s)}-{secrets.token_hex(8)}"


def parse_temporary_name(name: str) -> tuple[str, float]:
    """Host and time of a :func:`temporary_name`; one that is none has no host, and is of this moment."""
    host, _, rest = name.removeprefix(TEMPORARY_PREFIX).partition("-")
    made_s = rest.partition("-")[0]
    return (host, float(made_s)) if made_s.isdecimal() else ("", time.time())


def create_plain(folder: int, path: Path, nbytes: int) -> int:
    """Make the file ``path``, which must not exist, in the directory open as ``folder``, and open it."""
    del nbytes
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path.name, flags, 0o600, dir_fd=folder)

"""Objects as files of a directory: what the shm and the nvme driver share.

An object is the file ``<root>/<key>``: exactly its bytes, no trailer. Everything else is in
``<root>/.tiercheck``::

    lock      held (flock) while names change; its content is the last stamp that was given out
    tmp/      files being written, each held exclusively by its writer; one that nobody holds is debris

A put writes a temporary file and renames it onto the key under the lock, so that the condition of the put
and the rename are one step to every client. The lock covers the threads and processes of one host, and those
of other hosts as far as the file system carries flock.

Nothing here is asynchronous; every method may be called from any thread.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from tiercheck.errors import AlreadyExists, NotFound, PreconditionFailed, TierError, Transient, Unsupported
from tiercheck.keys import validate_key
from tiercheck.tiers.files import (
    fsync_directory,
    locked,
    probe_stamp_step_ns,
    try_lock,
    unlock,
)
from tiercheck.tiers.transfer import Sequential, Transfer
from tiercheck.types import ObjectInfo, Payload, PutMode

__all__ = [
    "CONTROL",
    "HOST",
    "ObjectDirectory",
    "Temporary",
    "check_condition",
    "info_of",
    "not_found",
    "once_published",
    "payload_bytes",
]

CONTROL = ".tiercheck"
"""The directory, beside the objects, that is TierCheck's own; no key may begin with it."""
FOREIGN_DEBRIS_AGE_S = 24 * 3600
"""Another host's temporary file is debris once it is this old: its lock may not reach us."""
HOST = "".join(c if c.isalnum() else "_" for c in socket.gethostname())[:64] or "host"


@dataclass(frozen=True)
class Temporary:
    """A file being written: open, locked exclusively, and not yet an object."""

    path: str
    fd: int
    stamp_ns: int


@dataclass(frozen=True)
class Entry:
    """What a listing of a directory shows. ``status``: where the listing came with it."""

    name: str
    is_directory: bool
    status: os.stat_result | None = None

    def order(self) -> bytes:
        # A directory sorts as its name with the slash: the order of keys, not of names.
        return os.fsencode(self.name) + (b"/" if self.is_directory else b"")


class ObjectDirectory:
    """``durable``: what is published outlives the node's power, not only the process.

    ``transfer`` moves the bytes; it may be replaced while nothing moves.
    """

    def __init__(self, root: Path, *, durable: bool) -> None:
        self.root = root
        self.durable = durable
        self.transfer: Transfer = Sequential()
        self.control = root / CONTROL
        self._root_prefix = os.path.join(root, "")
        self._lock_path = self.control / "lock"
        self._temporary_prefix = str(self.control / "tmp" / HOST)
        self._stamp_step_ns = 1

    def prepare(self) -> None:
        """Make the directories that are missing (0700), and remove what dead processes left in ``tmp``."""
        try:
            made = self._make_directory(self.control / "tmp")
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            raise TierError(f"the directory {self.root} cannot be made: {error.strerror}: {error.filename}") from error
        if self.durable and made:
            self._sync_upwards(self.control / "tmp", made[0].parent)
        with self.locked() as lock_fd:
            self._stamp_step_ns = probe_stamp_step_ns(lock_fd)
            self.reclaim()

    def locked(self, *, shared: bool = False) -> AbstractContextManager[int]:
        """The lock under which names change; keep what is done inside it short."""
        return locked(self._lock_path, shared=shared)

    def path_of(self, key: str) -> Path:
        """The file of ``key``. Errors: as :meth:`check_key`."""
        return Path(self.name_of(key))

    def name_of(self, key: str) -> str:
        """The path of :meth:`path_of` as text."""
        self.check_key(key)
        return f"{self._root_prefix}{key}"

    def check_key(self, key: str) -> None:
        """``ValueError`` for a key that is unsafe, or that would be TierCheck's own file."""
        if validate_key(key).partition("/")[0] == CONTROL:
            raise ValueError(f"the key {key!r} begins with {CONTROL!r}, which is the tier's own directory")

    # Writing.

    def store(self, key: str, payload: Payload, mode: PutMode, check: Callable[[], None]) -> ObjectInfo:
        """Write the buffers and publish them under ``key``; ``check`` may raise to give up before that."""
        nbytes = payload_bytes(payload)
        temporary = self.create_temporary(nbytes, check)
        try:
            self.transfer.write(temporary.fd, payload, nbytes, check)
            check()
            return self.publish(temporary, key, mode)
        finally:
            self.discard(temporary)

    def create_temporary(self, nbytes: int, check: Callable[[], None]) -> Temporary:
        """A file to write an object of ``nbytes`` to; ``check`` may raise to give up."""
        del nbytes, check
        path = self.temporary_path()
        # Under the lock, so that nobody takes it for debris between its creation and its own lock.
        with self.locked() as lock_fd:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try_lock(fd)
            return Temporary(path, fd, self.next_stamp_ns(lock_fd))

    def publish(self, temporary: Temporary, key: str, mode: PutMode) -> ObjectInfo:
        """Rename the temporary file onto ``key`` where the mode's condition holds.

        The file keeps its writer's lock, now shared; :meth:`discard` must follow in any case.
        """
        path = self.name_of(key)
        info = self.stamped(temporary, key)
        with self.locked():
            self.give_name(temporary, path, key, mode)
        if self.durable:
            # Where a directory is missing, another client has removed what was put, and the directory with it.
            with once_published(key), suppress(FileNotFoundError):
                self._sync_upwards(Path(path).parent, self.root)
        return info

    def stamped(self, temporary: Temporary, key: str) -> ObjectInfo:
        """What the temporary file will be as an object, its content as it is now."""
        os.utime(temporary.fd, ns=(temporary.stamp_ns, temporary.stamp_ns))
        if self.durable:
            os.fsync(temporary.fd)
        return info_of(key, os.fstat(temporary.fd))

    def give_name(self, temporary: Temporary, path: str, key: str, mode: PutMode) -> None:
        """Rename it onto the key's ``path`` where the mode's condition holds; called under the lock."""
        current = None
        if mode.kind == "update" or not self._opens_directory(path):
            current = self._current(Path(path), key)
            check_condition(mode, key, current)
            self._make_parents(Path(path), key)
        try_lock(temporary.fd, shared=True)
        self.replace(temporary.path, path, current)

    def discard(self, temporary: Temporary) -> None:
        """Close the temporary file, and remove it where it was not published."""
        try:
            # Looked for first: a file system that has become read-only refuses to unlink even what is not there.
            if os.path.exists(temporary.path):
                with suppress(FileNotFoundError):
                    os.unlink(temporary.path)
            unlock(temporary.fd)
        finally:
            os.close(temporary.fd)

    def replace(self, source: str, path: str | Path, current: os.stat_result | None) -> None:
        """Put ``source`` in the place of ``path``, whose file is ``current``; called under the lock."""
        del current
        os.rename(source, path)

    def temporary_path(self) -> str:
        return f"{self._temporary_prefix}-{os.getpid()}-{secrets.token_hex(8)}"

    def next_stamp_ns(self, lock_fd: int) -> int:
        """A modification time that no other file of this directory ever had; called under the lock.

        An etag is made of it, so that a reused inode cannot repeat one, whatever the clock does.
        """
        last_ns = int.from_bytes(os.pread(lock_fd, 8, 0), "little")
        step_ns = self._stamp_step_ns
        stamp_ns = (max(time.time_ns(), last_ns + step_ns) + step_ns - 1) // step_ns * step_ns
        os.pwrite(lock_fd, stamp_ns.to_bytes(8, "little"), 0)
        return stamp_ns

    # Reading.

    def open_object(self, key: str) -> int:
        """A descriptor whose content never changes while it is open. Errors: ``NotFound``."""
        path = self.path_of(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise not_found(key) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise not_found(key)
        return fd

    def unlock_object(self, fd: int) -> None:
        """Let go of the lock that :meth:`open_object` may have taken; before ``fd`` is closed, see :func:`unlock`."""
        unlock(fd)

    def look_up(self, path: Path) -> os.stat_result:
        """What has the name ``path`` now. Errors: ``FileNotFoundError``, ``NotADirectoryError``."""
        return path.lstat()

    def info(self, key: str) -> ObjectInfo:
        """Size and etag. Errors: ``NotFound``."""
        try:
            status = self.look_up(self.path_of(key))
        except (FileNotFoundError, NotADirectoryError):
            raise not_found(key) from None
        if not stat.S_ISREG(status.st_mode):
            raise not_found(key)
        return info_of(key, status)

    def scan(self, prefix: str = "", *, locked: bool = False) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in the byte order of their keys; one directory at a time.

        Files that no key could name, and whatever is not a regular file, belong to somebody else and are left out.
        ``locked``: the caller holds the lock.
        """
        parent, slash, start = prefix.rpartition("/")
        try:
            folder = self.path_of(parent) if slash else self.root
        except ValueError:
            return  # no key has this prefix
        yield from self._scan(folder, parent + slash, start, locked)

    def _scan(self, folder: Path, above: str, start: str, locked: bool) -> Iterator[ObjectInfo]:
        try:
            found = self.entries(folder, start, locked)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in sorted(found, key=Entry.order):
            path = folder / entry.name
            if entry.is_directory and path != self.control:
                yield from self._scan(path, f"{above}{entry.name}/", "", locked)
            elif not entry.is_directory:
                try:
                    key = above + entry.name
                    self.path_of(key)
                    status = entry.status or path.lstat()
                except (FileNotFoundError, NotADirectoryError, ValueError):
                    continue  # deleted meanwhile, or not named by a key
                if stat.S_ISREG(status.st_mode):
                    yield info_of(key, status)

    def entries(self, folder: Path, start: str, locked: bool) -> list[Entry]:
        """The directories and regular files in ``folder`` whose name begins with ``start``, in any order."""
        # Under the lock, since a rename onto a name that is being listed may show it twice, or not at all.
        with self._names_at_rest(locked), os.scandir(folder) as entries:
            return [
                Entry(entry.name, entry.is_dir(follow_symlinks=False))
                for entry in entries
                if entry.name.startswith(start)
                and (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False))
            ]

    def held_bytes(self, *, locked: bool = False) -> int:
        """Bytes of the objects and of the temporary files. ``locked``: the caller holds the lock."""
        temporaries = sum(status.st_size for _, status in files_in(self.control / "tmp"))
        return temporaries + sum(found.nbytes for found in self.scan(locked=locked))

    # Removing.

    def remove(self, key: str) -> None:
        """Remove the object and the directories it leaves empty; a missing one is no error."""
        path = self.path_of(key)
        with self.locked():
            try:
                status = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return
            if not stat.S_ISREG(status.st_mode):
                return
            self.retire(path, status)
            folder = path.parent
            while folder != self.root and not any(folder.iterdir()):
                folder.rmdir()
                folder = folder.parent
            if self.durable:
                fsync_directory(folder)

    def retire(self, path: Path, status: os.stat_result) -> None:
        """Take the file of an object away; called under the lock."""
        del status
        path.unlink()

    def reclaim(self) -> None:
        """Remove temporary files whose writer is dead; called under the lock."""
        for path, status in files_in(self.control / "tmp"):
            ours = path.name.rpartition("-")[0].rpartition("-")[0] == HOST
            if ours or time.time() - status.st_mtime > FOREIGN_DEBRIS_AGE_S:
                try:
                    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                except FileNotFoundError:
                    continue  # its writer has just given it up
                try:
                    if try_lock(fd):
                        with suppress(FileNotFoundError):
                            self.retire(path, status)
                        unlock(fd)
                finally:
                    os.close(fd)

    # Details.

    def _names_at_rest(self, already: bool) -> AbstractContextManager[int | None]:
        return nullcontext() if already else self.locked(shared=True)

    def _current(self, path: Path, key: str) -> os.stat_result | None:
        try:
            status = self.look_up(path)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise self._nested(key) from None
        if not stat.S_ISREG(status.st_mode):
            raise self._nested(key)
        return status

    @staticmethod
    def _opens_directory(path: str) -> bool:
        """Whether this is the first object of a directory, which is made then: as a rule, that of a version."""
        try:
            os.mkdir(os.path.dirname(path), 0o700)
        except OSError:  # it is there, or another one above it is missing too, or no directory can be there
            return False
        return True

    def _make_parents(self, path: Path, key: str) -> None:
        try:
            self._make_directory(path.parent)
        except (FileExistsError, NotADirectoryError):
            raise self._nested(key) from None

    @staticmethod
    def _nested(key: str) -> Unsupported:
        return Unsupported(
            "in a file system a key cannot lie under another key, nor be what others lie under; rename one", key=key
        )

    @staticmethod
    def _make_directory(path: Path) -> list[Path]:
        """Make ``path`` and what is missing above it, all 0700; returns those made, topmost first."""
        missing = []
        folder = path
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        made = []
        for folder in reversed(missing):
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                if not folder.is_dir():
                    raise
            else:
                made.append(folder)
        return made

    @staticmethod
    def _sync_upwards(path: Path, top: Path) -> None:
        # All of them, each time: a directory may be new although another client made it. Clean ones cost microseconds.
        fsync_directory(path)
        while path != top:
            path = path.parent
            fsync_directory(path)


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
    return ObjectInfo(key, status.st_size, f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}")


def files_in(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The files of a control directory; those that vanish meanwhile are left out."""
    found = []
    for path in folder.iterdir():
        try:
            found.append((path, path.lstat()))
        except FileNotFoundError:
            continue
    return found


def not_found(key: str) -> NotFound:
    return NotFound("there is no object under this key", key=key)

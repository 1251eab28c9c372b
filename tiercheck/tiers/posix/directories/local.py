"""Objects as files of a directory: what the shm and the nvme driver share.

An object is the file ``<root>/<key>``: exactly its bytes, no trailer. Everything else is in
``<root>/.tiercheck``::

    lock      held (flock) while names change; its content is the last stamp that was given out
    tmp/      files being written, each held exclusively by its writer; one that nobody holds is debris

A put writes a temporary file and renames it onto the key under the lock, so that the condition of an ``UPDATE``
and the rename are one step to every client that the lock excludes: those of one host, and those of other hosts if
the mount carries flock. A ``CREATE`` relies on no lock: ``link`` fails if the name exists, whoever made it.

Below the root no symbolic link is followed (:mod:`tiercheck.tiers.posix.beneath`); one is no object and no directory of
objects. Nothing here is asynchronous; every method may be called from any thread.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

from tiercheck.errors import AlreadyExists, NotFound, TierError, Transient, Unsupported
from tiercheck.keys import validate_key
from tiercheck.tiers.posix.beneath import Beneath, parent_of, status_of
from tiercheck.tiers.posix.directories.debris import leftover
from tiercheck.tiers.posix.directories.object_files import (
    CONTROL,
    FOREIGN_DEBRIS_AGE_S,
    HOST,
    TEMPORARIES,
    Entry,
    Temporary,
    check_condition,
    info_of,
    is_file,
    name_in_folder,
    not_found,
    once_published,
    payload_bytes,
)
from tiercheck.tiers.posix.directories.place import make_place
from tiercheck.tiers.posix.directories.stamps import Stamps
from tiercheck.tiers.posix.files import (
    closed_on_error,
    locked,
    meaning_of,
    try_lock,
    unlink_quietly,
    unlock,
    unlock_and_close,
)
from tiercheck.tiers.posix.transfer import Sequential, Transfer
from tiercheck.types import Leftover, ObjectInfo, Payload, PutMode

__all__ = ["NOT_OURS", "ObjectDirectory"]

log = logging.getLogger(__name__)

T = TypeVar("T")

LOCK = f"{CONTROL}/lock"
NO_LOCK = -1
"""Instead of the lock's descriptor."""
NOT_OURS = "lost+found"
"""At the root of a file system, of its owner's alone."""
ATTEMPTS_MAX = 100
LINKS_TOLD_MAX = 16
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What link answers on a file system that has none."""


class ObjectDirectory:
    """``durable``: what is published outlives the node's power, not only the process.

    ``transfer`` moves the bytes; it may be replaced while nothing moves.
    """

    makes_folders_first = False
    """Most objects are the first of their directory, so that it is made without a look whether it is there."""

    def __init__(self, root: Path, *, durable: bool) -> None:
        self.root = root
        self.durable = durable
        self.transfer: Transfer = Sequential()
        self.control = root / CONTROL
        self.beneath = Beneath(root)
        self._root_prefix = os.path.join(root, "")
        self.stamps = Stamps()
        self._links_told: set[str] = set()
        self._only_read = False
        self.made: list[Path] = []
        """The directories that opening has made, from the topmost down to the root."""

    def prepare(self) -> None:
        """Make the directories that are missing (0700), and remove what dead processes left in ``tmp``."""
        self.made = make_place(self.beneath, durable=self.durable)
        with self.locked() as lock_fd:
            self.stamps.fit(lock_fd)
            self.reclaim()

    def prepare_to_read(self) -> None:
        """Instead of :meth:`prepare`, where nothing will be written: see that the directory is there. From here on no
        lock is taken, so that a listing may miss a name that is being replaced. Errors: ``NotFound``."""
        if not self.root.is_dir():
            raise NotFound(f"there is no directory {self.root}; check the path, and that its file system is mounted")
        self._only_read = True

    def locked(self, *, shared: bool = False) -> AbstractContextManager[int]:
        """The lock under which names change; keep what is done inside it short."""
        if self._only_read:
            return nullcontext(NO_LOCK)
        return locked(self.control / "lock", self._open_lock, shared=shared)

    def _open_lock(self) -> int:
        return self.beneath.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)

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
        with ExitStack() as undo:
            folder = self.beneath.open(TEMPORARIES, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, folder)
            # Under the lock, so that nobody takes it for debris between its creation and its own lock.
            with self.locked() as lock_fd:
                stamp_ns = self.stamps.next_ns(lock_fd)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(os.path.basename(path), flags, 0o600, dir_fd=folder)
                undo.callback(unlock_and_close, fd)
                undo.callback(unlink_quietly, os.path.basename(path), folder)
                try_lock(fd)
            undo.pop_all()
        return Temporary(path, fd, stamp_ns, folder)

    def publish(self, temporary: Temporary, key: str, mode: PutMode) -> ObjectInfo:
        """Give the temporary file the name of the key if the mode's condition holds.

        The file keeps its writer's lock, now shared; :meth:`discard` must follow in any case.
        """
        self.check_key(key)
        info = self.stamped(temporary, key)
        with self.locked():
            self.give_name(temporary, key, mode)
        if self.durable:
            # If a directory is missing, another client has removed what was put, and the directory with it.
            with once_published(key), suppress(FileNotFoundError):
                self.beneath.sync_upwards(parent_of(key))
        return info

    def stamped(self, temporary: Temporary, key: str) -> ObjectInfo:
        """What the temporary file will be as an object, its content as it is now."""
        os.utime(temporary.fd, ns=(temporary.stamp_ns, temporary.stamp_ns))
        if self.durable:
            os.fsync(temporary.fd)
        return info_of(key, os.fstat(temporary.fd))

    def give_name(self, temporary: Temporary, key: str, mode: PutMode) -> None:
        """Give it the key's name if the mode's condition holds; called under the lock."""

        def step(folder: int, made: bool) -> None:
            current = None if made else self._current(folder, key)
            check_condition(mode, key, current)
            self.share_lock(temporary)
            self._name(temporary, folder, key, mode, current)

        self.with_folder(key, mode, step)

    def share_lock(self, temporary: Temporary) -> None:
        """From here on readers may lock the file too."""
        try_lock(temporary.fd, shared=True)

    def with_folder(self, key: str, mode: PutMode, step: Callable[[int, bool], T]) -> T:
        """``step`` with the key's directory, open, and whether it was made for it; again if another client removes it.

        Errors: ``PreconditionFailed`` for an update of an object whose directory is missing.
        """
        parent, made = parent_of(key), False
        for attempt in range(ATTEMPTS_MAX):
            try:
                if self.makes_folders_first and not attempt and mode.kind != "update":
                    made = self.beneath.make(parent)
                return self._in_folder(parent, step, made)
            except NotADirectoryError:
                raise self._nested(key) from None
            except FileNotFoundError:
                # Usually the first object of its version; now and then another client has just removed the last one.
                if not self.beneath.exists(CONTROL):
                    raise
            check_condition(mode, key, None)
            try:
                made = self.make_folder(parent)
            except NotADirectoryError:
                raise self._nested(key) from None
            except FileNotFoundError:
                made = False  # one above it has been removed in between: once more
        raise Transient("the object's directory is removed faster than it can be made; try again", key=key)

    def _in_folder(self, path: str, work: Callable[..., T], *arguments: bool) -> T:
        """``work`` with the directory, open; again if that was the one before, which another client has removed."""
        for _ in range(ATTEMPTS_MAX):
            try:
                with self.beneath.folder(path) as folder:
                    return work(folder, *arguments)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                self.beneath.look_anew(path)
        raise Transient("other clients remove the directory faster than it can be opened; try again", key=path)

    def make_folder(self, path: str) -> bool:
        """Make a directory for objects; whether it was missing."""
        return self.beneath.make(path)

    def _name(self, temporary: Temporary, folder: int, key: str, mode: PutMode, current: os.stat_result | None) -> None:
        """Give the file its name, in one step of the file system's."""
        name = name_in_folder(key)
        try:
            if mode.kind == "create":
                self.link(temporary, folder, name)
            else:
                self.replace(temporary, folder, name, current)
        except FileExistsError:
            # After an answer that was lost the kernel may have asked twice: then the name is ours.
            if not is_file(folder, name, temporary.fd):
                raise AlreadyExists("there is an object under this key already", key=key) from None
        except IsADirectoryError:
            raise self._nested(key) from None
        except FileNotFoundError:
            if temporary.exists():
                raise  # it is the directory that is missing
            raise Transient(
                "the file being written was taken away before it was published; try again", key=key
            ) from None

    def discard(self, temporary: Temporary) -> None:
        """Close the temporary file, and remove its name: one that was published has another."""
        try:
            # Looked for first: a file system that has become read-only refuses to unlink even what is not there.
            if temporary.exists():
                with suppress(FileNotFoundError):
                    temporary.unlink()
            unlock(temporary.fd)
        finally:
            os.close(temporary.fd)
            if temporary.folder is not None:
                os.close(temporary.folder)

    def replace(self, temporary: Temporary, folder: int, name: str, current: os.stat_result | None) -> None:
        """Put the file in the place of ``name``, which is ``current``; called under the lock."""
        del current
        os.rename(temporary.name, name, src_dir_fd=temporary.folder, dst_dir_fd=folder)

    def link(self, temporary: Temporary, folder: int, name: str) -> None:
        """Give the file the name as well. Errors: ``FileExistsError`` if anybody has it, whatever locks there are."""
        try:
            os.link(temporary.name, name, src_dir_fd=temporary.folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno in NO_LINKS:
                raise Unsupported("the file system has no hard links, which CREATE needs; choose another") from error
            raise

    def temporary_path(self) -> str:
        return f"{self._root_prefix}{TEMPORARIES}/{HOST}-{os.getpid()}-{secrets.token_hex(8)}"

    # Reading.

    def open_object(self, key: str) -> int:
        """A descriptor whose content never changes while it is open. Errors: ``NotFound``."""
        self.check_key(key)
        try:
            fd = self.beneath.open(key, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise self._absent(key) from None
        with closed_on_error(fd):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise not_found(key)
        return fd

    def unlock_object(self, fd: int) -> None:
        """Let go of the lock that :meth:`open_object` has taken, if it takes one; before ``fd`` is closed, see
        :func:`unlock`. Here readers take none: a file's content never changes once it has its name."""

    def look_up(self, path: str) -> os.stat_result:
        """What has the name ``path`` below the root now. Errors: ``FileNotFoundError``, ``NotADirectoryError``."""
        return self.beneath.status(path)

    def info(self, key: str) -> ObjectInfo:
        """Size and etag. Errors: ``NotFound``."""
        self.check_key(key)
        try:
            status = self.look_up(key)
        except (FileNotFoundError, NotADirectoryError):
            raise self._absent(key) from None
        if not stat.S_ISREG(status.st_mode):
            raise not_found(key)
        return info_of(key, status)

    def _absent(self, key: str) -> TierError:
        """That there is no such object; or that the tier is gone: then nothing is known of its objects."""
        if self._only_read or self.beneath.exists(CONTROL):
            return not_found(key)
        kind, advice = meaning_of(FileNotFoundError(errno.ENOENT, ""))
        return kind(f"{advice}: there is no {self.control}", key=key or None)

    def scan(self, prefix: str = "", *, locked: bool = False) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in the byte order of their keys; one directory at a time.

        Files that no key could name, and whatever is not a regular file, belong to somebody else and are left out.
        ``locked``: the caller holds the lock.
        """
        parent, slash, start = prefix.rpartition("/")
        try:
            if slash:
                self.check_key(parent)
        except ValueError:
            return  # no key has this prefix
        yield from self._scan(parent, start, locked)

    def _scan(self, folder: str, start: str, locked: bool) -> Iterator[ObjectInfo]:
        try:
            found = self.entries(folder, start, locked)
        except (FileNotFoundError, NotADirectoryError):
            if not self._only_read and not self.beneath.exists(CONTROL):
                raise self._absent("") from None
            return
        except PermissionError:
            if folder != NOT_OURS:
                raise
            return
        for entry in sorted(found, key=Entry.order):
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_directory:
                yield from self._scan(path, "", locked)
                continue
            with suppress(ValueError):  # no key names it
                self.check_key(path)
                assert entry.status is not None
                yield info_of(path, entry.status)

    def entries(self, folder: str, start: str, locked: bool) -> list[Entry]:
        """The directories and regular files in ``folder`` whose name begins with ``start``, in any order; TierCheck's
        own left out. Errors: ``FileNotFoundError``, ``NotADirectoryError`` if there is no such directory."""
        found = []
        with self.beneath.listed(folder) as fd:
            # Under the lock, since a rename onto a name that is being listed may show it twice, or not at all.
            with self._names_at_rest(locked), os.scandir(fd) as listed:
                names = [
                    (entry.name, entry.is_dir(follow_symlinks=False), entry.is_symlink())
                    for entry in listed
                    if entry.name.startswith(start) and (folder or entry.name != CONTROL)
                ]
            for name, is_directory, is_link in names:
                if is_link:
                    self._tell_link(f"{folder}/{name}" if folder else name)
                elif is_directory:
                    found.append(Entry(name, True))
                else:
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        status = status_of(fd, name)
                        if stat.S_ISREG(status.st_mode):
                            found.append(Entry(name, False, status))
        return found

    def _tell_link(self, path: str) -> None:
        if path not in self._links_told and len(self._links_told) < LINKS_TOLD_MAX:
            self._links_told.add(path)
            log.warning(
                "%s/%s is a symbolic link, which is not followed: what lies behind it is no part of the tier; put it "
                "there itself, or make the tier's own directory the link",
                self.root,
                path,
            )

    def held_bytes(self, *, locked: bool = False) -> int:
        """Bytes of the objects and of the temporary files. ``locked``: the caller holds the lock."""
        # One with two names is an object already.
        temporaries = sum(status.st_size for _, status in self._temporary_files() if status.st_nlink == 1)
        return temporaries + sum(found.nbytes for found in self.scan(locked=locked))

    # Removing.

    def remove(self, key: str) -> None:
        """Remove the object and the directories it leaves empty; a missing one is no error."""
        self.check_key(key)
        name = name_in_folder(key)

        def retire(folder: int) -> bool:
            status = status_of(folder, name)
            if found := stat.S_ISREG(status.st_mode):
                self.retire(folder, name, status)
            return found

        with self.locked():
            try:
                if not self._in_folder(parent_of(key), retire):
                    return
            except (FileNotFoundError, NotADirectoryError):
                return
            stays = self.beneath.remove_empty(parent_of(key))
            if self.durable:
                with self.beneath.listed(stays) as fd:
                    os.fsync(fd)

    def retire(self, folder: int, name: str, status: os.stat_result) -> None:
        """Take the file away that is no longer wanted; called under the lock."""
        del status
        os.unlink(name, dir_fd=folder)

    def reclaim(self) -> None:
        """Remove temporary files whose writer is dead; called under the lock."""
        with self.beneath.folder(TEMPORARIES) as folder:
            for name, status in self._temporary_files():
                if self._lock_reaches(host_of(name)) or time.time() - status.st_mtime > FOREIGN_DEBRIS_AGE_S:
                    try:
                        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
                    except FileNotFoundError:
                        continue  # its writer has just given it up
                    try:
                        if try_lock(fd):
                            with suppress(FileNotFoundError):
                                self.retire(folder, name, status)
                            unlock(fd)
                    finally:
                        os.close(fd)

    def leftovers(self) -> Iterator[Leftover]:
        """What :meth:`reclaim` would remove, or most of it; nothing is touched."""
        with suppress(FileNotFoundError):
            for name, _ in self._temporary_files():
                reaches = self._lock_reaches(host_of(name))
                if (found := leftover(self.beneath, f"{TEMPORARIES}/{name}", lock_reaches=reaches)) is not None:
                    yield found

    def _lock_reaches(self, host: str) -> bool:
        """Whether a lock tells that a writer of this host is alive."""
        return host == HOST

    def _temporary_files(self) -> list[tuple[str, os.stat_result]]:
        """The regular files in ``tmp``; those that vanish meanwhile are left out."""
        found = []
        with self.beneath.listed(TEMPORARIES) as fd:
            for name in os.listdir(fd):
                with suppress(FileNotFoundError):
                    status = status_of(fd, name)
                    if stat.S_ISREG(status.st_mode):
                        found.append((name, status))
        return found

    # Details.

    def _names_at_rest(self, already: bool) -> AbstractContextManager[int | None]:
        return nullcontext() if already else self.locked(shared=True)

    def _current(self, folder: int, key: str) -> os.stat_result | None:
        try:
            status = self.current_status(folder, key)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise self._nested(key) from None
        if not stat.S_ISREG(status.st_mode):
            raise self._nested(key)
        return status

    def current_status(self, folder: int, key: str) -> os.stat_result:
        """What has the key's name in its open directory. Errors: as :meth:`look_up`."""
        return status_of(folder, name_in_folder(key))

    @staticmethod
    def _nested(key: str) -> Unsupported:
        return Unsupported(
            "in a file system a key cannot lie under another key, nor be what others lie under; rename one", key=key
        )


def host_of(name: str) -> str:
    """Of the writer of a temporary file."""
    return name.rpartition("-")[0].rpartition("-")[0]

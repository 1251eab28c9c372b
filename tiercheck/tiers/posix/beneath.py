"""Files and directories below a root, reached without following a symbolic link.

The root itself may be reached by links (``/scratch`` is one on many clusters). Below it a link may have been put by
whoever can write there: to follow it would be to read, write or delete in a place of theirs. Every path here is
relative to the root, a key or a directory above one; the empty path is the root. One system call resolves it
(``openat2``, Linux 5.6); if that is missing, each directory on the way is opened by itself.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiercheck.errors import Unauthorized

__all__ = ["Beneath", "check_owners", "parent_of", "status_of"]

log = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None, use_errno=True)
_OPENAT2 = 437
_RESOLVE_NO_SYMLINKS = 0x04
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class Beneath:
    """What lies below ``root``. A call opens the root by its path, unless :meth:`hold` keeps it open."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: int | None = None

    def hold(self) -> None:
        """Keep the root open: for one that nobody moves or mounts anew. Idempotent."""
        if self._held is None:
            self._held = self._open_root()

    def release(self) -> None:
        """Undo :meth:`hold`. Idempotent."""
        fd, self._held = self._held, None
        if fd is not None:
            os.close(fd)

    def open(self, path: str, flags: int) -> int:
        """A descriptor of ``path``, which is no link and is reached by none; a new file is 0600.

        Errors: ``OSError``, with ``ELOOP`` for a link. With ``O_PATH`` one at the end is opened itself.
        """
        root = self._held
        if root is not None:
            return open_below(root, path, flags)
        root = self._open_root()
        try:
            return open_below(root, path, flags)
        finally:
            os.close(root)

    @contextmanager
    def folder(self, path: str) -> Iterator[int]:
        """A descriptor of a directory, to name files in it. Errors: as :meth:`open`, and ``ENOTDIR``."""
        fd = self.open(path, _FOLDER)
        try:
            yield fd
        finally:
            os.close(fd)

    def look_anew(self, path: str) -> None:
        """Have the kernel ask a network mount which directory this is: it may still know one that another client has
        removed. It asks when a look-up by path meets the old one. What is found there is not used, so that links on
        the way do no harm."""
        with suppress(OSError):
            (Path(self.root) / path / secrets.token_hex(8)).lstat()

    @contextmanager
    def listed(self, path: str) -> Iterator[int]:
        """A descriptor of a directory that can be listed and synced. Errors: as :meth:`folder`."""
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def make(self, path: str) -> bool:
        """Make the directory, and what is missing above it, all 0700; whether it was missing.

        Errors: as :meth:`folder`; ``FileNotFoundError`` without the root, or if another client removes what is made.
        """
        if not path:
            return False
        for again in (False, True):
            try:
                with self.folder(parent_of(path)) as above:
                    os.mkdir(path.rpartition("/")[2], 0o700, dir_fd=above)
                return True
            except FileExistsError:
                with self.folder(path):  # ENOTDIR or ELOOP if it is something else
                    return False
            except FileNotFoundError:
                if again or not parent_of(path):
                    raise
                self.make(parent_of(path))
        raise AssertionError("unreachable: the second try returns or raises")

    def remove_empty(self, path: str) -> str:
        """Remove the directory if it is empty, and those above that it leaves empty; returns the first that stays."""
        while path:
            try:
                with self.folder(parent_of(path)) as above:
                    os.rmdir(path.rpartition("/")[2], dir_fd=above)
            except FileNotFoundError:
                pass  # another client was faster
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    raise
                break
            path = parent_of(path)
        return path

    def unlink(self, path: str) -> None:
        """Remove the file. Errors: ``OSError``."""
        with self.folder(parent_of(path)) as above:
            os.unlink(path.rpartition("/")[2], dir_fd=above)

    def status(self, path: str) -> os.stat_result:
        """What has the name ``path``, links as themselves. Errors: as :meth:`open`."""
        fd = self.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def sync_upwards(self, path: str) -> None:
        """Make the names in the directory durable, and those in each above it, up to the root."""
        # All of them, each time: a directory may be new although another client made it. Clean ones cost microseconds.
        while True:
            with self.listed(path) as fd:
                os.fsync(fd)
            if not path:
                return
            path = parent_of(path)

    def exists(self, path: str) -> bool:
        """Whether there is something of that name, which is no link's."""
        with suppress(FileNotFoundError, NotADirectoryError):
            self.status(path)
            return True
        return False

    def _open_root(self) -> int:
        return os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def parent_of(path: str) -> str:
    """The directory of a path that is relative to a root: ``""`` is the root."""
    return path.rpartition("/")[0]


def status_of(folder: int, name: str) -> os.stat_result:
    """What has that name in the open directory, links as themselves. Errors: ``OSError``."""
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def check_owners(beneath: Beneath, control: str) -> None:
    """Warn of users who can change what lies below the root. Errors: ``Unauthorized`` if that is every user.

    ``control``: a directory right below the root, which this user has made, or so it should be.
    """
    root, made = beneath.status(""), beneath.status(control)
    ours = (0, os.geteuid())
    # A mount that keeps no modes shows the directory made above as everybody's, too: then modes say nothing.
    for_all = bool(root.st_mode & stat.S_IWOTH) and not (made.st_uid in ours and made.st_mode & stat.S_IWOTH)
    if for_all and (made.st_uid not in ours or not root.st_mode & stat.S_ISVTX):
        raise Unauthorized(
            f"every user may write to {beneath.root}, and so replace what is stored there; use a directory inside of "
            f"it, such as {beneath.root}/run, which is made for you alone, or run 'chmod o-w {beneath.root}'"
        )
    strangers = {f"user {found.st_uid}" for found in (root, made) if found.st_uid not in ours}
    who = "every user" if for_all else " and ".join(sorted(strangers))
    if who:
        log.warning(
            "%s is not yours alone: %s can put objects there, or change them (checksums find damage, and no forgery); "
            "use a directory of your own unless you trust them",
            beneath.root,
            who,
        )


def open_below(folder: int, path: str, flags: int) -> int:
    """See :meth:`Beneath.open`."""
    if not has_openat2():
        return open_step_by_step(folder, path or ".", flags)
    name = os.fsencode(path or ".")
    while True:
        fd: int = _LIBC.syscall(_OPENAT2, folder, name, how(flags), ctypes.sizeof(_How))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)


@functools.cache
def how(flags: int) -> object:
    """The flags as the kernel wants them."""
    return ctypes.byref(_How(flags, 0o600 if flags & os.O_CREAT else 0, _RESOLVE_NO_SYMLINKS))


@functools.cache
def has_openat2() -> bool:
    """Whether the kernel has the call, and no filter of a container's is in the way."""
    root = os.open("/", _FOLDER)
    try:
        fd = _LIBC.syscall(_OPENAT2, root, b".", how(_FOLDER), ctypes.sizeof(_How))
    finally:
        os.close(root)
    if fd >= 0:
        os.close(fd)
    return bool(fd >= 0)


def open_step_by_step(folder: int, path: str, flags: int) -> int:
    """As ``openat2`` does it, one directory after the other."""
    *above, name = path.split("/")
    at = folder
    try:
        for step in above:
            below = _opened(at, step, _FOLDER)
            if at != folder:
                os.close(at)
            at = below
        return _opened(at, name, flags)
    finally:
        if at != folder:
            os.close(at)


def _opened(folder: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    except NotADirectoryError:
        if stat.S_ISLNK(status_of(folder, name).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise

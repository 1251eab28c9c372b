"""The shm tier's namespaces: where they are, who holds them, which exist, and how they go.

Every driver that has a namespace open holds the file ``.tiercheck/alive`` in it with a shared lock, which ends
with the process. Memory of a job that is over stays until somebody removes it: :func:`remove_namespace`.

Who made a namespace is written down in ``.tiercheck/kind``, outside of what any key names: this user's jobs, or a peer
server for its clients. Neither opens the other's.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tiercheck.errors import ConfigurationError, NotFound, Transient, Unauthorized, Unsupported
from tiercheck.tiers.posix.directories.object_files import CONTROL
from tiercheck.tiers.posix.files import closed_on_error, locked, map_os_errors, try_lock, unlock_and_close

__all__ = [
    "SHM",
    "NamespaceInfo",
    "NamespaceKind",
    "changed_s",
    "hold_namespace",
    "is_to_be_left",
    "keep_under",
    "kept_under",
    "namespace_bytes",
    "namespace_names",
    "namespace_path",
    "namespaces",
    "release_namespace",
    "remove_namespace",
    "remove_one",
    "remove_unheld",
]

SHM = Path("/dev/shm")
HOLD_WAIT_S_MAX = 30.0
"""Removing a namespace gives its memory back, which takes a second for each few dozen GiB."""
HOLD_PAUSE_S = 0.01
LEAVE_WAIT_S_MAX = 5.0
"""How long a removal waits for agents to let go: they look about once a second. (Whoever lists namespaces holds each
one's lock for a moment, too.)"""
LEAVE_FRESH_S = 3.0
"""A removal says that it waits many times a second. One that has said nothing for so long was ended."""
NAME_BYTES_MAX = 1024
KIND_BYTES_MAX = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


class NamespaceKind(StrEnum):
    """Whose objects a namespace holds, decided once, when it is made."""

    OWN = "own"
    """This user's: processes of this user write there, and nobody else."""
    NEIGHBOURS = "neighbours"
    """A peer server's: whatever its clients have put."""


@dataclass(frozen=True)
class NamespaceInfo:
    """A namespace of this user. ``used_bytes`` counts its pool too; ``in_use``: some process has it open. ``kind`` is
    ``None`` while that is not decided."""

    name: str
    used_bytes: int
    in_use: bool
    kind: NamespaceKind | None = None


def namespace_path(name: str, mount: Path = SHM) -> Path:
    """The directory of the namespace. ``ConfigurationError`` for a name that is no plain word."""
    if not _NAME.match(name):
        raise ConfigurationError(
            f"shm:// needs a name of up to 64 letters, digits, '.', '_' and '-', such as shm://run; not {name!r}"
        )
    if not mount.is_absolute():
        raise ConfigurationError(f"the mount of shm://{name} must be an absolute directory, not {str(mount)!r}")
    return mount / f"{prefix()}{name}"


def hold_namespace(root: Path, kind: NamespaceKind = NamespaceKind.OWN, *, make: bool = True) -> int:
    """Make the namespace if it is missing and mark it as in use; returns what :func:`release_namespace` takes.

    One that another process is removing is waited for, and made anew. Without ``make`` nothing is ever made: that is
    for whoever only looks at what others have made.

    Errors: ``Unauthorized`` if the directory is not this user's alone, or was made for the other ``kind``;
    ``Unsupported`` without the mount; ``NotFound`` without ``make`` if there is none;
    ``Transient`` if the removal takes longer than :data:`HOLD_WAIT_S_MAX`.
    """
    if not root.parent.is_dir():
        raise Unsupported(f"there is no {root.parent}; mount a tmpfs there, or name another with mount=")
    deadline = time.monotonic() + HOLD_WAIT_S_MAX
    while (fd := _held(root, kind, make)) is None:
        if not make and not root.exists():
            raise NotFound(f"there is no namespace {root.name.removeprefix(prefix())!r} in {root.parent}")
        if time.monotonic() > deadline:
            raise Transient(
                f"another process has been removing {root} for {HOLD_WAIT_S_MAX:.0f} s; try again once it is done"
            )
        time.sleep(HOLD_PAUSE_S)
    return fd


def _held(root: Path, kind: NamespaceKind, make: bool) -> int | None:
    """One try at :func:`hold_namespace`; ``None`` if somebody is removing the namespace, or just has."""
    try:
        if make:
            make_folder(root)
        check_private(root)
        make_folder(root / CONTROL)
        fd = open_alive(root)
    except FileNotFoundError:
        return None
    with closed_on_error(fd):
        if try_lock(fd, shared=True) and still_there(root, fd):
            check_kind(root, kind)
            return fd
    os.close(fd)
    return None


def release_namespace(fd: int) -> None:
    """Let go of the lock, and of the descriptor."""
    unlock_and_close(fd)


def namespaces(mount: Path = SHM) -> list[NamespaceInfo]:
    """This user's namespaces, by name."""
    found = []
    for name in namespace_names(mount):
        root = namespace_path(name, mount)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            found.append(NamespaceInfo(name, namespace_bytes(root), in_use(root), kind_of(root)))
    return found


def namespace_names(mount: Path = SHM) -> list[str]:
    """The names of this user's namespaces, sorted. Nothing in them is looked at."""
    names = []
    for root in mount.glob(f"{prefix()}*"):
        name = root.name.removeprefix(prefix())
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            status = root.lstat()
            if _NAME.match(name) and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                names.append(name)
    return sorted(names)


def namespace_bytes(root: Path) -> int:
    """Bytes of all files in the namespace, whatever they are for."""
    used = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                used += (Path(folder) / name).lstat().st_size
            except FileNotFoundError:
                continue  # removed meanwhile
    return used


def remove_namespace(name: str, mount: Path = SHM) -> None:
    """Remove the namespace and everything in it, and what this node keeps for its neighbours under that name
    (``peer://name``); the memory is free at once. An agent that has it open lets go, unless the trainer lives.

    Errors: ``NotFound``; ``Transient`` while some process has it open; ``Unauthorized``.
    """
    kept = [each for each in namespace_names(mount) if kept_under(namespace_path(each, mount)) == name]
    for each in kept:
        with contextlib.suppress(NotFound):  # its agent has ended meanwhile, and removed it
            remove_one(each, mount)
    if not kept or namespace_path(name, mount).is_dir():
        remove_one(name, mount)


def remove_one(name: str, mount: Path = SHM) -> None:
    """Errors: as :func:`remove_namespace`."""
    root = namespace_path(name, mount)
    tier = f"shm://{name}"
    missing = NotFound(f"there is no namespace {name!r} in {mount}", tier=tier)
    with map_os_errors(tier):
        try:
            check_private(root)
            make_folder(root / CONTROL)
            fd = open_alive(root)
        except FileNotFoundError:
            raise missing from None
        try:
            deadline = time.monotonic() + LEAVE_WAIT_S_MAX
            while not try_lock(fd):
                if still_there(root, fd):
                    (root / CONTROL / "leave").touch(0o600)
                if time.monotonic() > deadline:
                    (root / CONTROL / "leave").unlink(missing_ok=True)
                    raise Transient("the namespace is in use by another process; stop it first", tier=tier)
                time.sleep(HOLD_PAUSE_S)
            if not still_there(root, fd):  # somebody else has removed it; what has its name now is another one
                raise missing
            clear_away(root)
        finally:
            release_namespace(fd)


def changed_s(root: Path) -> float:
    """When something in the namespace last changed its name or its length, in seconds since the epoch."""
    latest = 0.0
    for folder, _, names in os.walk(root):
        for path in (Path(folder), *(Path(folder) / name for name in names)):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                status = path.lstat()
                latest = max(latest, status.st_mtime, status.st_ctime)
    return latest


def remove_unheld(name: str, unchanged_s: float, mount: Path = SHM) -> bool:
    """Remove the namespace if no process has it open, and nothing in it has changed for so long. Nobody is asked to let
    go, and nobody is waited for. Returns whether it is gone. Errors: ``Unauthorized``."""
    root = namespace_path(name, mount)
    with map_os_errors(f"shm://{name}"):
        try:
            check_private(root)
            fd = os.open(root / CONTROL / "alive", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return not root.exists()
        try:
            if not try_lock(fd) or not still_there(root, fd) or time.time() - changed_s(root) < unchanged_s:
                return False
            clear_away(root)
            return True
        finally:
            release_namespace(fd)


def is_to_be_left(root: Path) -> bool:
    """Whether somebody is waiting to remove the namespace: who waits says so again and again."""
    try:
        said = (root / CONTROL / "leave").stat().st_mtime
    except FileNotFoundError:
        return False
    return abs(time.time() - said) < LEAVE_FRESH_S


def keep_under(root: Path, name: str) -> None:
    """Note by which name neighbours know the namespace, which is open."""
    (root / CONTROL / "name").write_text(name)


def kept_under(root: Path) -> str | None:
    """The name by which neighbours know it; ``None`` for a namespace of this user's own."""
    try:
        with (root / CONTROL / "name").open("rb") as file:
            return file.read(NAME_BYTES_MAX).decode()
    except (OSError, ValueError):
        return None


def make_folder(folder: Path) -> None:
    """If it is not there. ``mkdir(exist_ok=True)`` raises if it is removed just after it was found to be there."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def clear_away(root: Path) -> None:
    """Remove the namespace whose lock is held. Whoever wants to open it waits for the lock, until the memory is free;
    then the name goes in one step, so that nobody makes a file in what is being removed."""
    for folder, kept in ((root, CONTROL), (root / CONTROL, "alive")):
        for path in folder.iterdir():
            if path.name == kept:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    aside = root.with_name(f"{prefix()}.removed-{secrets.token_hex(8)}")  # no namespace has such a name
    root.rename(aside)
    for left in root.parent.glob(f"{prefix()}.removed-*"):  # also what a remover that was killed has left
        shutil.rmtree(left, ignore_errors=True)


def in_use(root: Path) -> bool:
    """Whether some process has the namespace open."""
    try:
        fd = os.open(root / CONTROL / "alive", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd)
    finally:
        release_namespace(fd)  # a child that was forked meanwhile would go on holding it


def prefix() -> str:
    return f"tiercheck-{os.geteuid()}-"


def open_alive(root: Path) -> int:
    return os.open(root / CONTROL / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def still_there(root: Path, fd: int) -> bool:
    try:
        return (root / CONTROL / "alive").stat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def kind_of(root: Path) -> NamespaceKind | None:
    """``None`` if it was never decided, or cannot be read."""
    try:
        with (root / CONTROL / "kind").open("rb") as file:
            return NamespaceKind(file.read(KIND_BYTES_MAX).decode())
    except (OSError, ValueError):
        return None


def check_kind(root: Path, kind: NamespaceKind) -> None:
    """Decide the kind, unless it is decided. Errors: ``Unauthorized`` if it is the other one."""
    if (found := kind_of(root)) is None:
        with locked(root / CONTROL / "kind") as fd:
            if os.fstat(fd).st_size == 0:
                os.write(fd, kind.encode())
        found = kind_of(root)
    if found is kind:
        return
    if kind is NamespaceKind.OWN:
        raise Unauthorized(f"{root} holds what neighbours have put, which is no job's own memory; choose another name")
    raise Unauthorized(f"{root} is the memory of a job of this user; no peer server gives it away")


def check_private(root: Path) -> None:
    """Errors: ``Unauthorized`` if ``root`` is not a directory of this user's alone."""
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise Unauthorized(f"{root} should be a directory, but is a link or a file; somebody put it there: remove it")
    if status.st_uid != os.geteuid():
        raise Unauthorized(f"{root} belongs to user {status.st_uid}; choose another name")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise Unauthorized(f"{root} can be entered by other users; run 'chmod 700 {root}' if that was not meant")

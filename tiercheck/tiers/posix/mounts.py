"""Which file system a path lies on, and how it is mounted."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tiercheck.errors import TierError

__all__ = [
    "Mount",
    "Traits",
    "check_mounted",
    "is_local",
    "mount_by_name",
    "mount_of",
    "mount_point_above",
    "parse_mounts",
    "traits_of",
]


@dataclass(frozen=True)
class Mount:
    """One line of ``/proc/self/mountinfo``: where, of which type (``ext4``, ``fuse.glusterfs``), with which options."""

    point: Path
    type: str
    options: frozenset[str]


@dataclass(frozen=True)
class Traits:
    """What a mount promises to clients on several nodes."""

    coherent: bool
    """What one client has done, every other one sees in its next call; else it may remember old names for a while."""
    locks: bool
    """flock excludes every other client of the file system, on other nodes too, by its type and the mount's options."""
    inodes_unique: bool
    """The number of an inode that is gone is not given out again."""


_LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay"))
_COHERENT = _LOCAL | {"lustre", "gpfs", "ceph"}
_LOCKS = _COHERENT | {"nfs", "nfs4", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.juicefs"}
"""Where flock reaches every client. Of other FUSE file systems most leave it to the node's kernel, and say nothing."""
_INODES_UNIQUE = frozenset({"lustre", "ceph", "fuse.glusterfs", "fuse.juicefs"})
_LOCAL_LOCKS = frozenset({"localflock", "nolock", "local_lock=flock", "local_lock=all"})

UNKNOWN = Mount(Path("/"), "unknown", frozenset())


def mount_of(path: Path) -> Mount:
    """The mount that ``path`` lies on, or will lie on once it is made. Asks the file system, which may hang."""
    return mount_by_name(path.resolve())


def mount_by_name(path: Path) -> Mount:
    """The same of a path in which nothing is a link. Asks nobody but the kernel."""
    table = Path("/proc/self/mountinfo")
    mounts = parse_mounts(os.fsdecode(table.read_bytes())) if table.exists() else []
    # Of mounts on one point the last hides the others.
    above = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(enumerate(above), key=lambda item: (len(item[1].point.parts), item[0]), default=(0, UNKNOWN))[1]


def check_mounted(path: Path, point: Path) -> None:
    """Errors: ``TierError`` unless ``path`` lies on a file system that is mounted at ``point``, or below it."""
    with suppress(OSError):
        path.stat()  # what is mounted on demand is mounted now
    found = mount_of(path)
    if not found.point.is_relative_to(point.resolve()):
        raise TierError(
            f"nothing is mounted at {point}, as mount= says, so that {path} would lie on {found.type} of "
            f"{found.point}: mount it, or correct mount="
        )


def mount_point_above(root: Path) -> Callable[[str], Path]:
    """A conversion to a mount point; it raises ``ValueError`` for a path that ``root`` does not lie under."""

    def convert(text: str) -> Path:
        point = Path(text)
        if not point.is_absolute() or ".." in point.parts or not root.is_relative_to(point):
            raise ValueError(f"{text!r} is no absolute path that {root} lies under")
        return point

    return convert


def traits_of(mount: Mount) -> Traits:
    """What is known of the file system's type. Of an unknown one nothing is expected."""
    locks = mount.type in _LOCKS and not mount.options & _LOCAL_LOCKS
    if mount.type == "lustre":
        locks = (
            locks and "flock" in mount.options
        )  # without this option flock fails; with localflock it is the node's own
    return Traits(mount.type in _COHERENT, locks, mount.type in _INODES_UNIQUE)


def is_local(mount: Mount) -> bool:
    """Whether it is of a type that one node alone mounts."""
    return mount.type in _LOCAL


def parse_mounts(text: str) -> list[Mount]:
    """The lines of ``mountinfo``; see proc_pid_mountinfo(5)."""
    found = []
    for line in filter(None, text.split("\n")):  # a name may have other characters that end a line
        left, _, right = line.partition(" - ")
        point, options = left.split(" ")[4:6]
        kind, _, super_options = right.split(" ", 2)
        plain = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
        found.append(Mount(Path(plain), kind, frozenset(f"{options},{super_options}".split(","))))
    return found

"""Objects as files of a directory on a disk: ``nvme:///mnt/ssd/run[?survives=rack][&mount=/mnt/ssd][&io=direct]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tiercheck.errors import Unsupported
from tiercheck.tiers.posix.direct import ALIGNMENT, direct_obstacle
from tiercheck.tiers.posix.directories.local import ObjectDirectory
from tiercheck.tiers.posix.file_driver import FileDriver
from tiercheck.tiers.posix.mounts import mount_of, mount_point_above, traits_of
from tiercheck.tiers.posix.transfer import Blocks, Sequential
from tiercheck.tiers.url import TierURL, directory_of, number_from, parse_size
from tiercheck.types import Capabilities, Survives

__all__ = ["NvmeDriver", "parse_block", "parse_io"]

DEPTH = 4
DEPTH_MAX = 64
BLOCK_BYTES = 4 << 20
BLOCK_BYTES_MAX = 256 << 20
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that are a page cache: there is nothing to go past."""


class NvmeDriver(FileDriver):
    """Any local or mounted directory.

    A put returns once the file, its name and the directories above it are on the disk (fsync of each).

    ``mount`` is the mount point that the directory lies on. If nothing is mounted there, opening is a ``TierError``.
    Without it an empty mount point cannot be told from a new directory.

    Objects of 1 MiB and more go past the page cache (``O_DIRECT``), several blocks at a time, with room for the
    whole object allocated before its first byte is written. What is not aligned in memory takes the way through
    bounce buffers, at most ``(depth + 4) x block`` bytes of them. A get reads the same way, unless the page cache holds
    the object. ``io`` says whether: ``auto`` (the default: if it works), ``direct`` (an error at open if it does not)
    or ``buffered``. ``block`` (4 MiB) and ``depth`` (4) are the bytes of a block, and how many blocks are moved at a
    time. :meth:`facts` says what is used.

    ``survives`` defaults to ``PROCESS``. The bytes outlive the node's power as well, but while the node is
    away nobody can read a local disk, and a node that fails for good takes it along: a recovery from a node
    failure must not count on it. A directory on shared storage (NFS, a parallel file system) may claim what
    that storage outlives, with ``?survives=node``, ``rack`` or ``site``; if several nodes use it, ``lustre://`` is
    the better driver for it: this one expects a mount to show at once what other nodes did.

    Conditional puts: a ``CREATE`` gives the file its name by ``link``, which no other client can do as well, whatever
    locks there are. An ``UPDATE`` needs a lock that excludes all clients. A local file system has it; so has a mount
    known to carry flock to its server (NFS 4, Lustre with ``-o flock``, GPFS, CephFS, GlusterFS, JuiceFS). On any other
    ``capabilities.conditional_put`` is false once the driver is open: its locks may be this node's own, and nothing
    tells.
    """

    def __init__(
        self,
        root: Path,
        *,
        survives: Survives = Survives.PROCESS,
        io: str = "auto",
        block: int = BLOCK_BYTES,
        depth: int = DEPTH,
        mount: Path | None = None,
    ) -> None:
        super().__init__(
            ObjectDirectory(directory_of("nvme", root), durable=True),
            TierURL("nvme", str(root)).text,
            Capabilities(survives=survives, mappable=False, conditional_put=True, parts_in_flight=4),
            mount,
        )
        self._io = io
        self._block = block
        self._depth = depth
        self._facts: dict[str, str] = {}

    @classmethod
    def from_url(cls, url: TierURL) -> NvmeDriver:
        options = url.reader()
        survives = options.take("survives", Survives.parse, Survives.PROCESS)
        io = options.take("io", parse_io, "auto")
        block = options.take("block", parse_block, BLOCK_BYTES)
        depth = options.take("depth", number_from(1, DEPTH_MAX), DEPTH)
        root = directory_of("nvme", url.location)
        mount = options.take("mount", mount_point_above(root), None)
        options.finish()
        return cls(root, survives=survives, io=io, block=block, depth=depth, mount=mount)

    def facts(self) -> Mapping[str, str]:
        """``directory``: that opening has made it, if so; ``file system``: its type; ``locks``: whether puts know
        conditions; ``io``: ``direct 4 MiB x 4``, or ``buffered`` and why."""
        return dict(self._facts)

    def prepare(self) -> None:
        super().prepare()
        mount = mount_of(self.directory.root)
        kind, locks = mount.type, traits_of(mount).locks
        self._capabilities = replace(self._capabilities, conditional_put=locks)
        obstacle = self._obstacle(kind)
        if obstacle is None:
            self.directory.transfer = blocks = Blocks(block_bytes=self._block, depth=self._depth, direct=True)
            transfers = f"direct {blocks}"
        elif self._io == "direct":
            raise Unsupported(f"io=direct cannot be had here: {obstacle}; use io=auto")
        else:
            self.directory.transfer = Sequential()
            transfers = f"buffered ({obstacle})"
        self._facts = self.place_facts() | {
            "file system": kind,
            "locks": "flock" if locks else "none across nodes, as far as is known: puts know no conditions",
            "io": transfers,
        }

    def _obstacle(self, kind: str) -> str | None:
        """What is in the way of direct transfers, tried on an empty file; ``None`` if nothing is."""
        if self._io == "buffered":
            return "as the URL asks"
        if kind in IN_MEMORY:
            return f"{kind} has no O_DIRECT: it is memory"
        try:
            temporary = self.directory.create_temporary(0, lambda: None)
            try:
                obstacle = direct_obstacle(temporary.fd)
            finally:
                self.directory.discard(temporary)
        except OSError as error:
            # Full, also of files, or read-only, or worse: a put will say so. Reading must go on all the same.
            return f"the trial failed: {error.strerror}"
        return f"{kind} has {obstacle}" if obstacle == "no O_DIRECT" else obstacle


def parse_io(text: str) -> str:
    """``auto``, ``direct`` or ``buffered``; ``ValueError`` otherwise."""
    if text not in ("auto", "direct", "buffered"):
        raise ValueError(f"{text!r} is none of auto, direct and buffered")
    return text


def parse_block(text: str) -> int:
    """A size that is a multiple of 4096 bytes, 256 MiB at most."""
    nbytes = parse_size(text)
    if not ALIGNMENT <= nbytes <= BLOCK_BYTES_MAX or nbytes % ALIGNMENT:
        raise ValueError(f"{text!r} is no multiple of {ALIGNMENT} bytes up to 256 MiB")
    return nbytes

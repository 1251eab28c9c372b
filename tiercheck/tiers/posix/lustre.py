"""Objects as files on a parallel file system: ``lustre:///scratch/run[?mount=/scratch][&stripe_count=8]``."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tiercheck.errors import Transient, Unsupported
from tiercheck.tiers.posix.directories.object_files import CONTROL, HOST
from tiercheck.tiers.posix.directories.remembering import RememberingDirectory
from tiercheck.tiers.posix.directories.shared import SharedDirectory, create_plain, temporary_name
from tiercheck.tiers.posix.file_driver import FileDriver
from tiercheck.tiers.posix.mounts import Mount, mount_by_name, mount_of, mount_point_above, traits_of
from tiercheck.tiers.posix.striping import Striper, StripingFailed, parse_stripe_count, parse_stripe_size
from tiercheck.tiers.posix.transfer import Blocks
from tiercheck.tiers.url import TierURL, directory_of
from tiercheck.types import ByteRange, Capabilities, Survives

__all__ = ["LustreDriver"]

T = TypeVar("T")

STRIPE_BYTES = 4 << 20
DEPTH = 4
LAYOUT = f"{CONTROL}/layout"
LAYOUT_CHARS_MAX = 256
REPLACED_S_MAX = 10.0
"""For this long an object may be replaced under its reader, again and again, before the reader gives up."""
REPLACED_PAUSE_S = 0.002


class LustreDriver(FileDriver):
    """A directory that many nodes mount: Lustre, and any POSIX file system like it (GPFS, GlusterFS, NFS 4, ...).

    If ``lfs`` works, the tier's directory gets a default layout of one stripe (or ``stripe_count``), and
    a larger object its own, by size: see :func:`~tiercheck.tiers.posix.striping.stripes_for`. ``stripe_count`` (``all``
    or a number) and ``stripe_size`` override that, and are an error at open if there is no striping. Several
    threads write blocks of one stripe each.

    A put returns once the file and its names are on the servers' disks. After that, every other client's ``get``,
    ``stat`` and ``list`` sees it, also if the mount remembers names (FUSE, NFS): see
    :mod:`tiercheck.tiers.posix.directories.remembering`.

    Conditional puts need flock across nodes (Lustre: ``-o flock``); ``capabilities.conditional_put`` says whether
    it is there. As with every lock of a network file system, a client that is cut off in the middle of an ``UPDATE``
    may lose its lock; its rename then fails with the connection. A ``CREATE`` relies on no lock.

    ``survives`` defaults to ``RACK``. ``mount`` is the mount point that the directory lies on. If nothing is mounted
    there, opening is a ``TierError``. Without it an empty mount point cannot be told from a new directory.
    """

    def __init__(
        self,
        root: Path,
        *,
        survives: Survives = Survives.RACK,
        stripe_count: int | None = None,
        stripe_size: int | None = None,
        mount: Path | None = None,
    ) -> None:
        root = directory_of("lustre", root)
        self._mount = mount_by_name(root)  # a guess, which opening corrects: nobody may hang here
        self.shared = directory_on(self._mount, root)
        conditional_put = self.shared.excludes_other_nodes
        super().__init__(
            self.shared,
            TierURL("lustre", str(root)).text,
            Capabilities(survives=survives, conditional_put=conditional_put, parts_in_flight=4),
            mount,
        )
        self._stripe_count = stripe_count
        self._stripe_size = stripe_size
        self._striper: Striper | None = None
        self._unstriped = 0
        self._facts: dict[str, str] = {}

    @classmethod
    def from_url(cls, url: TierURL) -> LustreDriver:
        options = url.reader()
        survives = options.take("survives", Survives.parse, Survives.RACK)
        stripe_count = options.take("stripe_count", parse_stripe_count, None)
        stripe_size = options.take("stripe_size", parse_stripe_size, None)
        root = directory_of("lustre", url.location)
        mount = options.take("mount", mount_point_above(root), None)
        options.finish()
        return cls(root, survives=survives, stripe_count=stripe_count, stripe_size=stripe_size, mount=mount)

    def facts(self) -> Mapping[str, str]:
        """``directory`` (if opening has made it), ``file system``, ``striping``, ``locks``, ``names`` (whether mounts
        remember old ones), ``io``."""
        facts = dict(self._facts)
        if self._unstriped:
            facts["striping"] += f"; lfs failed for {self._unstriped} of the objects put, which have the default"
        return facts

    def prepare(self) -> None:
        self._look_at_mount()
        super().prepare()
        conditional_put = self.shared.excludes_other_nodes
        self._capabilities = replace(self._capabilities, conditional_put=conditional_put)
        self.shared.transfer = blocks = Blocks(block_bytes=self._stripe_size or STRIPE_BYTES, depth=DEPTH, direct=False)
        obstacle = self._prepare_striping(blocks.block_bytes)
        if obstacle and (self._stripe_count is not None or self._stripe_size is not None):
            raise Unsupported(
                f"stripe_count and stripe_size cannot be had here: {obstacle}; leave them out, or mend that"
            )
        self._facts = self.place_facts() | {
            "file system": self._mount.type,
            "striping": f"none ({obstacle})" if obstacle else str(self._striper),
            "locks": "flock" if conditional_put else "none across nodes: puts know no conditions",
            "names": "coherent" if self.shared.traits.coherent else "remembered by mounts: listed anew in each call",
            "io": f"buffered {blocks}",
        }

    async def reclaim(self) -> None:
        await self.run(lambda _: self.shared.reclaim(at_once=True))

    def prepare_to_read(self) -> None:
        self._look_at_mount()
        super().prepare_to_read()

    def _look_at_mount(self) -> None:
        """It may have been mounted since the driver was made."""
        found = mount_of(self.shared.root)
        if found != self._mount:
            self._mount = found
            self.directory = self.shared = directory_on(found, self.shared.root)

    def _prepare_striping(self, stripe_bytes: int) -> str | None:
        """Try to make a file with a layout, and give the tier's directory its default; returns what is in the way."""
        lfs = Striper.find()
        if lfs is None:
            return "lfs is not installed"
        striper = Striper(lfs, self._stripe_count, stripe_bytes)
        beneath, trial = self.shared.beneath, self.shared.control / temporary_name(HOST, time.time())
        try:
            with beneath.folder(CONTROL) as folder:
                os.close(striper.create(folder, trial, 1))
                os.unlink(trial.name, dir_fd=folder)
            if self._known_layout() != str(striper):
                striper.set_default(self.shared.root)
                with os.fdopen(beneath.open(LAYOUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC), "w") as file:
                    file.write(str(striper))
        except StripingFailed as failure:
            return str(failure)
        self._striper = striper
        self.shared.create_file = self._create_striped
        return None

    def _known_layout(self) -> str:
        """The layout that was last given to the tier's directory; empty for none."""
        try:
            fd = self.shared.beneath.open(LAYOUT, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return ""
        with os.fdopen(fd) as file:
            return file.read(LAYOUT_CHARS_MAX)

    def _create_striped(self, folder: int, path: Path, nbytes: int) -> int:
        striper = self._striper
        if striper is None or striper.count_for(nbytes) == striper.default_count:
            return create_plain(folder, path, nbytes)  # the directory's default is what it needs
        try:
            return striper.create(folder, path, nbytes)
        except StripingFailed:
            # An object with another layout is worth more than none; facts() tells.
            self._unstriped += 1
            return create_plain(folder, path, nbytes)

    def fetch(self, key: str, range: ByteRange | None, check: Callable[[], None]) -> memoryview:
        fetch = super().fetch
        return self._of_one_put(key, lambda: fetch(key, range, check))

    def fetch_into(self, key: str, range: ByteRange | None, into: memoryview, check: Callable[[], None]) -> int:
        fetch_into = super().fetch_into
        return self._of_one_put(key, lambda: fetch_into(key, range, into, check))

    @staticmethod
    def _of_one_put(key: str, read: Callable[[], T]) -> T:
        """Read again if the object was replaced meanwhile: a network file system may drop the old one at once."""
        deadline = time.monotonic() + REPLACED_S_MAX
        while True:
            try:
                return read()
            except OSError as error:
                if error.errno not in (errno.ESTALE, errno.ENOENT):
                    raise
                if time.monotonic() > deadline:
                    raise Transient("the object is replaced faster than it can be read; try again", key=key) from None
            time.sleep(REPLACED_PAUSE_S)


def directory_on(mount: Mount, root: Path) -> SharedDirectory:
    """The directory, used as its mount needs it."""
    traits = traits_of(mount)
    return SharedDirectory(root, traits) if traits.coherent else RememberingDirectory(root, traits)

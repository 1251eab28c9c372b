"""Objects as files of a directory on a disk: ``nvme:///mnt/ssd/run[?survives=rack]``."""

from __future__ import annotations

from pathlib import Path

from tiercheck.errors import ConfigurationError
from tiercheck.tiers.directory import ObjectDirectory
from tiercheck.tiers.file_driver import FileDriver
from tiercheck.tiers.url import TierURL
from tiercheck.types import Capabilities, Survives

__all__ = ["NvmeDriver"]


class NvmeDriver(FileDriver):
    """Any local or mounted directory.

    A put returns once the file, its name and the directories above it are on the disk (fsync of each).

    ``survives`` defaults to ``PROCESS``. The bytes outlive the node's power as well, but while the node is
    away nobody can read a local disk, and a node that fails for good takes it along: a recovery from a node
    failure must not count on it. A directory on shared storage (NFS, a parallel file system) may claim what
    that storage outlives, with ``?survives=node``, ``rack`` or ``site``.

    Conditional puts are atomic between the clients of one host, and between hosts as far as the file system
    carries flock (NFS does since version 4; Lustre with ``-o flock``).
    """

    def __init__(self, root: Path, *, survives: Survives = Survives.PROCESS) -> None:
        if not root.is_absolute():
            raise ConfigurationError(f"nvme:// needs an absolute directory, such as nvme:///mnt/ssd/run, not {root}")
        super().__init__(
            ObjectDirectory(root, durable=True),
            TierURL("nvme", str(root)).text,
            Capabilities(survives=survives, mappable=False, conditional_put=True, parts_in_flight=4),
        )

    @classmethod
    def from_url(cls, url: TierURL) -> NvmeDriver:
        options = url.reader()
        survives = options.take("survives", Survives.parse, Survives.PROCESS)
        options.finish()
        return cls(Path(url.location), survives=survives)

"""Which memory of jobs there is on this node, on whatever tmpfs, and which ranks have shards in it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from tiercheck.errors import Transient
from tiercheck.tiers.shm.namespaces import SHM, NamespaceKind, kind_of, namespace_names, namespace_path

__all__ = ["own_namespaces", "ranks_in", "tmpfs_mounts"]

MOUNTS = Path("/proc/self/mounts")
_RANK = re.compile(r"r(\d{5,})\Z", re.ASCII)


def tmpfs_mounts() -> list[Path]:
    """Where memory is mounted as a file system."""
    lines = [line.split() for line in MOUNTS.read_text().splitlines()]
    found = {Path(fields[1].encode().decode("unicode_escape")) for fields in lines if fields[2] in ("tmpfs", "ramfs")}
    return sorted(found | {SHM})


def own_namespaces(pattern: str = ".*") -> list[tuple[str, Path]]:
    """The namespaces of this user's jobs whose names match the regular expression, and their directories. What a peer
    server keeps is none of them."""
    found: list[tuple[str, Path]] = []
    for mount in tmpfs_mounts():
        with contextlib.suppress(PermissionError, Transient):
            names = [name for name in namespace_names(mount) if re.fullmatch(pattern, name)]
            roots = [(name, namespace_path(name, mount)) for name in names]
            found += [(name, root) for name, root in roots if kind_of(root) is NamespaceKind.OWN]
    return found


def ranks_in(root: Path) -> list[int]:
    """The ranks that have a shard in the namespace, ascending."""
    found = ((_RANK.match(folder.name), folder) for folder in root.glob("r*"))
    return sorted(int(match[1]) for match, folder in found if match and any(folder.glob("g*/*/*.safetensors")))

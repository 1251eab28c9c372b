"""How many processors this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["processors"]

CGROUP = Path("/sys/fs/cgroup")


def processors(root: Path = CGROUP, own: Path = Path("/proc/self/cgroup")) -> int:
    """Those that it is bound to, but no more than its control groups (version 2) have time for."""
    count = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        (name,) = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
        group = root / name.strip("/")
        for each in (group, *group.parents):
            if not each.is_relative_to(root):
                break
            with suppress(OSError):
                quota, _, period = (each / "cpu.max").read_text().partition(" ")
                if quota != "max":
                    count = min(count, max(1, int(quota) // int(period)))
    return count

"""Which processors this process may use, and how many at a time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["bound_to", "processors", "quota"]

CGROUP = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def bound_to() -> frozenset[int]:
    """The processors that this process is bound to."""
    return frozenset(os.sched_getaffinity(0))


def quota(root: Path = CGROUP, own: Path = OWN) -> int | None:
    """How many processors its control groups (version 2) have time for; ``None`` if they set no bound."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        (name,) = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
        group = root / name.strip("/")
        for each in (group, *group.parents):
            if not each.is_relative_to(root):
                break
            with suppress(OSError):
                time, _, period = (each / "cpu.max").read_text().partition(" ")
                if time != "max":
                    found.append(max(1, int(time) // int(period)))
    return min(found, default=None)


def processors(root: Path = CGROUP, own: Path = OWN) -> int:
    """How many it is bound to, but no more than its control groups have time for."""
    count, most = len(bound_to()), quota(root, own)
    return count if most is None else min(count, most)

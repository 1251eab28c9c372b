"""What a reader must know of the machine to judge the figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from pathlib import Path

__all__ = ["cpu_text", "file_system_text", "machine_facts"]

_PACKAGES = ("aiobotocore", "cupy-cuda13x", "numba", "numpy", "pyzmq", "torch", "xxhash")


def machine_facts() -> dict[str, object]:
    """Processor, memory, kernel, versions; none of it tells whose machine it is."""
    return {
        "figure": "machine",
        "cpu": cpu_text(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge_pages_shm": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def cpu_text() -> str:
    """``2 x AMD EPYC``: the processors this process may use, and their name."""
    name = _first_line("/proc/cpuinfo", lambda line: line.startswith("model name"))
    model = name.partition(":")[2].strip() or platform.machine()
    return f"{len(os.sched_getaffinity(0))} x {model}"


def file_system_text(path: Path) -> str:
    """``ext4 on /dev/vda``: what ``path`` lies on."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    line = _first_line("/proc/self/mountinfo", lambda line: line.split()[2] == wanted)
    kind, _, source = line.partition(" - ")[2].partition(" ")
    return f"{kind} on {source.split()[0]}" if source else "an unknown file system"


def _first_line(path: str, accept: Callable[[str], bool]) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if accept(line)), "")


def _chosen(path: str) -> str:
    """The word in brackets: ``always [madvise] never`` to ``madvise``."""
    text = _first_line(path, lambda line: True)
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

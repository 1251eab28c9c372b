"""What a test asks the system about processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["alive", "children", "maps_torch", "until"]


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted({int(each) for task in tasks for each in task.read_text().split() if alive(int(each))})


def alive(pid: int) -> bool:
    """One that has ended and was not waited for is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def until(condition: Callable[[], object], what: str, within_s: float = 60.0) -> None:
    """Look until it is so."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {within_s:g} s"
        time.sleep(0.02)

"""Export versions under a limit on this process's own memory: see ``test_export_memory.py``, which runs it."""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path

import tiercheck
from tiercheck.archive.export.write import Format

STACK_NBYTES = 256 << 10
"""Of a thread: all of it counts, used or not."""


def own_nbytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it: mapped files are not part of it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not tell VmData")


def export(url: str, version: int, format: Format, target: Path) -> None:
    with tiercheck.open(url) as archive:
        archive.export(target, format, version=version)


def main(small: str, large: str, target: Path, bounds: list[str]) -> None:
    """``bounds``: texts of the form ``format:version:bytes``. ``small`` is exported without a limit first, so that all
    modules and kernels are loaded. Prints whether each export of ``large`` succeeded, or the error."""
    threading.stack_size(STACK_NBYTES)
    _, unlimited = resource.getrlimit(resource.RLIMIT_DATA)
    for bound in bounds:
        name, version, nbytes_max = bound.split(":")
        resource.setrlimit(resource.RLIMIT_DATA, (unlimited, unlimited))
        export(small, int(version), Format(name), target / f"small-{bound}")
        limit = own_nbytes() + int(nbytes_max)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, unlimited))
        try:
            export(large, int(version), Format(name), target / f"large-{bound}")
            said = "done"
        except Exception as error:  # what fails for lack of memory fails in many ways
            said = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"{bound} {said}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])

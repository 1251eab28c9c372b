"""The programs that tests need beside Python packages, and what happens where one is missing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

__all__ = ["need"]

_NODE_MODULES = Path(sys.prefix) / "servers" / "node_modules" / ".bin"


def need(program: str, *, package: str) -> Path:
    """The program's path. Where it is missing the test is skipped, saying what to install; in CI that is a failure,
    since there everything is installed."""
    places = [str(Path(sys.prefix) / "bin"), str(_NODE_MODULES), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]
    found = shutil.which(program, path=os.pathsep.join(places))
    if found is not None:
        return Path(found)
    message = f"{program} is not installed; install {package} to run this test"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)

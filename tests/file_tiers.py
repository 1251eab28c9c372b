"""The kit and the stateful test for tiers whose objects are files, which a test can read and write itself."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.driver_kit.base import TierKit
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver

__all__ = ["FileTierKit", "FileTierMachine", "FileTierTests"]


class FileTierKit(TierKit):
    """What the kit asks of a subclass, whose fixture says where the tier's ``root`` is."""

    root: Path
    _mounted: Path | None = None

    @pytest.fixture(autouse=True)
    def _unmounting(self, tmp_path: Path) -> Iterator[None]:
        self._small = tmp_path / "small"
        yield
        if self._mounted is not None:
            subprocess.run(["umount", "-l", self._mounted], check=True)

    def small_place(self) -> Path | None:
        """A directory on a file system of less than ``small_nbytes``; ``None`` without the right to mount one."""
        self._small.mkdir()
        size = f"size={self.small_nbytes - (1 << 20)}"
        mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", self._small], capture_output=True)
        if mounting.returncode:
            return None
        self._mounted = self._small
        return self._small / "tier"

    def file_to_read(self, key: str) -> Path:
        """Where a test looks for the object."""
        return self.root / key

    def file_to_write(self, key: str) -> Path:
        """Where a test puts the object."""
        return self.root / key

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        path = self.file_to_read(key)
        return path.read_bytes() if path.is_file() else None

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        path = self.file_to_write(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


class FileTierTests(FileTierKit, TierDriverTests):
    """The whole kit."""


class FileTierMachine(DriverMachine):
    """A machine whose tier is the directory ``root``."""

    @functools.cached_property
    def root(self) -> Path:
        return Path(tempfile.mkdtemp())

    def remove_tier(self) -> None:
        shutil.rmtree(self.root)

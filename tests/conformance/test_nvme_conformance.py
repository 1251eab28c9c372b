"""The nvme driver passes the kit."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from tests.file_tiers import FileTierKit
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.driver_kit.limits import LimitTests
from tiercheck.testing.driver_kit.writers import WriterTests
from tiercheck.testing.faults import Killed
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver


class NvmeKit(FileTierKit):
    options = "io=auto"

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.root = tmp_path / "some dir" / "tier"

    async def make_driver(self) -> TierDriver:
        return make_driver(f"nvme://{self.root}?{self.options}")

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(f"nvme://{self.root}?survives=rack&{self.options}")

    async def make_small_driver(self) -> TierDriver | None:
        place = self.small_place()
        return None if place is None else make_driver(f"nvme://{place}?{self.options}")

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(make_driver, f"nvme://{self.root}?{self.options}")

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch("tiercheck.tiers.posix.directories.local.ObjectDirectory.replace", side_effect=Killed)


class TestNvme(NvmeKit, TierDriverTests):
    """Small objects go through the page cache, large ones past it if the file system can."""


class TestNvmeInManyBlocks(NvmeKit, WriterTests, LimitTests):
    """Every object goes past the page cache if it can, in many small blocks, by several threads. That changes how its
    bytes come and go, and nothing else."""

    options = "block=64KiB&depth=3"

    @pytest.fixture(autouse=True)
    def no_object_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tiercheck.tiers.posix.transfer.BLOCKS_BYTES_MIN", 1)

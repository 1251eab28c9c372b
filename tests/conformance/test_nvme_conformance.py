"""The nvme driver passes the kit."""

import contextlib
from pathlib import Path
from unittest import mock

import pytest

from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.faults import Killed
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver


class TestNvme(TierDriverTests):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.root = tmp_path / "some dir" / "tier"

    async def make_driver(self) -> TierDriver:
        return make_driver(f"nvme://{self.root}")

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(f"nvme://{self.root}?survives=rack")

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.is_file() else None

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch("tiercheck.tiers.directory.ObjectDirectory.replace", side_effect=Killed)

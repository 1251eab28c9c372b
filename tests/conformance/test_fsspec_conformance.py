"""The fsspec driver passes the kit on file systems that need no server; tests/cluster has those that do."""

import secrets

import fsspec
import pytest
from hypothesis import HealthCheck, settings

from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver


class TestMemory(TierDriverTests):
    copies_here = 2  # fsspec's file grows, and is then copied

    @pytest.fixture(autouse=True)
    def name(self) -> None:
        self.root = f"/{secrets.token_hex(8)}/run"
        self.store = fsspec.filesystem("memory").store

    async def make_driver(self) -> TierDriver:
        return make_driver(f"fsspec+memory:/{self.root}?part=256KiB")

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(f"fsspec+memory:/{self.root}")

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        found = self.store.get(f"{self.root}/{key}")
        return None if found is None else found.getvalue()

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        fsspec.filesystem("memory").pipe_file(f"{self.root}/{key}", content)

    def crash_before_publish(self, driver: TierDriver) -> None:
        return None  # writing and publishing are one assignment


class MemoryMachine(DriverMachine):
    def make_driver(self) -> TierDriver:
        self.root = getattr(self, "root", None) or f"/{secrets.token_hex(8)}"
        return make_driver(f"fsspec+memory:/{self.root}")

    def remove_tier(self) -> None:
        fs = fsspec.filesystem("memory")
        for path in fs.find(self.root):
            fs.rm_file(path)


FAST = settings(max_examples=10, stateful_step_count=30, suppress_health_check=list(HealthCheck))

TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = FAST

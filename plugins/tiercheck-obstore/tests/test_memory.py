"""obstore's memory store passes the kit: the driver's own code, without a server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import obstore
import pytest
from hypothesis import HealthCheck, settings
from tiercheck_obstore.stores import MemoryDriver

from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver


class TestMemory(TierDriverTests):
    large_nbytes = 5 << 19  # three parts, the last one short

    @pytest.fixture(autouse=True)
    def name(self) -> Iterator[None]:
        self.store_name = secrets.token_hex(4)
        yield
        MemoryDriver.forget(self.store_name)

    async def make_driver(self) -> TierDriver:
        return make_driver(f"obstore+memory://{self.store_name}?part=1MiB")

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return await self.make_driver()

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        try:
            found = await obstore.get_async(MemoryDriver._stores[self.store_name], key)
        except FileNotFoundError:
            return None
        return bytes(await found.bytes_async())

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        await obstore.put_async(MemoryDriver._stores[self.store_name], key, content)

    def crash_before_publish(self, driver: TierDriver) -> None:
        """The store writes and publishes in one step."""


class MemoryMachine(DriverMachine):
    def make_driver(self) -> TierDriver:
        self.name = getattr(self, "name", None) or secrets.token_hex(4)
        return make_driver(f"obstore+memory://{self.name}")

    def remove_tier(self) -> None:
        MemoryDriver.forget(self.name)


TestMemoryAgainstADictionary = MemoryMachine.TestCase
TestMemoryAgainstADictionary.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)

"""The memory driver passes the kit."""

import contextlib
import secrets
from collections.abc import Iterator
from unittest import mock

import pytest

from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.faults import Killed
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver, MemoryStore, StoredObject


class TestMemory(TierDriverTests):
    @pytest.fixture(autouse=True)
    def name(self) -> Iterator[None]:
        self.store_name = secrets.token_hex(4)
        yield
        MemoryDriver.forget(self.store_name)

    async def make_driver(self) -> TierDriver:
        return MemoryDriver(self.store_name)

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return MemoryDriver(self.store_name)

    async def make_small_driver(self) -> TierDriver:
        return MemoryDriver(size=self.small_nbytes)

    @staticmethod
    def store(driver: TierDriver) -> MemoryStore:
        assert isinstance(driver, MemoryDriver)
        return driver.store

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        found = self.store(driver).objects.get(key)
        return None if found is None else bytes(found.content)

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        self.store(driver).objects[key] = StoredObject(memoryview(content), f"raw {content!r}")

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch.object(MemoryStore, "publish", side_effect=Killed)

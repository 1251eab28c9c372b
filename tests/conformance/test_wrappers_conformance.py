"""All wrappers together pass the kit: around the memory driver, whose memory they hand out, and around a real one.

What each adds is tested by itself in tests/unit/tiers/wrappers.
"""

import contextlib
import functools
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from tests.clients import PREFIX, all_around_nvme, all_of_them
from tests.file_tiers import FileTierTests
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.faults import Killed
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver, MemoryStore, StoredObject


class TestAllAroundMemory(TierDriverTests):
    """Raw access is to the memory under the wrappers. What lies beside the part is neither seen nor counted."""

    @pytest.fixture(autouse=True)
    def name(self) -> Iterator[None]:
        self.store_name = secrets.token_hex(4)
        self.store = MemoryDriver(self.store_name).store
        for key in ("jobs/seve", "jobs/seven", "jobs/seven-b/x", "jobs/seven.d", "jobs/six/a", "a"):
            self.store.objects[key] = StoredObject(memoryview(b"not yours"), f"beside {key}")
        yield
        MemoryDriver.forget(self.store_name)

    async def make_driver(self) -> TierDriver:
        return all_of_them(MemoryDriver(self.store_name))

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return all_of_them(MemoryDriver(self.store_name))

    async def make_small_driver(self) -> TierDriver:
        return all_of_them(MemoryDriver(size=self.small_nbytes))

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        found = self.store.objects.get(f"{PREFIX}/{key}")
        return None if found is None else bytes(found.content)

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        self.store.objects[f"{PREFIX}/{key}"] = StoredObject(memoryview(content), f"raw {content!r}")

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch.object(MemoryStore, "publish", side_effect=Killed)


class TestAllAroundNvme(FileTierTests):
    @pytest.fixture(autouse=True)
    def directory(self) -> Iterator[None]:
        # In memory: what the wrappers add does not depend on the disk, and each put waits for its fsync.
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tiercheck-test-") as folder:
            self.below = Path(folder)
            self.root = self.below / PREFIX
            yield

    async def make_driver(self) -> TierDriver:
        return all_around_nvme(self.below)

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return all_around_nvme(self.below)

    async def make_small_driver(self) -> TierDriver | None:
        place = self.small_place()
        return None if place is None else all_around_nvme(place)

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(all_around_nvme, self.below)

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch("tiercheck.tiers.posix.directories.local.ObjectDirectory.replace", side_effect=Killed)


class AllAroundMemoryMachine(DriverMachine):
    def make_driver(self) -> TierDriver:
        self.name = getattr(self, "name", None) or secrets.token_hex(4)
        return all_of_them(MemoryDriver(self.name))

    def remove_tier(self) -> None:
        MemoryDriver.forget(self.name)


class AllAroundNvmeMachine(DriverMachine):
    def make_driver(self) -> TierDriver:
        self.folder = getattr(self, "folder", None) or tempfile.TemporaryDirectory(dir="/dev/shm")
        return all_around_nvme(Path(self.folder.name))

    def remove_tier(self) -> None:
        self.folder.cleanup()


FAST = settings(max_examples=20, stateful_step_count=30, suppress_health_check=list(HealthCheck))

TestAllAroundMemoryMachine = AllAroundMemoryMachine.TestCase
TestAllAroundMemoryMachine.settings = FAST
TestAllAroundNvmeMachine = AllAroundNvmeMachine.TestCase
TestAllAroundNvmeMachine.settings = FAST

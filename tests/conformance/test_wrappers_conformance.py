"""Each wrapper passes the kit around the memory driver, and all of them together around a real one."""

import abc
import contextlib
import functools
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from tests.file_tiers import FileTierTests
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.faults import FaultyDriver, Killed
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver, MemoryStore, StoredObject
from tiercheck.tiers.posix.nvme import NvmeDriver
from tiercheck.tiers.wrappers import (
    MeteredDriver,
    PrefixedDriver,
    RetryingDriver,
    ThrottledDriver,
    WrappingDriver,
)

PREFIX = "jobs/seven"


def all_of_them(driver: TierDriver) -> TierDriver:
    """The order a job would use: its own part of the tier, with another try for what fails, throttled and metered."""
    return MeteredDriver(ThrottledDriver(RetryingDriver(PrefixedDriver(driver, PREFIX)), bytes_per_s=1 << 40))


def all_around_nvme(root: Path) -> TierDriver:
    return all_of_them(NvmeDriver(root))


class AroundMemory(TierDriverTests):
    """The kit, with raw access to the memory that lies under the wrapper."""

    above = ""

    @pytest.fixture(autouse=True)
    def name(self) -> Iterator[None]:
        self.store_name = secrets.token_hex(4)
        self.store = MemoryDriver(self.store_name).store
        yield
        MemoryDriver.forget(self.store_name)

    @abc.abstractmethod
    def wrapped(self, driver: TierDriver) -> TierDriver:
        """``driver`` in the wrapper under test."""

    async def make_driver(self) -> TierDriver:
        return self.wrapped(MemoryDriver(self.store_name))

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return self.wrapped(MemoryDriver(self.store_name))

    async def make_small_driver(self) -> TierDriver:
        return self.wrapped(MemoryDriver(size=self.small_nbytes))

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        found = self.store.objects.get(self.above + key)
        return None if found is None else bytes(found.content)

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        self.store.objects[self.above + key] = StoredObject(memoryview(content), f"raw {content!r}")

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch.object(MemoryStore, "publish", side_effect=Killed)


class TestThrottled(AroundMemory):
    def wrapped(self, driver: TierDriver) -> TierDriver:
        return ThrottledDriver(driver, bytes_per_s=1 << 34, requests_per_s=1 << 20)


class TestMetered(AroundMemory):
    def wrapped(self, driver: TierDriver) -> TierDriver:
        return MeteredDriver(driver)


class TestRetrying(AroundMemory):
    def wrapped(self, driver: TierDriver) -> TierDriver:
        return RetryingDriver(driver)


class TestPrefixed(AroundMemory):
    """What lies beside the part is neither seen nor counted."""

    above = PREFIX + "/"

    @pytest.fixture(autouse=True)
    def neighbours(self, name: None) -> None:
        for key in ("jobs/seve", "jobs/seven", "jobs/seven-b/x", "jobs/seven.d", "jobs/six/a", "a"):
            self.store.objects[key] = StoredObject(memoryview(b"not yours"), f"beside {key}")

    def wrapped(self, driver: TierDriver) -> TierDriver:
        return PrefixedDriver(driver, PREFIX)


class TestFaultyWithNoFaults(AroundMemory):
    """With an empty plan, and around a wrapper that adds nothing, it cannot be told from what it wraps."""

    def wrapped(self, driver: TierDriver) -> TierDriver:
        return FaultyDriver(WrappingDriver(driver))


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

    def client_elsewhere(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(all_around_nvme, self.below)

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch("tiercheck.tiers.posix.directories.local.ObjectDirectory.replace", side_effect=Killed)


class WrappedMachine(DriverMachine):
    def wrapped(self, driver: TierDriver) -> TierDriver:
        raise NotImplementedError

    def make_driver(self) -> TierDriver:
        self.name = getattr(self, "name", None) or secrets.token_hex(4)
        return self.wrapped(MemoryDriver(self.name))

    def remove_tier(self) -> None:
        MemoryDriver.forget(self.name)


class ThrottledMachine(WrappedMachine):
    def wrapped(self, driver: TierDriver) -> TierDriver:
        return ThrottledDriver(driver, bytes_per_s=1 << 34)


class MeteredMachine(WrappedMachine):
    def wrapped(self, driver: TierDriver) -> TierDriver:
        return MeteredDriver(driver)


class RetryingMachine(WrappedMachine):
    def wrapped(self, driver: TierDriver) -> TierDriver:
        return RetryingDriver(driver)


class PrefixedMachine(WrappedMachine):
    def wrapped(self, driver: TierDriver) -> TierDriver:
        return PrefixedDriver(driver, PREFIX)


class AllAroundNvmeMachine(DriverMachine):
    def make_driver(self) -> TierDriver:
        self.folder = getattr(self, "folder", None) or tempfile.TemporaryDirectory(dir="/dev/shm")
        return all_of_them(NvmeDriver(Path(self.folder.name)))

    def remove_tier(self) -> None:
        self.folder.cleanup()


FAST = settings(max_examples=20, stateful_step_count=30, suppress_health_check=list(HealthCheck))

TestThrottledMachine = ThrottledMachine.TestCase
TestThrottledMachine.settings = FAST
TestMeteredMachine = MeteredMachine.TestCase
TestMeteredMachine.settings = FAST
TestRetryingMachine = RetryingMachine.TestCase
TestRetryingMachine.settings = FAST
TestPrefixedMachine = PrefixedMachine.TestCase
TestPrefixedMachine.settings = FAST
TestAllAroundNvmeMachine = AllAroundNvmeMachine.TestCase
TestAllAroundNvmeMachine.settings = FAST

"""The drivers against a dictionary, in orders that Hypothesis chooses."""

import secrets
from unittest import mock

from hypothesis import HealthCheck, settings

from tests.file_tiers import FileTierMachine
from tiercheck.testing.faults import FaultyDriver
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.posix.nvme import NvmeDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm.driver import ShmDriver, remove_namespace

FAST = settings(max_examples=20, stateful_step_count=40, suppress_health_check=list(HealthCheck))


class MemoryMachine(DriverMachine):
    def make_driver(self) -> TierDriver:
        self.name = getattr(self, "name", None) or secrets.token_hex(4)
        return FaultyDriver(MemoryDriver(self.name))

    def remove_tier(self) -> None:
        MemoryDriver.forget(self.name)


class NvmeMachine(FileTierMachine):
    def make_driver(self) -> TierDriver:
        return NvmeDriver(self.root)


class NvmeInBlocksMachine(FileTierMachine):
    """No object is small: each goes past the page cache, in many blocks, by several threads."""

    def make_driver(self) -> TierDriver:
        mock.patch("tiercheck.tiers.posix.transfer.BLOCKS_BYTES_MIN", 1).start()
        return make_driver(f"nvme://{self.root}?block=64KiB&depth=3")

    def remove_tier(self) -> None:
        mock.patch.stopall()
        super().remove_tier()


class ShmMachine(DriverMachine):
    def make_driver(self) -> TierDriver:
        self.name = getattr(self, "name", None) or f"test-{secrets.token_hex(6)}"
        return ShmDriver(self.name, size=32 << 20)

    def remove_tier(self) -> None:
        remove_namespace(self.name)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = FAST
TestNvme = NvmeMachine.TestCase
TestNvme.settings = FAST
TestNvmeInBlocks = NvmeInBlocksMachine.TestCase
TestNvmeInBlocks.settings = settings(FAST, max_examples=10)
TestShm = ShmMachine.TestCase
TestShm.settings = FAST

"""The fsspec driver passes the kit on file systems that need no server; tests/cluster has those that do."""

import contextlib
import functools
import secrets
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import fsspec
import pytest
from hypothesis import HealthCheck, settings

from tests.file_tiers import FileTierMachine, FileTierTests
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.faults import FaultyDriver, Killed
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver


class TestLocal(FileTierTests):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.root = tmp_path / "some dir" / "tier"

    async def make_driver(self) -> TierDriver:
        return make_driver(f"fsspec+file://{self.root}?part=256KiB")

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(f"fsspec+local://{self.root}?survives=rack&part=1MiB")

    async def make_small_driver(self) -> TierDriver | None:
        place = self.small_place()
        return None if place is None else make_driver(f"fsspec+file://{place}?part=256KiB")

    def client_elsewhere(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(make_driver, f"fsspec+file://{self.root}?part=256KiB")

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch("tiercheck.tiers.fsspec.renaming.LocalBackend.replace", side_effect=Killed)


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


class LocalMachine(FileTierMachine):
    def make_driver(self) -> TierDriver:
        return FaultyDriver(make_driver(f"fsspec+file://{self.root}"))


class MemoryMachine(DriverMachine):
    def make_driver(self) -> TierDriver:
        self.root = getattr(self, "root", None) or f"/{secrets.token_hex(8)}"
        return make_driver(f"fsspec+memory:/{self.root}")

    def remove_tier(self) -> None:
        fs = fsspec.filesystem("memory")
        for path in fs.find(self.root):
            fs.rm_file(path)


FAST = settings(max_examples=10, stateful_step_count=30, suppress_health_check=list(HealthCheck))

TestLocalMachine = LocalMachine.TestCase
TestLocalMachine.settings = FAST
TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = FAST

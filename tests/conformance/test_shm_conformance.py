"""The shm driver passes the kit."""

import contextlib
import functools
from collections.abc import Callable
from unittest import mock

import pytest

from tests.file_tiers import FileTierTests
from tests.shared_memory import root_of
from tiercheck.testing.faults import Killed
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver


class TestShm(FileTierTests):
    @pytest.fixture(autouse=True)
    def namespace(self, name: str) -> None:
        self.name = name
        self.root = root_of(name)

    async def make_driver(self) -> TierDriver:
        return make_driver(f"shm://{self.name}?size=64MiB")

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(f"shm://{self.name}?size=64MiB")

    async def make_small_driver(self) -> TierDriver:
        return make_driver(f"shm://{self.name}?size=16MiB")

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(make_driver, f"shm://{self.name}?size=64MiB")

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch("tiercheck.tiers.shm.segments.SegmentDirectory.replace", side_effect=Killed)

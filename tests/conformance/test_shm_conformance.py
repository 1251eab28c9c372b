"""The shm driver passes the kit."""

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.faults import Killed
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm import remove_namespace


class TestShm(TierDriverTests):
    @pytest.fixture(autouse=True)
    def namespace(self) -> Iterator[None]:
        self.name = f"test-{secrets.token_hex(6)}"
        self.root = Path(f"/dev/shm/tiercheck-{os.geteuid()}-{self.name}")
        yield
        if self.root.exists():
            remove_namespace(self.name)

    async def make_driver(self) -> TierDriver:
        return make_driver(f"shm://{self.name}?size=64MiB")

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(f"shm://{self.name}?size=64MiB")

    def client_elsewhere(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(make_driver, f"shm://{self.name}?size=64MiB")

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.is_file() else None

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return mock.patch("tiercheck.tiers.segments.SegmentDirectory.replace", side_effect=Killed)

"""The kit for the lustre driver, on whatever directory, and with the traits of other mounts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from unittest import mock

import pytest

from tests.clients import client_on_a_mount, refuse_locks
from tests.file_tiers import FileTierKit
from tiercheck.testing.faults import Killed
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.posix.mounts import Traits
from tiercheck.tiers.registry import make_driver

__all__ = ["LustreKit", "refuse_locks"]


@contextlib.contextmanager
def killed_before_a_name_appears() -> Iterator[None]:
    directory = "tiercheck.tiers.posix.directories.shared.SharedDirectory"
    with mock.patch(f"{directory}.replace", side_effect=Killed), mock.patch(f"{directory}.link", side_effect=Killed):
        yield


class LustreKit(FileTierKit):
    traits: Traits | None = None
    """Instead of the mount's own."""

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.root = self.other_root = tmp_path / "some dir" / "tier"

    async def make_driver(self) -> TierDriver:
        return make_driver(f"lustre://{self.root}")

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return make_driver(f"lustre://{self.other_root}")

    async def make_small_driver(self) -> TierDriver | None:
        place = self.small_place()
        return None if place is None else make_driver(f"lustre://{place}")

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(client_on_a_mount, self.other_root, *(astuple(self.traits) if self.traits else ()))

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return killed_before_a_name_appears()

"""The lustre driver passes the kit: on a local directory, and with two clients on two mounts of a GlusterFS."""

import contextlib
import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from tests.file_tiers import FileTierKit, FileTierMachine
from tests.servers.gluster import Gluster
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.driver_kit.elsewhere import ElsewhereTests
from tiercheck.testing.driver_kit.writers import WriterTests
from tiercheck.testing.faults import Killed
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.posix.lustre import LustreDriver
from tiercheck.tiers.posix.mounts import Traits
from tiercheck.tiers.registry import make_driver


@contextlib.contextmanager
def killed_before_a_name_appears() -> Iterator[None]:
    directory = "tiercheck.tiers.posix.directories.shared.SharedDirectory"
    with mock.patch(f"{directory}.replace", side_effect=Killed), mock.patch(f"{directory}.link", side_effect=Killed):
        yield


def client_on_a_mount(root: Path, *values: bool) -> TierDriver:
    """For a process of its own, where what is patched stays so: a client of a file system with these traits."""
    if values:
        traits = Traits(*values)
        mock.patch("tiercheck.tiers.posix.lustre.traits_of", lambda mount: traits).start()
        if not traits.locks:
            mock.patch("fcntl.flock", refuse_locks).start()
    return LustreDriver(root)


def refuse_locks(fd: int, operation: int) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


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

    def client_elsewhere(self, driver: TierDriver) -> Callable[[], TierDriver]:
        return functools.partial(client_on_a_mount, self.other_root, *(astuple(self.traits) if self.traits else ()))

    def crash_before_publish(self, driver: TierDriver) -> contextlib.AbstractContextManager[object]:
        return killed_before_a_name_appears()


class TestLustre(LustreKit, TierDriverTests):
    """On a local file system."""


class TestLustreOnAMountThatRemembers(LustreKit, WriterTests, ElsewhereTests):
    """Every name is looked up by listing, and names change one at a time; here that is merely slower. The rest of the
    kit runs on a real mount of this kind, :class:`TestLustreOnTwoMounts`."""

    traits = Traits(False, True, True)

    @pytest.fixture(autouse=True)
    def forgetful(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tiercheck.tiers.posix.lustre.traits_of", lambda mount: self.traits)


class TestLustreWithoutLocks(LustreKit, WriterTests):
    """As on a Lustre that is mounted without ``-o flock``: puts know no conditions, and say so."""

    traits = Traits(True, False, False)

    @pytest.fixture(autouse=True)
    def no_locks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tiercheck.tiers.posix.lustre.traits_of", lambda mount: self.traits)
        monkeypatch.setattr("fcntl.flock", refuse_locks)


@pytest.mark.cluster
class TestLustreOnTwoMounts(LustreKit, TierDriverTests):
    """Two clients of a networked file system; what a test reads and writes past the driver lies on the server."""

    listed = 200  # a mount reads a directory of any size in the same way

    @pytest.fixture(autouse=True)
    def directory(self, gluster: Gluster) -> Iterator[None]:
        first, second = gluster.mounts
        self.root = Path(tempfile.mkdtemp(dir=first)) / "tier"
        self.other_root = second / self.root.relative_to(first)
        self.brick_root = gluster.brick / self.root.relative_to(first)
        yield
        shutil.rmtree(self.root.parent)

    def file_to_read(self, key: str) -> Path:
        return self.brick_root / key

    def file_to_write(self, key: str) -> Path:
        return self.other_root / key


class LustreMachine(FileTierMachine):
    traits = Traits(True, True, False)

    def make_driver(self) -> TierDriver:
        with mock.patch("tiercheck.tiers.posix.lustre.traits_of", lambda mount: self.traits):
            return LustreDriver(self.root)


class RememberingMachine(LustreMachine):
    traits = Traits(False, True, True)


class LocklessMachine(LustreMachine):
    traits = Traits(True, False, True)


SETTINGS = settings(max_examples=15, stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestLustreStateful = LustreMachine.TestCase
TestLustreStateful.settings = SETTINGS
TestRememberingStateful = RememberingMachine.TestCase
TestRememberingStateful.settings = SETTINGS
TestLocklessStateful = LocklessMachine.TestCase
TestLocklessStateful.settings = SETTINGS

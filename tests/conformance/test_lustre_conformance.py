"""The lustre driver passes the kit on a local directory; tests/cluster has two clients on two mounts of a GlusterFS."""

from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from tests.file_tiers import FileTierMachine
from tests.lustre_tiers import LustreKit, refuse_locks
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.driver_kit.other_clients import OtherClientTests
from tiercheck.testing.driver_kit.writers import WriterTests
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.posix.lustre import LustreDriver
from tiercheck.tiers.posix.mounts import Traits


class TestLustre(LustreKit, TierDriverTests):
    """On a local file system."""


class TestLustreOnAMountThatRemembers(LustreKit, WriterTests, OtherClientTests):
    """Every name is looked up by listing, and names change one at a time; here that is merely slower. The rest of the
    kit runs on a real mount of this kind, in tests/cluster."""

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

"""What makes a client in another process, which imports this module: nothing here needs pytest or Hypothesis."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

from tiercheck.testing.faults import FaultyDriver
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.posix.lustre import LustreDriver
from tiercheck.tiers.posix.mounts import Traits
from tiercheck.tiers.posix.nvme import NvmeDriver
from tiercheck.tiers.wrappers import MeteredDriver, PrefixedDriver, RetryingDriver, ThrottledDriver, WrappingDriver
from tiercheck.tiers.wrappers.lazy_open import LazyOpenDriver

__all__ = ["PREFIX", "all_around_nvme", "all_of_them", "client_on_a_mount", "refuse_locks"]

PREFIX = "jobs/seven"


def all_of_them(driver: TierDriver) -> TierDriver:
    """The order a job would use: its own part of the tier, with another try for what fails, throttled and metered."""
    tier = LazyOpenDriver(FaultyDriver(WrappingDriver(driver)))  # with no fault they cannot be told from the driver
    retrying = RetryingDriver(PrefixedDriver(tier, PREFIX))
    return MeteredDriver(ThrottledDriver(retrying, bytes_per_s=1 << 34, requests_per_s=1 << 20))


def all_around_nvme(root: Path) -> TierDriver:
    return all_of_them(NvmeDriver(root))


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

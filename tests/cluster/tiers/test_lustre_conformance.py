"""The lustre driver passes the kit with two clients on two mounts of a GlusterFS."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lustre_tiers import LustreKit
from tests.servers.gluster import Gluster
from tiercheck.testing.conformance import TierDriverTests

pytestmark = pytest.mark.cluster


class TestLustreOnTwoMounts(LustreKit, TierDriverTests):
    """Two clients of a networked file system; what a test reads and writes past the driver lies on the server."""

    listed = 200  # a mount reads a directory of any size in the same way
    overwrites = 12  # each goes through two mounts and a server; the local file system runs all 30

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

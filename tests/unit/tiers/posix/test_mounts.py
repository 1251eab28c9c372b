"""A directory whose file system is not mounted is no empty directory, if its URL says where that is mounted."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.training import Training, life, memory
from tiercheck.errors import ConfigurationError, RecoveryError, TierError, Unauthorized
from tiercheck.hierarchy import Hierarchy
from tiercheck.tiers.posix import file_driver, lustre, mounts
from tiercheck.tiers.posix.beneath import Beneath
from tiercheck.tiers.posix.directories.remembering import RememberingDirectory
from tiercheck.tiers.posix.lustre import LustreDriver
from tiercheck.tiers.posix.mounts import Mount, check_mounted
from tiercheck.tiers.registry import make_driver


class Machine:
    """Where file systems are mounted, as far as the drivers see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mounts: list[Mount] = []
        for module in (mounts, file_driver, lustre):
            monkeypatch.setattr(module, "mount_of", self.mount_of)
        monkeypatch.setattr("tiercheck.tiers.posix.nvme.mount_of", self.mount_of)

    def mount_of(self, path: Path) -> Mount:
        above = [mount for mount in self.mounts if path.resolve().is_relative_to(mount.point)]
        return max(above, key=lambda mount: len(mount.point.parts), default=Mount(Path("/"), "ext4", frozenset()))

    def mount(self, point: Path, kind: str) -> None:
        self.mounts.append(Mount(point, kind, frozenset()))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_what_is_mounted_here_is_known_by_its_path_and_by_links_to_it(tmp_path: Path) -> None:
    check_mounted(tmp_path, Path("/"))
    check_mounted(Path("/proc/self"), Path("/proc"))
    (tmp_path / "link").symlink_to("/proc")
    check_mounted(tmp_path / "link" / "self", tmp_path / "link")
    with pytest.raises(TierError, match=rf"nothing is mounted at {tmp_path}, as mount= says, so that {tmp_path}/run "):
        check_mounted(tmp_path / "run", tmp_path)


@pytest.mark.parametrize("scheme", ["nvme", "lustre"])
async def test_nothing_is_made_in_an_empty_mount_point(tmp_path: Path, scheme: str, machine: Machine) -> None:
    driver = make_driver(f"{scheme}://{tmp_path}/store/run?mount={tmp_path}/store")
    for opening in (driver.open, driver.open_to_read):
        with pytest.raises(TierError, match=rf"nothing is mounted at {tmp_path}/store.*: mount it, or correct mount="):
            await opening()
    assert list(tmp_path.iterdir()) == []
    machine.mount(tmp_path / "store", "ext4")
    async with driver:
        await driver.put("a", [b"x"])
    assert (tmp_path / "store" / "run" / "a").read_bytes() == b"x"


async def test_what_was_mounted_meanwhile_is_used_as_it_needs_it(tmp_path: Path, machine: Machine) -> None:
    """On the bare mount point it would have been used as a file system that remembers no names."""
    driver = LustreDriver(tmp_path / "store" / "run", mount=tmp_path / "store")
    assert not isinstance(driver.directory, RememberingDirectory)
    machine.mount(tmp_path / "store", "fuse.sshfs")
    async with driver:
        assert isinstance(driver.directory, RememberingDirectory)
        assert not driver.capabilities.conditional_put
        await driver.put("a", [b"x"])
        assert bytes(await driver.get("a")) == b"x"


@pytest.mark.parametrize("mount", ["store", "/other", "/mnt/store/../store", "/mnt/store/run/below"])
@pytest.mark.parametrize("scheme", ["nvme", "lustre"])
def test_a_mount_point_is_above_the_directory(scheme: str, mount: str) -> None:
    with pytest.raises(ConfigurationError, match=r"'mount' .* no absolute path that /mnt/store/run lies under"):
        make_driver(f"{scheme}:///mnt/store/run?mount={mount}")


def test_a_job_goes_on_from_memory_while_its_store_is_not_mounted(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """And the store gets what it lacks once it is mounted. Without memory nothing is taken for a new job."""
    store = tmp_path / "store"
    url, tiers = f"nvme://{store}/run?survives=rack&mount={store}", Hierarchy.of
    first = memory()
    machine.mount(store, "nfs4")
    training = Training()
    with life(training.attach(tiers(first, url), base_every=4)):
        for version in range(1, 7):
            training.step(version)
    (mounted,), machine.mounts = machine.mounts, []
    (store / "run").rename(tmp_path / "away")

    training.checkpointer = None
    checkpointer = training.attach(tiers(first, url), base_every=4, deadline_s=8.0)
    assert checkpointer.version == 6
    assert "nothing is mounted at" in caplog.text
    assert list(store.iterdir()) == []
    machine.mounts = [mounted]
    (tmp_path / "away").rename(store / "run")
    with life(checkpointer):
        training.step(7)

    machine.mounts = []
    (store / "run").rename(tmp_path / "away")
    caplog.set_level(logging.ERROR)
    with pytest.raises(RecoveryError, match="nothing is mounted at"):
        Training().attach(tiers(memory(), url), deadline_s=1.0)
    machine.mounts = [mounted]
    (tmp_path / "away").rename(store / "run")
    after = Training()
    after.attach(tiers(memory(), url)).abort()
    assert after.parameters() == training.states[7]


@pytest.mark.parametrize("scheme", ["nvme", "lustre"])
async def test_a_directory_that_was_missing_is_told(tmp_path: Path, scheme: str) -> None:
    """So that whoever asks the doctor sees that a path is misspelt."""
    url = f"{scheme}://{tmp_path}/stroe/run?survives=node"
    async with make_driver(url) as driver:
        told = f"was missing: made when the tier was opened, with those above it from {tmp_path}/stroe on"
        assert driver.facts()["directory"] == told
    async with make_driver(url) as driver:
        assert "directory" not in driver.facts()


@pytest.mark.parametrize("scheme", ["nvme", "lustre"])
def test_to_name_a_tier_asks_no_file_system(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server may be gone, and whoever asks would never be answered."""

    for name in ("lstat", "stat", "readlink", "open", "scandir", "statvfs"):
        monkeypatch.setattr(f"os.{name}", partial(hangs, getattr(os, name)))
    driver = make_driver(f"{scheme}:///mnt/away/run?survives=rack")
    assert driver.url == f"{scheme}:///mnt/away/run"


def hangs(call: Callable[..., Any], path: Any, *rest: Any, **options: Any) -> Any:
    assert not str(path).startswith("/mnt/away"), "would hang"
    return call(path, *rest, **options)


def test_mount_points_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is bytes: some are no text, and in others a character looks like the end of a line or of a word."""
    line = b"36 35 98:0 / %b rw,noatime shared:1 - ext4 /dev/root rw\n"
    names = [b"/mnt/\xff", "/mnt/a\x85b".encode(), "/mnt/a\u2028b".encode(), "/mnt/a\u00a0b".encode(), b"/mnt/a\\040b"]
    table = b"".join(line % name for name in [b"/", *names])
    monkeypatch.setattr(Path, "read_bytes", lambda _: table)
    for name in names:
        path = Path(os.fsdecode(name.replace(b"\\040", b" ")))
        assert mounts.mount_by_name(path / "run").point == path


@pytest.mark.parametrize("scheme", ["nvme", "lustre"])
async def test_the_root_of_a_file_system_has_a_directory_of_its_owner_s(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``lost+found``. Any other that cannot be read may hold objects."""
    (tmp_path / "lost+found").mkdir(mode=0o700)
    closed = {"lost+found"}
    real = Beneath.listed

    def listed(self: Beneath, path: str) -> Any:
        if path in closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(self, path)

    monkeypatch.setattr(Beneath, "listed", listed)
    async with make_driver(f"{scheme}://{tmp_path}") as driver:
        await driver.put("r0/a", [b"x"])
        assert [each.key async for each in driver.list()] == ["r0/a"]
        assert (await driver.usage()).used_bytes == 1
        closed.add("r0")
        with pytest.raises(Unauthorized):
            assert [each async for each in driver.list()]

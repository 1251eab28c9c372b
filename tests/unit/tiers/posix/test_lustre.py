"""What only the lustre tier does: layouts, locks that may be missing, files beside their targets, debris."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.failing_disk import failing_directory_fsyncs
from tiercheck.errors import (
    AlreadyExists,
    ConfigurationError,
    TierError,
    Transient,
    Unsupported,
)
from tiercheck.tiers.posix import lustre, striping
from tiercheck.tiers.posix.beneath import Beneath, status_of
from tiercheck.tiers.posix.directories import remembering
from tiercheck.tiers.posix.directories.object_files import CONTROL, Temporary
from tiercheck.tiers.posix.directories.remembering import RememberingDirectory
from tiercheck.tiers.posix.directories.shared import SharedDirectory, parse_temporary_name, temporary_name
from tiercheck.tiers.posix.files import try_lock
from tiercheck.tiers.posix.lustre import LustreDriver
from tiercheck.tiers.posix.mounts import Mount, Traits, mount_of, parse_mounts, traits_of
from tiercheck.tiers.posix.striping import ALL, parse_stripe_count, parse_stripe_size, stripes_for
from tiercheck.tiers.registry import make_driver
from tiercheck.types import ObjectInfo, PutMode, Survives

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "scratch" / "run"


def hidden(root: Path) -> list[Path]:
    """The files being written, and those left behind."""
    return [path for path in root.rglob("*") if "\\" in path.name]


class StandIn:
    """An ``lfs`` that records its arguments, and does what ``LFS_DOES`` says."""

    SCRIPT = """#!/bin/sh
    printf '%s\\n' "$*" >> "$LFS_LOG"
    for last; do :; done
    case "${LFS_DOES:-work}" in
      work) test -d "$last" || (set -C; : > "$last") ;;
      refuse) echo "something about $last" >&2; echo "Inappropriate ioctl for device" >&2; exit 25 ;;
      refuse-files) : > "$last"; echo "no space on OSTs" >&2; exit 28 ;;
      lie) : ;;
      hang) exec sleep 60 ;;
    esac
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self.log = folder / "log"
        self.program = folder / "lfs"
        self.program.write_text(self.SCRIPT)
        self.program.chmod(0o755)
        monkeypatch.setenv("LFS_LOG", str(self.log))
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        self._monkeypatch = monkeypatch

    def does(self, what: str) -> None:
        self._monkeypatch.setenv("LFS_DOES", what)

    def calls(self) -> list[list[str]]:
        """The calls since the last time, each as its arguments."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.write_text("")
        return [line.split() for line in lines]


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path / "bin", monkeypatch)


class TestStriping:
    def test_a_few_stripes_for_many_writers_and_all_for_the_very_large(self) -> None:
        sizes = {
            0: 1,
            1: 1,
            256 * MIB: 1,
            257 * MIB: 2,
            1 << 30: 2,
            3 << 30: 4,
            10 << 30: 8,
            64 << 30: 16,
            65 << 30: ALL,
        }
        assert {nbytes: stripes_for(nbytes) for nbytes in sizes} == sizes

    def test_options(self) -> None:
        assert [parse_stripe_count(text) for text in ("1", "2000", "all", "-1")] == [1, 2000, ALL, ALL]
        assert parse_stripe_size("4MiB") == 4 * MIB
        for option in ("stripe_count=0", "stripe_count=x", "stripe_count=2001", "stripe_size=1000", "stripe_size=4GiB"):
            with pytest.raises(ConfigurationError, match=option.split("=")[0]):
                make_driver(f"lustre:///scratch?{option}")

    async def test_the_directory_gets_a_default_once(self, root: Path, lfs: StandIn) -> None:
        async with make_driver(f"lustre://{root}") as driver:
            assert driver.facts()["striping"] == "stripes by size of 4 MiB"
            trial, default = lfs.calls()
            assert trial[:5] == ["setstripe", "--stripe-count", "1", "--stripe-size", str(4 * MIB)]
            assert default == [*trial[:5], str(root)]
            await driver.put("g/base/1/shard", [b"small"])
            assert lfs.calls() == [], "the default is what a small object needs"
        async with make_driver(f"lustre://{root}"):
            assert [call[-1] for call in lfs.calls()] != [str(root)], "it has it already"
        assert hidden(root) == []

    async def test_a_large_object_gets_its_layout_before_its_data(
        self, root: Path, lfs: StandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(striping, "_STEPS", ((1000, 1), (2000, 2)))
        async with make_driver(f"lustre://{root}?stripe_size=1MiB") as driver:
            lfs.calls()
            for nbytes, stripes in ((1000, None), (1001, "2"), (2001, "-1")):
                await driver.put("v/shard", [b"x" * nbytes])
                calls = lfs.calls()
                assert (root / "v" / "shard").read_bytes() == b"x" * nbytes
                assert stat.S_IMODE((root / "v" / "shard").stat().st_mode) == 0o600
                if stripes is None:
                    assert calls == []
                else:
                    (call,) = calls
                    assert call[:5] == ["setstripe", "--stripe-count", stripes, "--stripe-size", str(MIB)]
                    path = Path(call[5])
                    assert path.parent == root / "v", "beside its target"
                    assert "\\" in path.name
            assert hidden(root) == []

    async def test_a_count_of_the_users_is_the_default_for_all(self, root: Path, lfs: StandIn) -> None:
        async with make_driver(f"lustre://{root}?stripe_count=8") as driver:
            assert driver.facts()["striping"] == "8 stripes of 4 MiB"
            assert [call[2] for call in lfs.calls()] == ["8", "8"]
            await driver.put("a", [b"x"])
            assert lfs.calls() == []
        async with make_driver(f"lustre://{root}?stripe_count=4"):
            assert [call[2] for call in lfs.calls()] == ["4", "4"], "another wish, another default"

    @pytest.mark.parametrize(
        ("does", "says"),
        [
            ("refuse", "failed with 25: Inappropriate ioctl"),
            ("lie", "reported success, but made no file"),
        ],
    )
    async def test_where_lfs_does_not_work(self, root: Path, lfs: StandIn, does: str, says: str) -> None:
        lfs.does(does)
        async with make_driver(f"lustre://{root}") as driver:
            assert says in driver.facts()["striping"]
            await driver.put("a", [b"x"])
        with pytest.raises(Unsupported, match="stripe_count and stripe_size cannot be had here"):
            await make_driver(f"lustre://{root}?stripe_count=2").open()
        assert hidden(root) == []

    async def test_an_lfs_that_hangs_is_given_up(
        self, root: Path, lfs: StandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(striping, "COMMAND_S_MAX", 0.1)
        lfs.does("hang")
        async with make_driver(f"lustre://{root}") as driver:
            assert "did not end within" in driver.facts()["striping"]

    async def test_without_lfs(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        async with make_driver(f"lustre://{root}") as driver:
            assert driver.facts()["striping"] == "none (lfs is not installed)"
        with pytest.raises(Unsupported, match="lfs is not installed"):
            await make_driver(f"lustre://{root}?stripe_size=1MiB").open()

    async def test_an_object_is_put_even_where_its_layout_fails(
        self, root: Path, lfs: StandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(striping, "_STEPS", ((10, 1),))
        async with make_driver(f"lustre://{root}") as driver:
            lfs.does("refuse-files")
            await driver.put("v/a", [b"x" * 100])
            assert bytes(await driver.get("v/a")) == b"x" * 100
            assert "lfs failed for 1 of the objects put" in driver.facts()["striping"]
        assert hidden(root) == []


class TestMounts:
    TABLE = (
        "21 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw,errors=remount-ro\n"
        "30 21 0:44 / /mnt/my\\040scratch rw - lustre 10.0.0.1@tcp:/fs rw,flock,lazystatfs\n"
        "31 21 0:45 / /mnt/plain rw - lustre 10.0.0.1@tcp:/fs rw,lazystatfs\n"
        "32 21 0:46 / /mnt/nfs rw,relatime - nfs4 srv:/x rw,vers=4.2,local_lock=none\n"
        "33 21 0:47 / /mnt/g rw - fuse.glusterfs h:/v rw,allow_other\n"
    )

    def test_the_table_is_read(self) -> None:
        mounts = {str(mount.point): mount for mount in parse_mounts(self.TABLE)}
        assert mounts["/mnt/my scratch"].type == "lustre"
        assert {"flock", "rw"} <= mounts["/mnt/my scratch"].options

    def test_what_mounts_promise(self) -> None:
        mounts = {str(mount.point): traits_of(mount) for mount in parse_mounts(self.TABLE)}
        assert mounts["/mnt/my scratch"].locks
        assert not mounts["/mnt/plain"].locks
        assert mounts["/mnt/plain"].coherent
        assert mounts["/mnt/nfs"].locks
        assert not mounts["/mnt/nfs"].coherent
        assert not mounts["/mnt/g"].coherent
        assert mounts["/mnt/g"].inodes_unique
        for kind, option in (("lustre", "localflock"), ("nfs", "local_lock=all"), ("nfs", "nolock")):
            assert not traits_of(Mount(Path("/"), kind, frozenset({option}))).locks

    def test_this_machine(self, tmp_path: Path) -> None:
        assert mount_of(Path("/proc/self/fd")).type == "proc"
        assert mount_of(tmp_path / "not" / "made" / "yet") == mount_of(tmp_path)


def test_urls() -> None:
    assert make_driver("lustre:///scratch/a").capabilities.survives is Survives.RACK
    assert make_driver("lustre:///scratch/a?survives=site").capabilities.survives is Survives.SITE
    with pytest.raises(ConfigurationError, match="absolute"):
        make_driver("lustre://scratch/a")


@pytest.fixture
def recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls that change or flush something, in order."""
    events: list[str] = []

    def record(module: object, name: str, say: str) -> None:
        real = getattr(module, name)

        def call(*arguments: object, **options: object) -> object:
            events.append(say + described(arguments[0]) if isinstance(arguments[0], int) else say)
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    def described(fd: object) -> str:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        return " file" if path.is_file() else f" {os.path.relpath(path, root.parent)}"

    record(os, "fsync", "fsync")
    record(os, "rename", "rename")
    record(os, "link", "link")
    record(os, "mkdir", "mkdir")
    yield events


async def test_few_calls_on_metadata(root: Path, recorded: list[str]) -> None:
    """Directories are flushed upwards once, where their inodes tell them apart."""
    async with LustreDriver(root) as driver:
        driver.shared.traits = type(driver.shared.traits)(coherent=True, locks=True, inodes_unique=True)

        async def calls(name: str) -> list[str]:
            recorded.clear()
            await driver.put(name, [b"x"])
            return recorded.copy()

        assert await calls("g/v/r0") == [
            *["mkdir"] * 2,
            "fsync file",
            "link",
            *["fsync run/g/v", "fsync run/g", "fsync run"],
        ]
        assert await calls("g/v/r1") == ["fsync file", "link", "fsync run/g/v"]
        assert await calls("g/w/r0") == ["mkdir", "fsync file", "link", "fsync run/g/w", "fsync run/g"]
        assert await calls("g/w/r0") == ["fsync file", "link", "rename", "fsync run/g/w"]


async def test_new_names_wait_for_nobody_and_listings_for_no_listing(root: Path) -> None:
    """The many ranks of a job put objects of their own names, and list, all the time."""
    async with LustreDriver(root) as driver, LustreDriver(root) as other:
        await driver.put("a", [b"old"])
        with other.shared.locked():
            await driver.put("b", [b"x"])
            await driver.put("c", [b"x"], mode=PutMode.CREATE)
        with other.shared.locked(shared=True):
            assert [info.key for info in await listed(driver)] == ["a", "b", "c"]
            await driver.delete(["c"])
            replacing = asyncio.create_task(driver.put("a", [b"new"]))
            assert not (await asyncio.wait([replacing], timeout=0.2))[0]
            assert bytes(await driver.get("a")) == b"old"
        await replacing
        assert [info.key for info in await listed(driver)] == ["a", "b"]
        assert bytes(await driver.get("a")) == b"new"
        assert hidden(root) == []


async def test_without_locks_puts_know_no_conditions(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)
    async with LustreDriver(root) as driver:
        assert not driver.capabilities.conditional_put
        assert driver.facts()["locks"].startswith("none")
        with pytest.raises(Unsupported, match="-o flock"):
            await driver.put("a", [b"x"], mode=PutMode.CREATE)
        await driver.put("a/b", [b"x"])
        assert bytes(await driver.get("a/b")) == b"x"
        await driver.delete(["a/b"])
        assert not (root / "a").exists()


async def test_locks_of_this_node_alone_are_no_condition(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mount(root, "lustre", frozenset({"localflock"}))
    monkeypatch.setattr(lustre, "mount_of", lambda path: mount)
    async with LustreDriver(root) as driver:
        assert not driver.capabilities.conditional_put


class TestDebris:
    def leave(self, root: Path, host: str, age_s: float, *, locked: bool = False) -> Path:
        path = root / "g" / temporary_name(host, time.time() - age_s)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
        return path

    async def test_the_files_of_the_dead_go(self, root: Path) -> None:
        async with LustreDriver(root) as driver:
            await driver.put("g/a", [b"x"])
        dead, young = self.leave(root, "elsewhere", 3600), self.leave(root, "elsewhere", 5)
        living = self.leave(root, "elsewhere", 25 * 3600)
        self.a_minute_passes(root)
        with living.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            async with LustreDriver(root) as driver:
                assert [info.key async for info in driver.list()] == ["g/a"]
                assert (await driver.usage()).used_bytes == 1 + 2 * 4
                assert not dead.exists()
                assert young.exists(), "its writer may be about to lock it"
                assert living.exists()
        async with LustreDriver(root):
            assert living.exists(), "somebody has just looked"
        self.a_minute_passes(root)
        async with LustreDriver(root):
            assert not living.exists()

    async def test_who_asks_for_it_looks_whoever_has_looked(self, root: Path) -> None:
        dead = self.leave(root, "elsewhere", 3600)
        async with LustreDriver(root) as driver:
            assert not dead.exists()
            dead = self.leave(root, "elsewhere", 3600)
            await driver.reclaim()
            assert not dead.exists()

    async def test_who_was_killed_while_it_looked_has_not_looked(self, root: Path) -> None:
        async with LustreDriver(root):
            pass
        self.a_minute_passes(root)
        dead = self.leave(root, "elsewhere", 3600)
        dies = mock.patch.object(SharedDirectory, "_remove_unlocked", side_effect=KeyboardInterrupt)
        with dies, pytest.raises(KeyboardInterrupt):
            SharedDirectory(root, Traits(True, True, True)).prepare()
        async with LustreDriver(root):
            assert not dead.exists()

    async def test_without_a_file_to_take_turns_by_everybody_looks(self, root: Path) -> None:
        """A disk without inodes, and a tier of an older release."""
        async with LustreDriver(root):
            pass
        (root / ".tiercheck" / "reclaimed").unlink()
        dead = self.leave(root, "elsewhere", 3600)
        real = Beneath.open

        def full(self: Beneath, path: str, *given: Any, **options: Any) -> int:
            if path == ".tiercheck/reclaimed":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(self, path, *given, **options)

        with mock.patch.object(Beneath, "open", full):
            async with LustreDriver(root):
                assert not dead.exists()

    def a_minute_passes(self, root: Path) -> None:
        os.utime(root / ".tiercheck" / "reclaimed", (0, 0))

    @pytest.mark.parametrize("kind", [SharedDirectory, RememberingDirectory])
    async def test_one_of_all_who_open_the_tier_looks_for_them(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, kind: type[SharedDirectory]
    ) -> None:
        """The ranks of a job open it at the same time, and each has directories of its own there."""
        monkeypatch.setattr(lustre, "directory_on", lambda _, root: kind(root, Traits(True, True, True)))
        async with LustreDriver(root) as driver:
            for rank in range(5):
                await driver.put(f"r{rank}/g/a", [b"x"])
        self.a_minute_passes(root)
        listed: list[str] = []
        real = Beneath.listed
        monkeypatch.setattr(Beneath, "listed", lambda self, path: listed.append(path) or real(self, path))
        drivers = [LustreDriver(root) for _ in range(4)]
        await asyncio.gather(*(each.open() for each in drivers))
        for each in drivers:
            await each.close()
        objects = sorted(path for path in listed if not path.startswith(CONTROL))
        once = sorted(["", *(f"r{rank}{folder}" for rank in range(5) for folder in ("", "/g"))])
        assert objects == (once if kind is SharedDirectory else [])

    async def test_where_there_are_no_locks_a_day_passes(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr("fcntl.flock", refuse)
        recent, old = self.leave(root, "elsewhere", 3600), self.leave(root, "elsewhere", 25 * 3600)
        async with LustreDriver(root):
            assert recent.exists()
            assert not old.exists()

    def test_names(self) -> None:
        assert parse_temporary_name(temporary_name("host", 1234.5)) == ("host", 1234.0)
        host, made_s = parse_temporary_name(".tiercheck\\strange")
        assert (host, round(made_s - time.time())) == ("", 0)

    async def test_one_that_could_not_be_removed_goes_with_the_next_put(self, root: Path) -> None:
        async with LustreDriver(root) as driver:
            unlink, away = os.unlink, [True]

            def refused(path: str, *, dir_fd: int | None = None) -> None:
                if away[0]:
                    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
                unlink(path, dir_fd=dir_fd)

            with mock.patch.object(os, "unlink", refused):
                with (
                    mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))),
                    pytest.raises(Transient),
                ):
                    await driver.put("a", [b"x"])
                assert len(hidden(root)) == 1
                assert [info.key async for info in driver.list()] == []
                away[0] = False
                await driver.put("b", [b"y"])
            assert hidden(root) == []


async def test_a_creation_whose_answer_was_lost_is_ours(root: Path) -> None:
    """The client's kernel asks again, and is told that the name exists: by its own link."""
    link = SharedDirectory.link

    def twice(directory: SharedDirectory, temporary: Temporary, folder: int, name: str) -> None:
        link(directory, temporary, folder, name)
        link(directory, temporary, folder, name)

    async with LustreDriver(root) as driver:
        with mock.patch.object(SharedDirectory, "link", twice):
            info = await driver.put("a", [b"mine"], mode=PutMode.CREATE)
            assert await driver.stat("a") == info
            with pytest.raises(AlreadyExists):
                await driver.put("a", [b"other"], mode=PutMode.CREATE)
        assert hidden(root) == []


async def test_a_file_that_was_taken_away_is_worth_another_try(root: Path) -> None:
    async with LustreDriver(root) as driver:
        await driver.put("v/old", [b"x"])
        fsync = os.fsync

        def swept(fd: int) -> None:
            for path in hidden(root):
                path.unlink()
            fsync(fd)

        for mode in (PutMode.OVERWRITE, PutMode.CREATE):
            with mock.patch.object(os, "fsync", swept), pytest.raises(Transient, match="taken away"):
                await driver.put("v/a", [b"x"], mode=mode)
        await driver.put("v/a", [b"x"])


async def test_an_object_that_is_replaced_while_it_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LustreDriver(root) as driver:
        await driver.put("a", [b"content"])
        preadv, stale = os.preadv, [3]

        def replaced(fd: int, parts: list[memoryview], offset: int) -> int:
            stale[0] -= 1
            if stale[0] >= 0:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return preadv(fd, parts, offset)

        with mock.patch.object(os, "preadv", replaced):
            assert bytes(await driver.get("a")) == b"content"
            stale[0] = 10**9
            monkeypatch.setattr(lustre, "REPLACED_S_MAX", 0.01)
            with pytest.raises(Transient, match="replaced faster"):
                await driver.get("a", into=memoryview(bytearray(7)))


async def test_what_closing_says_of_a_file_that_was_read_costs_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GlusterFS may say at each close that the file is gone, of one that two clients have put at the same time."""
    close = os.close

    def gone(fd: int) -> None:
        was_object = Path(f"/proc/self/fd/{fd}").readlink() == root / "v" / "a"
        close(fd)
        if was_object:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    async with LustreDriver(root) as driver:
        await driver.put("v/a", [b"content"])
        monkeypatch.setattr(os, "close", gone)
        into = memoryview(bytearray(7))
        assert await driver.get("v/a") == b"content"
        assert await driver.get("v/a", into=into) == b"content"


async def test_objects_are_copies_and_no_mappings(root: Path) -> None:
    async with LustreDriver(root) as driver:
        await driver.put("a", [b"x" * (3 * MIB)])
        found = await driver.get("a")
        os.truncate(root / "a", 0)  # a mapping would kill us
        assert bytes(found) == b"x" * (3 * MIB)


async def test_a_tier_whose_directory_goes_away(root: Path) -> None:
    import shutil

    async with LustreDriver(root) as driver:
        await driver.put("a", [b"x"])
        shutil.rmtree(root)
        with pytest.raises(TierError, match="removed while the tier was open"):
            await driver.get("a")
        with pytest.raises(TierError, match="removed while the tier was open"):
            await driver.put("a/b", [b"x"])


async def test_somebody_elses_files_are_left_alone(root: Path) -> None:
    async with LustreDriver(root) as driver:
        await driver.put("a", [b"x"])
        (root / "link").symlink_to("a")
        os.mkfifo(root / "pipe")
        assert [info.key async for info in driver.list()] == ["a"]
        for key in ("link", "pipe"):
            for mode in (PutMode.OVERWRITE, PutMode.CREATE):
                with pytest.raises(Unsupported):
                    await driver.put(key, [b"x"], mode=mode)
            await driver.delete([key])
        assert {"link", "pipe"} <= {path.name for path in root.iterdir()}
        assert hidden(root) == []


class TestMountsThatRemember:
    """A mount whose lookups are old for a while; listings are not."""

    @pytest.fixture(autouse=True)
    def remembers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lustre, "traits_of", lambda mount: Traits(False, True, True))
        monkeypatch.setattr(remembering, "STALE_PAUSE_S", 0.0001)

    @pytest.mark.parametrize("old_answers", [0, 1, 2, 7])
    async def test_an_old_answer_is_not_taken(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, old_answers: int
    ) -> None:
        async with LustreDriver(root) as driver:
            await driver.put("v/a", [b"old"])
            left = [0]
            old = (root / "v" / "a").lstat()

            def remembered(folder: int, name: str) -> os.stat_result:
                if name == "a" and left[0] > 0:
                    left[0] -= 1
                    return old
                return status_of(folder, name)

            info = await driver.put("v/a", [b"newer"])
            monkeypatch.setattr(remembering, "status_of", remembered)
            for call in (lambda: driver.stat("v/a"), lambda: listed(driver), lambda: driver.get("v/a")):
                left[0] = old_answers
                found = await call()
                assert found in (info, [info], b"newer")
                assert left == [0]

    async def test_one_that_never_forgets_is_told_apart_from_an_answer(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remembering, "STALE_S_MAX", 0.01)
        async with LustreDriver(root) as driver:
            await driver.put("a", [b"old"])
            old = (root / "a").lstat()
            await driver.put("a", [b"newer"])
            monkeypatch.setattr(
                remembering,
                "status_of",
                lambda folder, name: old if name == "a" else status_of(folder, name),
            )
            for call in (lambda: driver.stat("a"), lambda: listed(driver), lambda: driver.get("a")):
                with pytest.raises(Transient, match="has shown an old"):
                    await call()

    async def test_a_name_that_is_gone_hides_no_other(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A listing that was read ahead may show what has been deleted since."""
        async with LustreDriver(root) as driver:
            for key in ("v/a", "v/b", "v/c"):
                await driver.put(key, [b"x"])
            scandir, gone = os.scandir, root / "v" / "b"

            @contextlib.contextmanager
            def read_ahead(fd: int) -> Iterator[Iterator[os.DirEntry[str]]]:
                with scandir(fd) as found:
                    entries = list(found)
                if any(entry.name == "b" for entry in entries):
                    gone.unlink()
                yield iter(entries)

            monkeypatch.setattr(os, "scandir", read_ahead)
            assert [info.key for info in await listed(driver)] == ["v/a", "v/c"]

    async def test_a_directory_is_opened_when_no_name_changes(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is read ahead when it is opened would be old by the time the lock is had; and a server may take what it
        has read for what there is, until the name changes again."""
        async with LustreDriver(root) as driver:
            await driver.put("v/a", [b"x"])
            held: list[bool] = []
            open_listed = Beneath.listed

            def opened(beneath: Beneath, path: str) -> contextlib.AbstractContextManager[int]:
                other = os.open(root / CONTROL / "lock", os.O_RDWR)
                try:
                    held.append(not try_lock(other))
                finally:
                    os.close(other)
                return open_listed(beneath, path)

            monkeypatch.setattr(Beneath, "listed", opened)
            assert [info.key for info in await listed(driver)] == ["v/a"]
            assert held == [True, True]
            for call in (
                lambda: driver.put("v/a", [b"y"]),
                lambda: driver.put("v/b", [b"y"], mode=PutMode.CREATE),
                lambda: driver.stat("v/b"),
                lambda: driver.get("v/b"),
                lambda: driver.delete(["v/b"]),
                driver.leftovers,
                driver.usage,
            ):
                held.clear()
                await call()
                assert all(held)

    async def test_a_file_being_written_is_never_looked_at(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A mount that saw it half written would remember its size for a while after it is an object."""
        async with LustreDriver(root) as first, LustreDriver(root) as second:
            await first.put("b", [b"x"])
            fsync = os.fsync

            def look_everywhere(fd: int) -> None:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    fsync(fd)  # of a directory: the object has its name
                    return
                with mock.patch.object(remembering, "status_of", side_effect=status_of) as looked:
                    assert [info.key for info in second.directory.scan()] == ["b"]
                    second.directory.held_bytes()
                    second.directory.reclaim()
                    seen.extend(str(call.args[1]) for call in looked.mock_calls)
                fsync(fd)

            seen: list[str] = []
            with mock.patch.object(os, "fsync", look_everywhere):
                await first.put("a", [b"x"])
            assert seen
            assert not [path for path in seen if "\\" in path]


async def listed(driver: LustreDriver) -> list[ObjectInfo]:
    return [info async for info in driver.list()]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
async def test_what_fails_after_publishing_does_not_say_that_nothing_was_published(root: Path, number: int) -> None:
    async with LustreDriver(root) as driver:
        await driver.put("a/b", [b"old"])
        with (
            failing_directory_fsyncs(number),
            pytest.raises(Transient, match="the object is published, but may not outlive"),
        ):
            await driver.put("a/b", [b"new"])
        assert bytes(await driver.get("a/b")) == b"new"
        assert hidden(root) == []

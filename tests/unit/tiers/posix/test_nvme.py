"""What only the nvme tier does: durability, the file system's errors, debris, somebody else's files."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.failing_disk import failing_directory_fsyncs
from tiercheck.errors import (
    AlreadyExists,
    CapacityExceeded,
    ConfigurationError,
    Corruption,
    FileSystemFull,
    NotFound,
    TierError,
    Transient,
    Unauthorized,
    Unsupported,
)
from tiercheck.tiers.posix import files
from tiercheck.tiers.posix.directories import local
from tiercheck.tiers.posix.files import unlock
from tiercheck.tiers.posix.mounts import Mount
from tiercheck.tiers.posix.nvme import NvmeDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.types import PutMode, Survives


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "parent" / "tier"


def temporaries(root: Path) -> list[Path]:
    return list((root / ".tiercheck" / "tmp").iterdir())


def test_urls() -> None:
    assert make_driver("nvme:///mnt/a").capabilities.survives is Survives.PROCESS
    assert make_driver("nvme:///mnt/a?survives=rack").capabilities.survives is Survives.RACK
    assert make_driver("nvme:///mnt/a%20b").url == "nvme:///mnt/a%20b"
    with pytest.raises(ConfigurationError, match="absolute"):
        make_driver("nvme://mnt/a")
    with pytest.raises(ConfigurationError, match="unknown failure class"):
        make_driver("nvme:///mnt/a?survives=everything")


async def test_everything_is_flushed_before_a_put_returns(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file before its name, then each directory up to the tier's own, or above it where that is new."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def seen(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        events.append(f"fsync {'file' if stat.S_ISREG(os.fstat(fd).st_mode) else path.relative_to(root.parent.parent)}")
        fsync(fd)

    def renamed(path: str, target: str, **folders: int) -> None:
        events.append("rename")
        rename(path, target, **folders)

    monkeypatch.setattr(os, "fsync", seen)
    monkeypatch.setattr(os, "rename", renamed)
    async with NvmeDriver(root) as driver:
        assert events[-1] == "fsync ."
        assert "fsync parent" in events
        events.clear()
        await driver.put("a/b/c", [b"x"])
        assert events == [
            "fsync file",
            "rename",
            "fsync parent/tier/a/b",
            "fsync parent/tier/a",
            "fsync parent/tier",
        ]
        events.clear()
        await driver.delete(["a/b/c"])
        assert events == ["fsync parent/tier"]


async def test_directories_and_files_are_private(root: Path) -> None:
    async with NvmeDriver(root) as driver:
        await driver.put("a/b", [b"x"])
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


ERRORS = {
    errno.ENOSPC: FileSystemFull,
    errno.EDQUOT: FileSystemFull,
    errno.EIO: Transient,
    errno.EROFS: Unauthorized,
    errno.EACCES: Unauthorized,
    errno.ENOLCK: Unsupported,
    errno.E2BIG: TierError,
}


@pytest.mark.parametrize("failing", ["writev", "fsync", "utime"])
async def test_a_failing_call_leaves_nothing_behind(root: Path, failing: str) -> None:
    async with NvmeDriver(root) as driver:
        await driver.put("a", [b"old"])
        modes = (PutMode.OVERWRITE, PutMode.UPDATE((await driver.stat("a")).etag))
        for (number, error), mode in itertools.product(ERRORS.items(), modes):
            with (
                mock.patch.object(os, failing, side_effect=OSError(number, os.strerror(number))),
                pytest.raises(TierError) as caught,
            ):
                await driver.put("a", [b"new"], mode=mode)
            assert type(caught.value) is error, (errno.errorcode[number], mode)
            assert (caught.value.tier, caught.value.key) == (driver.url, "a")
            assert os.strerror(number) in str(caught.value)
            assert (root / "a").read_bytes() == b"old"
            assert temporaries(root) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
async def test_what_fails_after_publishing_does_not_say_that_nothing_was_published(root: Path, number: int) -> None:
    async with NvmeDriver(root) as driver:
        await driver.put("a/b", [b"old"])
        with (
            failing_directory_fsyncs(number),
            pytest.raises(Transient, match="the object is published, but may not outlive") as caught,
        ):
            await driver.put("a/b", [b"new"])
        assert (caught.value.tier, caught.value.key) == (driver.url, "a/b")
        assert os.strerror(number) in str(caught.value)
        assert bytes(await driver.get("a/b")) == b"new"
        assert temporaries(root) == []


async def test_a_disk_that_becomes_read_only_once_it_has_published(root: Path) -> None:
    """Such a file system refuses to unlink also what is not there."""
    unlink = os.unlink

    def refused(path: str, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None and Path(f"/proc/self/fd/{dir_fd}").readlink().name == "tmp":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path, dir_fd=dir_fd)

    async with NvmeDriver(root) as driver:
        with mock.patch.object(os, "unlink", refused):
            assert (await driver.put("a", [b"new"])).nbytes == 3


async def test_a_put_whose_object_is_deleted_at_once_was_stored(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other client has removed the directory, which the put is about to make durable, with its last object."""
    async with NvmeDriver(root) as driver, NvmeDriver(root) as other:
        sync = driver.directory.beneath.sync_upwards

        def deleted_first(path: str) -> None:
            other.directory.remove("a/b/c")
            assert not (root / path).exists()
            sync(path)

        monkeypatch.setattr(driver.directory.beneath, "sync_upwards", deleted_first)
        assert (await driver.put("a/b/c", [b"xy"])).nbytes == 2
        with pytest.raises(NotFound):
            await driver.stat("a/b/c")


async def test_short_writes_are_continued(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, preadv = os.writev, os.preadv
    async with NvmeDriver(root) as driver:
        monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [bytes(parts[0])[:3]]))
        monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: preadv(fd, [parts[0][:2]], offset))
        await driver.put("a", [b"01234", b"", b"5", b"678901234567"])
        into = memoryview(bytearray(18))
        assert bytes(await driver.get("a", into=into)) == b"012345678901234567"


async def test_a_file_that_somebody_cut_is_corrupt(root: Path) -> None:
    async with NvmeDriver(root) as driver:
        await driver.put("a", [b"0123456789"])
        preadv = os.preadv

        def cut(fd: int, parts: list[memoryview], offset: int) -> int:
            os.truncate(root / "a", 4)
            return preadv(fd, parts, offset)

        with mock.patch.object(os, "preadv", cut), pytest.raises(Corruption, match="ends at byte 4"):
            await driver.get("a", into=memoryview(bytearray(10)))


async def test_nothing_is_mapped_that_a_failing_disk_could_take_away(root: Path) -> None:
    """To touch a page that cannot be read kills the process, and each one after it that recovers."""
    async with NvmeDriver(root) as driver:
        await driver.put("a", [b"a" * (1 << 20)])
        content = await driver.get("a")
        assert str(root) not in Path("/proc/self/maps").read_text()
        os.truncate(root / "a", 0)
        assert bytes(content) == b"a" * (1 << 20)


async def test_what_was_read_is_the_callers_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the thread that read it is to go on: a mapping that is left keeps the file's room on the disk."""
    may_go_on, given = threading.Event(), Future.set_result

    def set_result(future: Future[Any], result: Any) -> None:
        given(future, result)
        may_go_on.wait(20)

    async with NvmeDriver(root) as driver:
        await driver.put("a", [b"a" * (1 << 20)])
        monkeypatch.setattr(Future, "set_result", set_result)
        try:
            content = await driver.get("a")
            mapping = weakref.ref(content.obj)
            del content
            assert mapping() is None
        finally:
            may_go_on.set()


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", where], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


async def test_a_disk_that_fills_up(small_mount: Path) -> None:
    async with NvmeDriver(small_mount) as driver:
        await driver.put("a", [b"a" * (1 << 20)])
        for attempt in range(3):
            with pytest.raises(CapacityExceeded, match="full"):
                await driver.put("a", [b"b" * (1 << 19)] * 3)
            assert bytes(await driver.get("a")) == b"a" * (1 << 20), attempt
            assert temporaries(small_mount) == []
        await driver.delete(["a"])
        await driver.put("a", [b"b" * (1 << 19)] * 3)


def make_read_only(mount: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", mount], check=True)


async def test_a_disk_that_becomes_read_only(small_mount: Path) -> None:
    async with NvmeDriver(small_mount) as driver:
        await driver.put("a", [b"x"])
        make_read_only(small_mount)
        with pytest.raises(Unauthorized, match="read-only"):
            await driver.put("a", [b"y"])
        assert bytes(await driver.get("a")) == b"x"


async def test_a_tier_whose_directory_goes_away(root: Path) -> None:
    import shutil

    async with NvmeDriver(root) as driver:
        await driver.put("a", [b"x"])
        shutil.rmtree(root)
        # Not that there is no such object: nobody knows.
        for call in (lambda: driver.get("a"), lambda: driver.stat("a"), lambda: driver.put("a", [b"x"])):
            with pytest.raises(TierError, match="removed while the tier was open") as caught:
                await call()
            assert not isinstance(caught.value, NotFound)
        with pytest.raises(TierError, match="removed while the tier was open"):
            assert [info async for info in driver.list()]


class TestDebris:
    @staticmethod
    def leave(root: Path, host: str, age_s: float) -> Path:
        path = root / ".tiercheck" / "tmp" / f"{host}-1-0123456789abcdef"
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
        return path

    async def test_the_files_of_the_dead_go(self, root: Path) -> None:
        async with NvmeDriver(root) as driver:
            ours = Path(driver.directory.temporary_path()).name.rsplit("-", 2)[0]
        dead = self.leave(root, ours, 0)
        foreign = self.leave(root, "other-host", 3600)
        foreign_old = self.leave(root, "old-host", 25 * 3600)
        async with NvmeDriver(root):
            assert not dead.exists()
            assert foreign.exists(), "its lock may not reach us: it may well be alive"
            assert not foreign_old.exists()

    @pytest.mark.parametrize("gone_before", ["open", "try_lock"])
    async def test_those_that_are_given_up_while_another_opens(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, gone_before: str
    ) -> None:
        """A writer removes its own file without the lock, so it may go at any moment of the cleaning."""
        async with NvmeDriver(root) as driver:
            given_up = []
            temporary = driver.directory.create_temporary(1, lambda: None)
            module = os if gone_before == "open" else local
            call = getattr(module, gone_before)

            def give_up_first(first: object, *arguments: object, **options: object) -> object:
                is_it = str(first) == temporary.name or (
                    isinstance(first, int) and os.fstat(first).st_ino == os.fstat(temporary.fd).st_ino
                )
                if not given_up and is_it:
                    given_up.append(temporary)
                    Path(temporary.path).unlink()
                    unlock(temporary.fd)
                return call(first, *arguments, **options)

            monkeypatch.setattr(module, gone_before, give_up_first)
            async with NvmeDriver(root):
                assert given_up == [temporary]
            driver.directory.discard(temporary)

    async def test_those_of_the_living_stay(self, root: Path) -> None:
        async with NvmeDriver(root) as driver:
            temporary = driver.directory.create_temporary(1, lambda: None)
            os.utime(temporary.path, (0, 0))
            async with NvmeDriver(root):
                assert Path(temporary.path).exists()
            driver.directory.discard(temporary)
            assert temporaries(root) == []


async def test_somebody_elses_files_are_left_alone(root: Path) -> None:
    async with NvmeDriver(root) as driver:
        await driver.put("a", [b"x"])
        (root / "odd\nname").write_text("not a key")
        (root / "link").symlink_to("a")
        os.mkfifo(root / "pipe")
        assert [info.key async for info in driver.list()] == ["a"]
        for key in ("link", "pipe"):
            with pytest.raises((NotFound, Unauthorized)):
                await driver.get(key)
            with pytest.raises(Unsupported):
                await driver.put(key, [b"x"])
            await driver.delete([key])
    assert {path.name for path in root.iterdir()} == {".tiercheck", "a", "odd\nname", "link", "pipe"}


async def test_etags_do_not_return_when_the_clock_does(root: Path) -> None:
    async with NvmeDriver(root) as driver:
        with mock.patch("time.time_ns", return_value=10**18):
            etags = [(await driver.put("a", [b"same"])).etag for _ in range(20)]
        assert len({etag.split("-")[1] for etag in etags}) == 20


async def test_etags_differ_on_a_file_system_with_coarse_times(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utime = os.utime

    def coarse(path: object, ns: tuple[int, int]) -> None:
        utime(path, ns=tuple(value // 10**9 * 10**9 for value in ns))  # type: ignore[call-overload]

    monkeypatch.setattr(os, "utime", coarse)
    async with NvmeDriver(root) as driver:
        etags = [(await driver.put("a", [b"same"])).etag for _ in range(20)]
    assert len({etag.split("-")[1] for etag in etags}) == 20


def test_a_lock_is_waited_for_until_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_WAIT_S_MAX", 0.01)
    with (
        files.locked(tmp_path / "lock"),
        pytest.raises(Transient, match=r"has held the lock .*fuser"),
        files.locked(tmp_path / "lock"),
    ):
        pass
    with files.locked(tmp_path / "lock"), pytest.raises(Transient), files.locked(tmp_path / "lock", shared=True):
        pass
    with files.locked(tmp_path / "lock", shared=True), files.locked(tmp_path / "lock", shared=True):
        pass


@pytest.mark.parametrize("cut", [0, 1, 7])
async def test_cancelling_between_two_chunks(root: Path, monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    """Whichever chunk is being written when the caller gives up, the old object stays and the buffer is free."""
    import asyncio

    monkeypatch.setattr(files, "CHUNK_BYTES", 4096)
    loop = asyncio.get_running_loop()
    writev = os.writev
    chunks = [0]
    delivered = threading.Event()

    async with NvmeDriver(root) as driver:
        await driver.put("a", [b"old"])

        def cancel_and_deliver(turns: int = 20) -> None:
            """The cancellation reaches the coroutine within a few turns of the loop."""
            if turns == 20:
                putting.cancel()
            if turns:
                loop.call_soon(cancel_and_deliver, turns - 1)
            else:
                delivered.set()

        def cancel_at_chunk(fd: int, parts: list[memoryview]) -> int:
            if chunks[0] == cut:
                loop.call_soon_threadsafe(cancel_and_deliver)
                assert delivered.wait(30)
            chunks[0] += 1
            return writev(fd, parts)

        monkeypatch.setattr(os, "writev", cancel_at_chunk)
        buffer = bytearray(b"n" * 4096 * 20)
        putting = asyncio.create_task(driver.put("a", [buffer]))
        with pytest.raises(asyncio.CancelledError):
            await putting
        written = chunks[0]
        buffer.append(0)
        assert (root / "a").read_bytes() == b"old"
        assert temporaries(root) == []
        assert written <= cut + 2, "it stops soon after"
        assert chunks[0] == written, "and for good"


class TestWithoutLocks:
    """On a mount whose flock is the node's own, as of NFS with local locks and of most FUSE file systems."""

    @pytest.fixture(autouse=True)
    def locks_exclude_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fcntl.flock", lambda fd, operation: None)

    async def test_of_two_that_create_one_object_one_wins(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The other one comes between this one's look and its name."""
        async with NvmeDriver(root) as driver, NvmeDriver(root) as elsewhere:
            check, theirs = local.check_condition, []

            def checked(mode: PutMode, key: str, current: os.stat_result | None) -> None:
                check(mode, key, current)
                if not theirs:
                    theirs.append(key)
                    theirs.append(elsewhere.directory.store(key, [b"theirs"], PutMode.CREATE, lambda: None))

            monkeypatch.setattr(local, "check_condition", checked)
            with pytest.raises(AlreadyExists):
                await driver.put("g/claim", [b"mine"], mode=PutMode.CREATE)
            assert bytes(await driver.get("g/claim")) == b"theirs"
            assert await driver.stat("g/claim") == theirs[1]
            assert temporaries(root) == []

    @pytest.mark.parametrize(
        ("kind", "options", "conditional"),
        [
            ("fuse.sshfs", "rw", False),
            ("nfs4", "rw,local_lock=all", False),
            ("nfs4", "rw,local_lock=none", True),
            ("beegfs", "rw", False),
            ("lustre", "rw", False),
            ("lustre", "rw,flock", True),
            ("ext4", "rw", True),
        ],
    )
    async def test_conditions_are_claimed_only_where_locks_are_known_to_reach_all(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: str, conditional: bool
    ) -> None:
        mount = Mount(root, kind, frozenset(options.split(",")))
        monkeypatch.setattr("tiercheck.tiers.posix.nvme.mount_of", lambda path: mount)
        async with NvmeDriver(root) as driver:
            assert driver.capabilities.conditional_put is conditional
            assert driver.facts()["locks"].startswith("flock" if conditional else "none")
            if not conditional:
                with pytest.raises(Unsupported, match="knows no conditions"):
                    await driver.put("a", [b"x"], mode=PutMode.CREATE)
            await driver.put("a", [b"x"])


async def test_a_file_system_without_hard_links_says_so(root: Path) -> None:
    async with NvmeDriver(root) as driver:
        with (
            mock.patch.object(os, "link", side_effect=OSError(errno.EPERM, os.strerror(errno.EPERM))),
            pytest.raises(Unsupported, match="no hard links"),
        ):
            await driver.put("a", [b"x"], mode=PutMode.CREATE)
        assert temporaries(root) == []


async def test_one_that_died_between_linking_and_unlinking_has_created(root: Path) -> None:
    async with NvmeDriver(root) as driver:
        await driver.put("a", [b"x" * 100], mode=PutMode.CREATE)
        left = Path(driver.directory.temporary_path())
        os.link(root / "a", left)
        assert (await driver.usage()).used_bytes == 100, "it is counted once"
    async with NvmeDriver(root) as driver:
        assert temporaries(root) == []
        assert bytes(await driver.get("a")) == b"x" * 100


async def test_a_disk_without_room_for_a_file_can_be_opened_and_read(root: Path) -> None:
    """A quota on files, or no inodes left: what is there must be read, and deleted."""
    async with NvmeDriver(root) as driver:
        await driver.put("a", [b"content"])
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(local.ObjectDirectory, "create_temporary", side_effect=full):
        async with NvmeDriver(root) as driver:
            assert bytes(await driver.get("a")) == b"content"
            await driver.delete(["a"])
            assert [each async for each in driver.list()] == []
            with pytest.raises(FileSystemFull):
                await driver.put("b", [b"x"])


async def test_what_is_only_read_needs_no_locks(root: Path) -> None:
    """Such as a tier that was copied to a mount without them."""
    async with NvmeDriver(root) as driver:
        await driver.put("a", [b"content"])
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))):
        driver = NvmeDriver(root)
        await driver.open_to_read()
        before = open_descriptors()
        into = bytearray(7)
        for _ in range(3):
            assert bytes(await driver.get("a")) == b"content"
            assert bytes(await driver.get("a", into=memoryview(into))) == b"content"
        assert open_descriptors() == before
        await driver.close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))

"""What only the shm tier does: races with readers, limits, privacy, debris, namespaces."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.shared_memory import root_of
from tiercheck.errors import (
    CapacityExceeded,
    Closed,
    ConfigurationError,
    NotFound,
    Transient,
    Unauthorized,
    Unsupported,
)
from tiercheck.tiers.posix.files import try_lock, unlock
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm import namespaces as namespaces_module
from tiercheck.tiers.shm.driver import ShmDriver, namespaces, remove_namespace
from tiercheck.tiers.shm.mapping import MappedSegment, MappedSegments
from tiercheck.tiers.shm.namespaces import (
    LEAVE_FRESH_S,
    hold_namespace,
    is_to_be_left,
    open_alive,
    release_namespace,
    still_there,
)
from tiercheck.types import PutMode, Survives

MIB = 1 << 20


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{secrets.token_hex(6)}"
    yield name
    root = root_of(name)
    if root.is_symlink() or root.is_file():
        root.unlink()
    elif root.exists():
        root.chmod(0o700)
        remove_namespace(name)


class Child:
    """A forked process that only lives until :meth:`end`, with a copy of every descriptor there was."""

    def __init__(self) -> None:
        self.wait_end, self.end_end = os.pipe()
        ready, is_ready = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(is_ready)  # what is called in a child after a fork has been called
            os.close(self.end_end)
            os.read(self.wait_end, 1)
            os._exit(0)
        os.close(is_ready)
        os.read(ready, 1)
        os.close(ready)

    def end(self) -> None:
        os.close(self.end_end)
        os.close(self.wait_end)
        os.waitpid(self.pid, 0)


class DeadTrainer:
    """A process that died with memory of the tier ``url`` reserved; a worker that it had forked lives on."""

    PROGRAM = """
import asyncio, os, sys
from tiercheck.tiers.registry import make_driver

async def die(url, nbytes):
    driver = make_driver(url)
    await driver.open()
    reservation = await driver.reserve("a", int(nbytes))
    if worker := os.fork():
        print(worker, flush=True)
    else:
        sys.stdin.read()
    os._exit(0)

asyncio.run(die(*sys.argv[1:]))
"""

    def __init__(self, url: str, nbytes: int) -> None:
        command = [sys.executable, "-c", self.PROGRAM, url, str(nbytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._worker = os.pidfd_open(int(self._process.stdout.readline()))
        self._process.wait(timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end_worker()
        os.close(self._worker)

    def end_worker(self) -> None:
        with self._process:  # closes its standard input
            pass
        assert select.select([self._worker], [], [], 30)[0], "the worker has not ended"


def inode(name: str, key: str) -> int:
    return (root_of(name) / key).stat().st_ino


class TestRaces:
    """Another process acts between a reader's open and its lock."""

    @pytest.mark.parametrize("again", [False, True], ids=["deleted", "replaced"])
    @pytest.mark.parametrize("into", [False, True], ids=["mapped", "copied"])
    async def test_a_file_is_recycled_before_its_reader_has_locked_it(
        self, name: str, monkeypatch: pytest.MonkeyPatch, again: bool, into: bool
    ) -> None:
        async with ShmDriver(name, size=16 * MIB) as driver, ShmDriver(name, size=16 * MIB) as other:
            await driver.put("a", [b"1" * MIB])
            first = inode(name, "a")
            raced = [False]

            def act_first(fd: int, *, shared: bool = False) -> bool:
                if shared and not raced[0]:
                    raced[0] = True
                    other.segments.remove("a")
                    other.segments.store("b", [b"2" * MIB], PutMode.OVERWRITE, lambda: None)
                    assert inode(name, "b") == first
                    if again:
                        other.segments.store("a", [b"3" * MIB], PutMode.OVERWRITE, lambda: None)
                return try_lock(fd, shared=shared)

            monkeypatch.setattr("tiercheck.tiers.shm.segments.try_lock", act_first)
            buffer = memoryview(bytearray(MIB)) if into else None
            if again:
                assert await driver.get("a", into=buffer) == b"3" * MIB
            else:
                with pytest.raises(NotFound):
                    await driver.get("a", into=buffer)
            assert raced[0]

    async def test_a_reader_waits_no_longer_than_its_attempts(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tiercheck.tiers.shm.segments.OPEN_ATTEMPTS_MAX", 5)
        async with ShmDriver(name, size=16 * MIB) as driver:
            await driver.put("a", [b"1" * MIB])
            fd = os.open(root_of(name) / "a", os.O_RDWR)
            try:
                assert try_lock(fd)
                with pytest.raises(Transient, match="replaced faster"):
                    await driver.get("a")
            finally:
                os.close(fd)

    async def test_a_child_that_was_forked_meanwhile_holds_nothing_up(self, name: str) -> None:
        """It has a copy of every descriptor, of locked files too; locks are given up, not merely closed."""
        driver = ShmDriver(name, size=16 * MIB)
        await driver.open()
        reservation = await driver.reserve("a", MIB)
        reservation.buffer[:] = b"1" * MIB
        child = Child()
        try:
            await reservation.publish()
            first = inode(name, "a")
            async with ShmDriver(name, size=16 * MIB) as reader:
                assert bytes(await reader.get("a", into=memoryview(bytearray(MIB)))) == b"1" * MIB
                await driver.put("a", [b"2" * MIB])
                await driver.put("b", [b"3" * MIB])
                assert inode(name, "b") == first, "the file is free for reuse"
            await driver.close()
            assert not next(found for found in namespaces() if found.name == name).in_use
        finally:
            child.end()

    async def test_a_child_that_was_forked_during_a_read_holds_nothing_up(self, name: str) -> None:
        """What is read is locked for as long as there is a view of it."""
        async with ShmDriver(name, size=16 * MIB) as driver:
            reservation = await driver.reserve("a", MIB)
            reservation.buffer[:] = b"1" * MIB
            await reservation.publish()
            first = inode(name, "a")
            view = await driver.get("a")
            child = Child()
            try:
                assert bytes(view) == b"1" * MIB
                await driver.put("a", [b"2" * MIB])
                view.release()
                del view, reservation
                await driver.put("b", [b"3" * MIB])
                assert inode(name, "b") == first, "the file is free for reuse"
            finally:
                child.end()

    async def test_a_child_that_was_forked_during_a_look_holds_nothing_up(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        children: list[Child] = []

        def forking(fd: int) -> bool:
            locked = try_lock(fd)
            children.append(Child())
            return locked

        async with ShmDriver(name, size=16 * MIB):
            pass
        try:
            with monkeypatch.context() as patch:
                patch.setattr("tiercheck.tiers.shm.namespaces.try_lock", forking)
                assert not next(found for found in namespaces() if found.name == name).in_use
            remove_namespace(name)
        finally:
            for child in reversed(children):  # each has the ends of those before it
                child.end()

    async def test_a_look_is_waited_for(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever lists namespaces keeps nobody from removing one."""
        async with ShmDriver(name, size=16 * MIB):
            pass
        fd = os.open(root_of(name) / ".tiercheck/alive", os.O_RDWR)
        assert try_lock(fd)
        monkeypatch.setattr("tiercheck.tiers.shm.namespaces.time.sleep", lambda seconds: unlock(fd))
        remove_namespace(name)
        os.close(fd)

    async def test_a_namespace_that_was_made_anew_meanwhile_stays(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who waits to remove one that another is removing must not take the next one of that name, which is in use."""
        async with ShmDriver(name, size=16 * MIB):
            pass
        fd = os.open(root_of(name) / ".tiercheck/alive", os.O_RDWR)
        assert try_lock(fd)
        driver = ShmDriver(name, size=16 * MIB)

        def removed_and_made_anew(seconds: float) -> None:
            shutil.rmtree(root_of(name))
            driver.prepare()
            unlock(fd)

        monkeypatch.setattr("tiercheck.tiers.shm.namespaces.time.sleep", removed_and_made_anew)
        with pytest.raises(NotFound):
            remove_namespace(name)
        assert (root_of(name) / ".tiercheck/pool").is_dir()
        os.close(fd)
        await driver.close()


class TestLimits:
    async def test_the_limit_holds(self, name: str) -> None:
        async with ShmDriver(name, size=4 * MIB) as driver, ShmDriver(name, size=4 * MIB) as other:
            await driver.put("a", [bytes(2 * MIB)])
            reservation = await other.reserve("b", MIB)
            with pytest.raises(CapacityExceeded, match=r"1048577 bytes do not fit: 3145728 of 4194304"):
                await driver.put("c", [bytes(MIB + 1)])
            with pytest.raises(CapacityExceeded):
                await driver.reserve("c", MIB + 1)
            await reservation.drop()
            await driver.put("c", [bytes(MIB + 1)])
            usage = await driver.usage()
            assert (usage.used_bytes, usage.limit_bytes) == (3 * MIB + 1, 4 * MIB)

    async def test_a_count_that_a_crash_left_too_high_is_put_right(self, name: str) -> None:
        async with ShmDriver(name, size=4 * MIB) as driver:
            (root_of(name) / ".tiercheck/charged").write_bytes((4 * MIB).to_bytes(8, "little"))
            await driver.put("a", [bytes(MIB)])
            assert (await driver.usage()).used_bytes == MIB

    async def test_too_large_a_size_is_refused_at_open(self, name: str) -> None:
        with pytest.raises(CapacityExceeded, match=r"/dev/shm: [\d.]+ \w+ are free.*remount,size="):
            await ShmDriver(name, size=1 << 60).open()

    async def test_objects_that_are_there_can_be_had_although_the_rest_has_been_taken(
        self, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with ShmDriver(name, size=4 * MIB) as driver:
            await driver.put("a", [b"mine"])
        async with ShmDriver(name, size=1 << 60) as driver:
            assert await driver.get("a") == b"mine"
            limit_bytes = (await driver.usage()).limit_bytes
            assert limit_bytes is not None and limit_bytes < 1 << 50
        assert "opened with what there is" in caplog.text
        remove_namespace(name)  # it is not held by the driver that could not open

    async def test_without_a_size_the_limit_is_what_is_free(self, name: str) -> None:
        async with ShmDriver(name) as driver:
            await driver.put("a", [bytes(MIB)])
            usage = await driver.usage()
            status = os.statvfs("/dev/shm")
            assert usage.limit_bytes is not None
            assert usage.limit_bytes <= status.f_blocks * status.f_frsize

    async def test_a_full_mount_is_an_error_and_leaves_nothing(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocate = os.posix_fallocate
        room = [40 * MIB]

        def full(fd: int, start: int, nbytes: int) -> None:
            if nbytes > room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            room[0] -= nbytes
            allocate(fd, start, nbytes)

        async with ShmDriver(name, size=256 * MIB) as driver:
            await driver.put("old", [bytes(MIB)])
            monkeypatch.setattr(os, "posix_fallocate", full)
            for attempt in (lambda: driver.reserve("a", 100 * MIB), lambda: driver.put("a", [bytes(100 * MIB)])):
                room[0] = 40 * MIB
                with pytest.raises(CapacityExceeded, match="after 33554432 of them"):
                    await attempt()
                assert (await driver.usage()).used_bytes == MIB
                assert list((root_of(name) / ".tiercheck/tmp").iterdir()) == []
                assert driver.segments.pooled_bytes() == 0
            room[0] = 40 * MIB
            await driver.put("a", [bytes(2 * MIB)])

    async def test_the_pool_is_given_up_before_a_full_mount_is_an_error(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with ShmDriver(name, size=64 * MIB) as driver:
            await driver.put("a", [bytes(4 * MIB)])
            await driver.delete(["a"])
            allocate = os.posix_fallocate

            def full_while_pooled(fd: int, start: int, nbytes: int) -> None:
                if driver.segments.pooled_bytes():
                    raise OSError(errno.ENOSPC, "No space left on device")
                allocate(fd, start, nbytes)

            monkeypatch.setattr(os, "posix_fallocate", full_while_pooled)
            await driver.put("b", [bytes(20 * MIB)])
            assert driver.segments.pooled_bytes() == 0

    async def test_the_dead_make_room_before_a_full_mount_is_an_error(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with ShmDriver(name, size=64 * MIB) as driver:
            with DeadTrainer(f"shm://{name}?size=64MiB", 4 * MIB):
                pass
            (left,) = (root_of(name) / ".tiercheck/tmp").iterdir()
            allocate = os.posix_fallocate

            def full_while_it_is_there(fd: int, start: int, nbytes: int) -> None:
                if left.exists() or driver.segments.pooled_bytes():
                    raise OSError(errno.ENOSPC, "No space left on device")
                allocate(fd, start, nbytes)

            monkeypatch.setattr(os, "posix_fallocate", full_while_it_is_there)
            await driver.put("a", [bytes(20 * MIB)])
            assert (await driver.usage()).used_bytes == 20 * MIB


class TestPrivacy:
    async def test_nobody_else_may_look(self, name: str) -> None:
        umask = os.umask(0)
        try:
            async with ShmDriver(name, size=4 * MIB) as driver:
                await driver.put("a/b", [b"x"])
                await (await driver.reserve("a/c", 10)).publish()
        finally:
            os.umask(umask)
        for path in [root_of(name), *root_of(name).rglob("*")]:
            assert path.stat().st_mode & 0o077 == 0, path

    async def test_a_link_or_a_file_in_its_place_is_refused(self, name: str, tmp_path: Path) -> None:
        root_of(name).symlink_to(tmp_path)
        with pytest.raises(Unauthorized, match="a link or a file"):
            await ShmDriver(name).open()
        with pytest.raises(Unauthorized):
            remove_namespace(name)
        root_of(name).unlink()
        root_of(name).touch()
        with pytest.raises(Unauthorized, match="a link or a file"):
            await ShmDriver(name).open()
        assert list(tmp_path.iterdir()) == []

    async def test_a_directory_that_others_may_enter_is_refused(self, name: str) -> None:
        root_of(name).mkdir()
        root_of(name).chmod(0o755)
        with pytest.raises(Unauthorized, match="chmod 700"):
            await ShmDriver(name).open()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
    async def test_somebody_elses_directory_is_refused(self, name: str) -> None:
        root_of(name).mkdir(mode=0o700)
        os.chown(root_of(name), 12345, -1)
        with pytest.raises(Unauthorized, match="belongs to user 12345"):
            await ShmDriver(name).open()
        os.chown(root_of(name), 0, -1)

    @pytest.mark.parametrize("bad", ["", "a/b", "..", ".x", "a b", "x" * 65, "é", "a\n"])
    def test_a_name_is_a_plain_word(self, bad: str) -> None:
        with pytest.raises(ConfigurationError, match="needs a name"):
            ShmDriver(bad)

    async def test_a_symbolic_link_is_no_object(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        async with ShmDriver(name, size=4 * MIB) as driver:
            (root_of(name) / "a").symlink_to(tmp_path / "secret")
            (root_of(name) / "d").symlink_to(tmp_path)
            assert [info async for info in driver.list()] == []
            with pytest.raises(NotFound):
                await driver.stat("a")
            with pytest.raises((Unauthorized, NotFound)):
                await driver.get("a")

    async def test_the_control_directory_holds_no_objects(self, name: str) -> None:
        async with ShmDriver(name, size=4 * MIB) as driver:
            for key in (".tiercheck/lock", ".tiercheck/tmp/x", ".tiercheck"):
                with pytest.raises(ValueError, match="own directory"):
                    await driver.put(key, [b""])
                with pytest.raises(ValueError, match="own directory"):
                    await driver.get(key)
            assert [info async for info in driver.list(".tiercheck/")] == []
            await driver.put(".tiercheck-not", [b"fine"])
            assert [info.key async for info in driver.list(".tier")] == [".tiercheck-not"]


class TestDebris:
    async def test_the_files_of_the_dead_go_and_those_of_the_living_stay(self, name: str) -> None:
        async with ShmDriver(name, size=8 * MIB) as driver:
            living = await driver.reserve("a", MIB)
            living.buffer[:4] = b"live"
            ours = next((root_of(name) / ".tiercheck/tmp").iterdir())
            dead = ours.with_name(f"{ours.name.rsplit('-', 2)[0]}-1-dead")
            dead.write_bytes(b"x" * MIB)
            async with ShmDriver(name, size=8 * MIB) as second:
                assert not dead.exists()
                assert second.segments.pooled_bytes() == MIB  # its memory is not lost
                assert (await second.usage()).used_bytes == MIB
            assert ours.exists()
            await living.publish()
            assert bytes((await driver.get("a"))[:4]) == b"live"

    async def test_what_dies_while_the_tier_is_open_makes_room_where_it_is_needed(self, name: str) -> None:
        """Not as long as a data loader's worker lives, which was forked while memory was reserved and shares it."""
        async with ShmDriver(name, size=4 * MIB) as driver:
            with DeadTrainer(f"shm://{name}?size=4MiB", 3 * MIB) as trainer:
                with pytest.raises(CapacityExceeded, match="3145728 of 4194304 are in use"):
                    await driver.put("b", [bytes(2 * MIB)])
                trainer.end_worker()
                await driver.put("b", [bytes(2 * MIB)])
            assert list((root_of(name) / ".tiercheck/tmp").iterdir()) == []
            assert (await driver.usage()).used_bytes == 2 * MIB


class TestNamespaces:
    async def test_they_are_listed_and_removed(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tiercheck.tiers.shm.namespaces.LEAVE_WAIT_S_MAX", 0.1)
        async with ShmDriver(name, size=8 * MIB) as driver:
            await driver.put("a", [bytes(MIB)])
            found = next(found for found in namespaces() if found.name == name)
            assert found.in_use
            assert MIB <= found.used_bytes < MIB + 4096
            with pytest.raises(Transient, match="in use"):
                remove_namespace(name)
        assert not next(found for found in namespaces() if found.name == name).in_use
        remove_namespace(name)
        assert name not in [found.name for found in namespaces()]
        with pytest.raises(NotFound):
            remove_namespace(name)

    async def test_one_that_is_removed_while_another_opens_it(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The lock that was taken is that of a directory which is gone: the driver starts over."""
        raced = [False]

        def remove_first(fd: int, *, shared: bool = False) -> bool:
            if not raced[0]:
                raced[0] = True
                remove_namespace(name)
            return try_lock(fd, shared=shared)

        monkeypatch.setattr("tiercheck.tiers.shm.namespaces.try_lock", remove_first)
        async with ShmDriver(name, size=MIB) as driver:
            await driver.put("a", [b"x"])
            assert (root_of(name) / "a").read_bytes() == b"x"
        assert raced[0]

    async def test_whoever_only_looks_makes_none(self, name: str) -> None:
        driver = make_driver(f"shm://{name}?make=no")
        with pytest.raises(NotFound, match=f"there is no namespace '{name}'"):
            await driver.open()
        assert not root_of(name).exists()
        async with ShmDriver(name, size=MIB) as maker:
            await maker.put("a", [b"x"])
        async with driver:
            assert [info.key async for info in driver.list()] == ["a"]
        with pytest.raises(ConfigurationError, match="'perhaps' is neither yes nor no"):
            make_driver(f"shm://{name}?make=perhaps")

    async def test_one_that_is_removed_by_force_is_given_back_without_an_error(self, name: str) -> None:
        async with ShmDriver(name, size=MIB) as driver:
            await driver.put("a", [b"x"])
            shutil.rmtree(root_of(name))
        assert not root_of(name).exists()

    async def test_a_removal_never_meets_what_an_opener_makes(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between any two steps of the removal somebody tries to open: nothing is left over, and nobody fails."""
        release_namespace(hold_namespace(root_of(name)))
        (root_of(name) / "g000001").mkdir()
        opened = []

        def opening_before(step: Callable[..., None]) -> Callable[..., None]:
            def stepped(*args: Any, **options: Any) -> None:
                fd = namespaces_module._held(root_of(name), namespaces_module.NamespaceKind.OWN, True)
                if fd is not None:
                    opened.append(fd)
                step(*args, **options)

            return stepped

        for target, attribute in ((shutil, "rmtree"), (Path, "unlink"), (Path, "rename")):
            monkeypatch.setattr(target, attribute, opening_before(getattr(target, attribute)))
        remove_namespace(name)
        monkeypatch.undo()
        assert len(opened) <= 1, "the name was free twice"
        for fd in opened:  # after the name was free: it is another namespace, and whole
            assert still_there(root_of(name), fd)
            release_namespace(fd)
        assert not list(root_of(name).parent.glob(f"tiercheck-{os.geteuid()}-.removed-*"))

    async def test_one_that_vanishes_just_after_it_was_found_is_made_anew(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root, mkdir = root_of(name), os.mkdir
        release_namespace(hold_namespace(root))
        removed = []

        def vanishing(path: Path, mode: int = 0o777) -> None:
            try:
                mkdir(path, mode)
            except FileExistsError:
                if not removed and path != root:
                    removed.append(path)
                    shutil.rmtree(root)
                raise

        monkeypatch.setattr(os, "mkdir", vanishing)
        fd = hold_namespace(root)
        assert removed
        assert still_there(root, fd)
        release_namespace(fd)

    async def test_one_that_vanishes_is_left_out_of_a_listing(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        release_namespace(hold_namespace(root_of(name)))

        def look(root: Path) -> bool:
            if root == root_of(name):
                shutil.rmtree(root)
                raise FileNotFoundError(root)
            return False

        monkeypatch.setattr("tiercheck.tiers.shm.namespaces.in_use", look)
        assert name not in [found.name for found in namespaces()]

    async def test_one_that_takes_long_to_be_removed_is_waited_for(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = root_of(name)
        release_namespace(hold_namespace(root))
        removing = open_alive(root)
        assert try_lock(removing)
        pauses = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 300:
                shutil.rmtree(root)
                os.close(removing)

        monkeypatch.setattr("tiercheck.tiers.shm.namespaces.time.sleep", pause)
        async with ShmDriver(name, size=MIB) as driver:
            await driver.put("a", [b"x"])
        assert len(pauses) == 300

    async def test_one_that_is_never_removed_is_given_up_at_a_deadline(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = root_of(name)
        release_namespace(hold_namespace(root))
        removing = open_alive(root)
        assert try_lock(removing)
        monkeypatch.setattr("tiercheck.tiers.shm.namespaces.HOLD_WAIT_S_MAX", 0.02)
        with pytest.raises(Transient, match=r"has been removing .* for 0 s; try again once it is done"):
            hold_namespace(root)
        os.close(removing)

    async def test_another_mount(self, name: str, tmp_path: Path) -> None:
        async with ShmDriver(name, size=MIB, mount=tmp_path) as driver:
            await driver.put("a", [b"x"])
            assert next(tmp_path.iterdir()).name.endswith(name)
        assert [found.name for found in namespaces(tmp_path)] == [name]
        remove_namespace(name, tmp_path)
        with pytest.raises(Unsupported, match="there is no"):
            await ShmDriver(name, mount=tmp_path / "absent").open()


async def test_survives_a_process(name: str) -> None:
    assert ShmDriver(name).capabilities.survives is Survives.PROCESS


async def test_buffers_are_page_aligned(name: str) -> None:
    import numpy as np

    async with ShmDriver(name, size=8 * MIB) as driver:
        for nbytes in (1, 5000, MIB):
            reservation = await driver.reserve("a", nbytes)
            assert np.frombuffer(reservation.buffer, np.uint8).ctypes.data % 4096 == 0
            await reservation.publish()


async def test_the_event_loop_runs_while_memory_is_written(name: str) -> None:
    """A put of 64 MiB of fresh memory holds neither the loop nor the interpreter for long."""
    content = bytes(64 * MIB)
    async with ShmDriver(name, size=256 * MIB) as driver:
        putting = asyncio.create_task(driver.put("a", [content]))
        turns = 0
        while not putting.done():
            await asyncio.sleep(0.0005)
            turns += 1
        await putting
    assert turns > 5


def test_a_removal_that_was_killed_asks_nobody_to_leave_for_long(name: str) -> None:
    root = root_of(name)
    held = hold_namespace(root)
    try:
        leave = root / ".tiercheck" / "leave"
        leave.touch()
        assert is_to_be_left(root)
        long_ago = leave.stat().st_mtime - 2 * LEAVE_FRESH_S
        os.utime(leave, (long_ago, long_ago))
        assert not is_to_be_left(root)
    finally:
        release_namespace(held)
    remove_namespace(name)


async def test_what_is_reserved_while_it_closes_is_let_go(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, leave = threading.Event(), threading.Event()
    reserve = MappedSegments.reserve

    def slowly(mapped: MappedSegments, nbytes: int, check: Callable[[], None]) -> MappedSegment:
        segment = reserve(mapped, nbytes, check)
        inside.set()
        assert leave.wait(30)
        return segment

    driver = ShmDriver(name, size=8 << 20)
    await driver.open()
    monkeypatch.setattr(MappedSegments, "reserve", slowly)
    reserving = asyncio.create_task(driver.reserve("a", 1 << 20))
    await asyncio.to_thread(inside.wait)
    closing = asyncio.create_task(driver.close())
    await asyncio.sleep(0)
    leave.set()
    await closing
    with pytest.raises(Closed):
        await reserving
    async with ShmDriver(name, size=8 << 20) as driver:
        assert (await driver.usage()).used_bytes == 0

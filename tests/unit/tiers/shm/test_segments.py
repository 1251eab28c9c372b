"""Files of the shm tier are used again: which, when, and never while somebody looks at them."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.shared_memory import root_of
from tiercheck.errors import AlreadyExists, CapacityExceeded
from tiercheck.tiers.driver import Reservation
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.types import ByteRange, PutMode

MIB = 1 << 20


def inode(name: str, key: str) -> int:
    return (root_of(name) / key).stat().st_ino


def reserved_inode(reservation: Reservation) -> int:
    """Of the file that is to become the object."""
    return os.fstat(reservation._segment._head.fd).st_ino  # type: ignore[attr-defined]


async def test_an_overwritten_file_is_used_again(name: str) -> None:
    async with ShmDriver(name, size=16 * MIB) as driver:
        await driver.put("a", [b"1" * MIB])
        first = inode(name, "a")
        await driver.put("a", [b"2" * MIB])
        assert inode(name, "a") != first
        await driver.put("b", [b"3" * (MIB - 5000)])
        assert inode(name, "b") == first
        assert bytes(await driver.get("b")) == b"3" * (MIB - 5000)


async def test_a_smaller_file_is_extended(name: str) -> None:
    async with ShmDriver(name, size=16 * MIB) as driver:
        await driver.put("a", [b"1" * MIB])
        first = inode(name, "a")
        await driver.delete(["a"])
        reservation = await driver.reserve("b", MIB + 300_000)
        reservation.buffer[:] = b"2" * (MIB + 300_000)
        await reservation.publish()
        assert inode(name, "b") == first
        assert bytes(await driver.get("b")) == b"2" * (MIB + 300_000)


async def test_a_file_of_another_magnitude_is_not(name: str) -> None:
    async with ShmDriver(name, size=16 * MIB) as driver:
        await driver.put("a", [b"1" * MIB])
        first = inode(name, "a")
        await driver.delete(["a"])
        for nbytes in (10, MIB // 3, 3 * MIB):
            await driver.put("b", [bytes(nbytes)])
            assert inode(name, "b") != first


async def test_what_a_reader_has_mapped_is_left_alone(name: str) -> None:
    async with ShmDriver(name, size=16 * MIB) as driver, ShmDriver(name, size=16 * MIB) as reader:
        await driver.put("a", [b"1" * MIB])
        first = inode(name, "a")
        held = await reader.get("a")
        await driver.delete(["a"])
        await driver.put("b", [b"2" * MIB])
        assert inode(name, "b") != first
        assert held == b"1" * MIB
        del held
        await driver.put("c", [b"3" * MIB])
        assert inode(name, "c") == first


async def test_what_the_writer_still_has_is_left_alone(name: str) -> None:
    """A view that outlives its reservation cannot be taken away; nobody else gets its memory."""
    async with ShmDriver(name, size=16 * MIB) as driver:
        for end in ("publish", "drop"):
            reservation = await driver.reserve("a", MIB)
            lingering = reservation.buffer[:10]
            kept = reserved_inode(reservation)
            await (reservation.publish() if end == "publish" else reservation.drop())
            await driver.delete(["a"])
            for n in range(4):
                await driver.put(f"b/{n}", [b"x" * MIB])
                assert inode(name, f"b/{n}") != kept
            lingering[:] = b"scribbled!"
            for n in range(4):
                assert bytes(await driver.get(f"b/{n}")) == b"x" * MIB
            await driver.delete([f"b/{n}" for n in range(4)])
            del lingering


async def test_a_kept_mapping_of_a_file_that_others_changed(name: str) -> None:
    """The file comes back to this process longer, shorter and longer again; what is written is what is there."""
    async with ShmDriver(name, size=32 * MIB) as one, ShmDriver(name, size=32 * MIB) as two:
        for n, nbytes in enumerate((MIB, MIB // 2 + 1, MIB - 1, 2 * MIB - 7, MIB, MIB + 1)):
            driver = (one, two)[n % 2]
            reservation = await driver.reserve("a", nbytes)
            reservation.buffer[:] = bytes([n]) * nbytes
            await reservation.publish(nbytes - n)
            assert bytes(await two.get("a")) == bytes([n]) * (nbytes - n)
            assert bytes(await one.get("a")) == bytes([n]) * (nbytes - n)
            await driver.delete(["a"])


def mappings(name: str) -> int:
    """How many ranges of this process's addresses show files of the namespace."""
    return sum(str(root_of(name)) in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors(name: str) -> int:
    """How many of this process's descriptors are of files of the namespace."""
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(each.readlink())
    return sum(str(root_of(name)) in str(link) for link in links)


@pytest.mark.parametrize("way", ["reserved", "put"])
async def test_what_this_process_has_written_is_not_mapped_again(name: str, way: str) -> None:
    async with ShmDriver(name, size=32 * MIB) as driver, ShmDriver(name, size=32 * MIB) as other:
        for n in range(3):  # the first put writes to the file, which is new, and maps nothing
            if way == "put":
                await driver.put("a", [bytes([n]) * MIB])
            else:
                reservation = await driver.reserve("a", 2 * MIB)
                reservation.buffer[:MIB] = bytes([n]) * MIB
                await reservation.publish(MIB)
        before = mappings(name)
        with await driver.get("a") as whole, await driver.get("a", range=ByteRange(4096, 2 * 4096)) as part:
            assert mappings(name) == before
            assert whole == b"\2" * MIB
            assert part == b"\2" * 4096
            assert whole.readonly
            assert part.readonly
        with await other.get("a") as whole:
            assert mappings(name) == before + 1
            assert whole == b"\2" * MIB


def test_what_its_own_writer_reads_is_left_alone(name: str) -> None:
    """As long as a part of it is kept; a process that was forked meanwhile, and lets go of it, changes nothing."""
    # In a process of its own: a fork of this one runs what libraries of other tests do at a fork.
    script = f"import asyncio, {__name__} as tests; asyncio.run(tests.fork_while_a_part_is_held({name!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


async def fork_while_a_part_is_held(name: str) -> None:
    async with ShmDriver(name, size=32 * MIB) as driver:
        await driver.put("a", [b"1" * MIB])
        await driver.put("a", [b"2" * MIB])
        await driver.put("a", [b"3" * MIB])
        held = (await driver.get("a"))[100:200]
        first = inode(name, "a")
        await driver.delete(["a"])
        await asyncio.to_thread(let_go_in_a_child, held)
        for n in range(4):
            await driver.put(f"b/{n}", [b"x" * MIB])
            assert inode(name, f"b/{n}") != first
        assert held == b"3" * 100
        before = descriptors(name)
        held.release()
        assert descriptors(name) == before - 1
        await driver.put("c", [b"4" * MIB])
        assert inode(name, "c") == first


def let_go_in_a_child(held: memoryview) -> None:
    child = os.fork()
    if not child:
        done = 1
        try:
            held.release()
            gc.collect()
            done = 0
        finally:
            os._exit(done)
    assert os.waitpid(child, 0)[1] == 0


async def test_what_is_read_outlives_its_driver(name: str) -> None:
    driver = ShmDriver(name, size=32 * MIB)
    await driver.open()
    for n in range(3):
        await driver.put("a", [bytes([n]) * MIB])
    held = await driver.get("a")
    await driver.close()
    assert held == b"\2" * MIB
    async with ShmDriver(name, size=32 * MIB) as other:
        await other.put("a", [b"x" * MIB])
        await other.put("a", [b"y" * MIB])
    assert held == b"\2" * MIB


@pytest.fixture
def moved_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each cut or extension of a file has given away or made, in blocks of 512 bytes."""
    moved: list[int] = []

    def counting(change: Callable[..., None]) -> Callable[..., None]:
        def changed(fd: int, *arguments: int) -> None:
            before = os.fstat(fd).st_blocks
            change(fd, *arguments)
            moved.append(os.fstat(fd).st_blocks - before)

        return changed

    for name in ("ftruncate", "posix_fallocate"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    return moved


@pytest.mark.parametrize("used", [MIB + 5, 3 * MIB - 4096, 3 * MIB])
async def test_what_a_reservation_leaves_unused_is_not_cut_and_made_again(
    name: str, used: int, moved_blocks: list[int]
) -> None:
    """From the second time on no page is given away, and none is fresh."""
    async with ShmDriver(name, size=32 * MIB) as driver:
        for n in range(6):
            moved_blocks.clear()
            reservation = await driver.reserve("a", 4 * MIB)
            first = reserved_inode(reservation)
            reservation.buffer[:] = bytes([n]) * (4 * MIB)
            info = await reservation.publish(used)
            assert (info.nbytes, inode(name, "a")) == (used, first)
            assert bytes(await driver.get("a")) == bytes([n]) * used
            assert (await driver.usage()).used_bytes == used
            assert any(moved_blocks) == (n < 2)
        reservation = await driver.reserve("a", 4 * MIB)
        with pytest.raises(AlreadyExists):
            await reservation.publish(MIB, mode=PutMode.CREATE)
        assert (await driver.usage()).used_bytes == used


async def test_an_object_that_is_longer_than_the_last_ones(name: str) -> None:
    """What lay behind the part that was expected to be used comes along, whatever the lengths are."""
    chance = random.Random(7)
    async with ShmDriver(name, size=64 * MIB) as driver, ShmDriver(name, size=64 * MIB) as other:
        for n in range(40):
            nbytes = chance.choice((1, 4096, 300_000, MIB, MIB + 1, 2 * MIB, 4 * MIB - 4097, 4 * MIB))
            writer = chance.choice((driver, driver, other))
            reservation = await writer.reserve("a", 4 * MIB)
            content = chance.randbytes(4 * MIB)
            reservation.buffer[:] = content
            await reservation.publish(nbytes)
            assert bytes(await driver.get("a")) == content[:nbytes]
            assert (await driver.usage()).used_bytes == nbytes
            if n % 3 == 0:
                await other.delete(["a"])


async def test_a_reservation_longer_than_expected_when_memory_is_full(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        for nbytes in (MIB, MIB):
            reservation = await driver.reserve("a", 4 * MIB)
            reservation.buffer[:4] = b"0123"
            await reservation.publish(nbytes)
        reservation = await driver.reserve("b", 4 * MIB)
        with driver.segments.locked():
            driver.segments.empty_pool()

        def full(fd: int, start: int, nbytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(CapacityExceeded, match="somebody else fills it"):
                await reservation.publish(4 * MIB)
        assert [info.key async for info in driver.list()] == ["a"]
        assert (await driver.usage()).used_bytes == MIB
        assert list((root_of(name) / ".tiercheck/tmp").iterdir()) == []


async def test_the_pool_is_bounded(name: str) -> None:
    async with ShmDriver(name, size=16 * MIB, pool=3 * MIB) as driver:
        for n in range(8):
            await driver.put(f"k/{n}", [bytes(MIB)])
        await driver.delete([f"k/{n}" for n in range(8)])
        assert driver.segments.pooled_bytes() == 3 * MIB
    async with ShmDriver(name, size=16 * MIB, pool=0) as driver:
        await driver.put("a", [bytes(MIB)])
        await driver.delete(["a"])
        assert driver.segments.pooled_bytes() == 0


async def test_the_pool_is_never_in_the_way(name: str) -> None:
    async with ShmDriver(name, size=8 * MIB, pool=8 * MIB) as driver:
        await driver.put("a", [b"1" * (7 * MIB)])
        await driver.delete(["a"])
        for n in range(8):  # too small to reuse the pooled file
            await driver.put(f"k/{n}", [b"2" * MIB])
        assert driver.segments.pooled_bytes() == 0
        assert (await driver.usage()).free_bytes == 0


async def test_memory_of_an_evicted_file_is_free_although_it_is_mapped(name: str, moved_blocks: list[int]) -> None:
    async with ShmDriver(name, size=8 * MIB) as driver:
        reservation = await driver.reserve("a", 4 * MIB)
        await reservation.publish()  # the driver keeps its mapping
        await driver.delete(["a"])
        moved_blocks.clear()
        with driver.segments.locked():
            driver.segments.empty_pool()
        assert sum(moved_blocks) * 512 == -4 * MIB


async def test_a_pooled_name_of_an_object_is_never_reused(name: str) -> None:
    """A writer that dies between its two renames leaves the old object with a second name in the pool."""
    async with ShmDriver(name, size=8 * MIB) as driver:
        await driver.put("a", [b"1" * MIB])
    os.link(root_of(name) / "a", root_of(name) / ".tiercheck/pool/100000-0-left")
    async with ShmDriver(name, size=8 * MIB) as driver:
        await driver.put("b", [b"2" * MIB])
        assert bytes(await driver.get("a")) == b"1" * MIB
        assert not (root_of(name) / ".tiercheck/pool/100000-0-left").exists()
        with driver.segments.locked():
            os.link(root_of(name) / "a", root_of(name) / ".tiercheck/pool/100000-0-left")
            driver.segments.empty_pool()
        assert bytes(await driver.get("a")) == b"1" * MIB, "giving the pool's memory back is not giving up objects"


@pytest.mark.parametrize("backed", [0, MIB // 2], ids=["not at all", "by half"])
async def test_a_file_that_is_not_backed_is_never_reused(name: str, backed: int) -> None:
    async with ShmDriver(name, size=8 * MIB):
        pass
    hole = root_of(name) / ".tiercheck/pool/100000-0-hole"
    hole.write_bytes(bytes(backed))
    os.truncate(hole, MIB)
    async with ShmDriver(name, size=8 * MIB) as driver:
        reservation = await driver.reserve("a", MIB)
        assert not hole.exists()
        fd = reservation._segment._head.fd  # type: ignore[attr-defined]
        assert os.fstat(fd).st_blocks * 512 >= MIB


@pytest.mark.parametrize("left", ["left", "1-2", "x-0-left", "-0-left"])
async def test_a_file_in_the_pool_that_is_no_spare_goes(name: str, left: str) -> None:
    async with ShmDriver(name, size=8 * MIB):
        pass
    (root_of(name) / ".tiercheck/pool" / left).write_bytes(b"x" * MIB)
    async with ShmDriver(name, size=8 * MIB) as driver:
        assert list((root_of(name) / ".tiercheck/pool").iterdir()) == []
        assert driver.segments.pooled_bytes() == 0


async def test_a_spare_that_was_counted_but_never_came(name: str) -> None:
    """Its maker failed in between."""
    async with ShmDriver(name, size=8 * MIB) as driver:
        with driver.segments.locked():
            driver.segments._spares.path_for(MIB, 1)
        await driver.put("a", [b"1" * MIB])
        assert bytes(await driver.get("a")) == b"1" * MIB
        assert driver.segments._accounting.read()[:3] == (MIB, 0, 0)


async def test_two_drivers_see_each_others_spares(name: str) -> None:
    async with ShmDriver(name, size=16 * MIB) as driver, ShmDriver(name, size=16 * MIB) as other:
        await driver.put("a", [b"1" * MIB])
        await other.put("b", [b"2" * MIB])
        for n in range(6):
            writer, remover = (driver, other) if n % 2 else (other, driver)
            first = inode(name, "a")
            await remover.delete(["a"])
            await writer.put("a", [bytes([n]) * MIB])
            assert inode(name, "a") == first
            assert bytes(await driver.get("a")) == bytes([n]) * MIB


async def test_too_many_spares_go_oldest_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.tiers.shm.segments.POOL_FILES_MAX", 16)
    nbytes = 128 << 10
    async with ShmDriver(name, size=64 * MIB) as driver:
        keys = [f"k/{n:02}" for n in range(17)]
        inodes = []
        for key in keys:
            await driver.put(key, [bytes(nbytes)])
            inodes.append(inode(name, key))
        await driver.delete(keys)
        left = [path.stat().st_ino for path in (root_of(name) / ".tiercheck/pool").iterdir()]
        assert set(left) == set(inodes[-14:]), "a few more than one go at a time"
        assert driver.segments._accounting.read()[:3] == (0, 14 * nbytes, 14)


async def test_a_recount_while_a_file_is_cut_counts_it_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted twice, the cut would leave a count that is too low, and the tier would hand out more than there is."""
    async with ShmDriver(name, size=8 * MIB) as driver, ShmDriver(name, size=8 * MIB) as other:
        reservation = await driver.reserve("a", 2 * MIB)
        cut = os.ftruncate

        def recounted(fd: int, nbytes: int) -> None:
            cut(fd, nbytes)
            recount = threading.Thread(target=lambda: other.segments.prepare())
            recount.start()
            recount.join(0.3)  # it must wait for the lock, which who cuts holds
            recounts.append(recount)

        recounts: list[threading.Thread] = []
        monkeypatch.setattr("tiercheck.tiers.shm.segments.os.ftruncate", recounted)
        await reservation.publish(MIB + 5)
        monkeypatch.undo()
        assert recounts
        for recount in recounts:
            recount.join(10)
        held = [info.nbytes async for info in driver.list()]
        assert driver.segments._accounting.read().charged == sum(held) == MIB + 5


async def test_what_a_dead_writer_of_another_container_left_is_reclaimed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host has another name, and its memory is the same: a lock tells whether it is alive."""
    async with ShmDriver(name, size=8 * MIB) as driver:
        reservation = await driver.reserve("a", 4 * MIB)
        (temporary,) = (root_of(name) / ".tiercheck" / "tmp").iterdir()
        kept = temporary.with_name(f"elsewhere-1-{'0' * 16}")
        os.link(temporary, kept)
        async with ShmDriver(name, size=8 * MIB):
            assert kept.exists(), "its writer is alive"
        await reservation.drop()
    kept.write_bytes(bytes(MIB))
    async with ShmDriver(name, size=8 * MIB) as driver:
        assert not kept.exists()
        assert (await driver.usage()).used_bytes == 0

"""Memory made ready for reservations, and that nothing of it is made again, given away or taken twice."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shared_memory import root_of
from tiercheck.errors import CapacityExceeded, Closed
from tiercheck.tiers.driver import Reservation
from tiercheck.tiers.shm import pool as pool_module
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.shm.pool import PID_BITS
from tiercheck.types import bytes_text

MIB = 1 << 20


def blocks(name: str) -> dict[int, int]:
    """The files of the pool, and the memory behind each."""
    return {path.stat().st_ino: path.stat().st_blocks * 512 for path in (root_of(name) / ".tiercheck/pool").iterdir()}


def pool(name: str) -> set[str]:
    """The spares, with their lengths and owners."""
    return {path.name for path in (root_of(name) / ".tiercheck/pool").iterdir()}


def populated_bytes(driver: ShmDriver) -> list[int]:
    return [kept.region._populated_bytes for kept in driver._mapped.cache._kept.values()]


async def test_it_is_backed_mapped_and_handed_out(name: str) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.prepare_reservations([(MIB, 3), (4 * MIB, 2), (10, 5), (MIB, 0)])
        ready = blocks(name)
        assert sorted(ready.values()) == [MIB] * 3 + [4 * MIB] * 2, "small ones are not worth it"
        assert sorted(populated_bytes(driver)) == [MIB] * 3 + [4 * MIB] * 2
        assert (await driver.usage()).used_bytes == 0
        held = [await driver.reserve(f"k/{n}", nbytes) for n, nbytes in enumerate([MIB] * 3 + [4 * MIB] * 2)]
        inodes = {os.fstat(one._segment._head.fd).st_ino for one in held}  # type: ignore[attr-defined]
        assert inodes == set(ready)
        for one in held:
            one.buffer[:] = b"x" * one.buffer.nbytes
            await one.publish()
        assert blocks(name) == {}


async def test_a_reservation_is_entered_into_the_page_table_when_its_buffer_is_asked_for(name: str) -> None:
    """So a base costs the thread that copies it that, and not training."""
    async with ShmDriver(name, size=64 * MIB) as driver:
        reserved = await driver.reserve("k", 4 * MIB)
        region = reserved._segment._region  # type: ignore[attr-defined]
        assert (region.shown_bytes, region._populated_bytes) == (4 * MIB, 0)
        buffer = reserved.buffer
        assert region._populated_bytes == buffer.nbytes == 4 * MIB
        del buffer
        await reserved.publish()


async def test_it_is_made_in_the_order_of_need_and_handed_out_meanwhile(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while memory is made ready: what it takes is not waited for, and counts as made."""
    async with ShmDriver(name, size=64 * MIB) as driver:
        made: list[int] = []
        taken: list[Reservation] = []
        prepare = driver._mapped.prepare

        def prepared(nbytes: int, check: Callable[[], None]) -> None:
            prepare(nbytes, check)
            made.append(nbytes)
            if len(made) == 1:
                ready = set(blocks(name))
                taken.append(driver.reserve_nowait("a", MIB))
                assert {os.fstat(taken[0]._segment._head.fd).st_ino} == ready  # type: ignore[attr-defined]

        monkeypatch.setattr(driver._mapped, "prepare", prepared)
        await driver.prepare_reservations([(MIB, 2), (4 * MIB, 1), (MIB, 1)])
        assert made == [MIB, MIB, 4 * MIB, MIB]
        assert sorted(blocks(name).values()) == [MIB, MIB, 4 * MIB]
        await taken[0].drop()
        assert len(blocks(name)) == 4


async def test_what_training_had_to_make_meanwhile_is_not_made_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        taken: list[Reservation] = []
        prepare = driver._mapped.prepare

        def prepared(nbytes: int, check: Callable[[], None]) -> None:
            prepare(nbytes, check)
            if not taken:
                taken.extend(driver.reserve_nowait(f"{number}", MIB) for number in range(3))

        monkeypatch.setattr(driver._mapped, "prepare", prepared)
        await driver.prepare_reservations([(MIB, 4)])
        assert len(blocks(name)) == 1
        for each in taken:
            await each.drop()
        assert len(blocks(name)) == 4


async def test_nothing_is_made_twice(name: str) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.prepare_reservations([(MIB, 3)])
        ready = blocks(name)
        await driver.prepare_reservations([(MIB, 2)])
        await driver.prepare_reservations([(MIB, 3)])
        assert blocks(name) == ready
        await driver.prepare_reservations([(MIB, 4)])
        assert set(blocks(name)) > set(ready)
        assert len(blocks(name)) == 4
    async with ShmDriver(name, size=64 * MIB) as again:
        await again.prepare_reservations([(MIB, 4)])
        assert len(blocks(name)) == 4, "a restart takes what the last process left"
        assert populated_bytes(again) == [MIB] * 4


def shared(name: str) -> ShmDriver:
    return ShmDriver(name, size=64 * MIB, pool=32 * MIB)


async def test_what_another_process_keeps_ready_is_not_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of one node have a namespace in common, and each needs its own."""
    async with shared(name) as driver, shared(name) as other:
        await driver.prepare_reservations([(MIB, 2)])
        first = blocks(name)
        monkeypatch.setattr("os.getpid", lambda: 1)  # a process that lives, and is not this one
        await other.prepare_reservations([(MIB, 2)])
        assert set(blocks(name)) > set(first)
        assert len(blocks(name)) == 4
        assert {os.fstat(kept.fd).st_ino for kept in other._mapped.cache._kept.values()}.isdisjoint(first)
        with pytest.raises(CapacityExceeded, match=r"keep 2097152 of them; give the tier a larger pool="):
            await other.prepare_reservations([(MIB, 31)])
        reservations = [await other.reserve("a", MIB) for _ in range(4)]
        assert blocks(name) == {}, "but in need it is taken"
        for reservation in reservations:
            await reservation.drop()


@pytest.mark.parametrize("nbytes", [100 << 10, MIB - 1, MIB, MIB + 1])
async def test_a_put_leaves_alone_what_another_process_keeps_ready(
    name: str, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would come back as nobody's and cut: a window that was pinned would have to be pinned anew."""
    sizes = [(128 << 10, 1), (MIB, 2)]
    async with ShmDriver(name, size=64 * MIB) as trainer, ShmDriver(name, size=64 * MIB) as other:
        await trainer.prepare_reservations(sizes)
        ready = pool(name)
        monkeypatch.setattr("os.getpid", lambda: 1)  # a process that lives, and is not this one
        await other.put("a", [bytes(nbytes)])
        assert pool(name) == ready
        await other.delete(["a"])
        await other.put("a", [bytes(nbytes)])
        assert pool(name) >= ready


async def test_what_a_dead_process_kept_ready_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: 2**22 + 1)  # more than any process can have
            await driver.prepare_reservations([(MIB, 2)])
        first = blocks(name)
        await driver.prepare_reservations([(MIB, 2)])
        assert blocks(name).keys() == first.keys()


async def test_a_dead_process_whose_number_lives_again_is_dead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, where each start gives the ranks the same numbers."""
    async with ShmDriver(name, size=64 * MIB) as driver:
        with monkeypatch.context() as patch:
            patch.setattr(pool_module, "owner_of", lambda pid: 5 << PID_BITS | pid)
            await driver.prepare_reservations([(MIB, 2)])
        first = blocks(name)
        monkeypatch.setattr("os.getpid", lambda: 1)  # another rank
        await driver.prepare_reservations([(MIB, 2)])
        assert blocks(name).keys() == first.keys()


def test_older_releases_read_a_number_of_a_process(name: str) -> None:
    """An agent and a trainer of neighbouring releases have a pool in common."""
    owner = pool_module.this_process()
    spares = pool_module.SegmentPool(Path("/pool"), pool_module.PoolAccounting(Path(f"/dev/shm/tiercheck-{name}")))
    try:
        written = Path(spares.path_for(MIB, 7, owner)).name
    finally:
        Path(f"/dev/shm/tiercheck-{name}").unlink()
    nbytes, pid, _ = written.split("-")
    assert (int(nbytes, 16), int(pid, 16)) == (MIB, os.getpid())
    assert pool_module.kind_of(written) == (MIB, owner)
    assert pool_module.alive(owner)
    assert pool_module.kind_of(f"{MIB:x}-{os.getpid():x}-{'0' * 16}") == (MIB, os.getpid())
    assert not pool_module.alive(os.getpid()), "nobody knows whether it is the same one"


async def test_more_than_there_is_room_for(name: str) -> None:
    async with ShmDriver(name, size=16 * MIB, pool=4 * MIB) as driver:
        with pytest.raises(CapacityExceeded, match=r"the pool holds 4194304 bytes at most.*pool="):
            await driver.prepare_reservations([(3 * MIB // 2, 3)])
        await driver.put("a", [bytes(13 * MIB)])
        with pytest.raises(CapacityExceeded, match=r"13631488 of 16777216 are in use.*size="):
            await driver.prepare_reservations([(MIB, 4)])
        assert blocks(name) == {}
        await driver.prepare_reservations([(MIB, 3)])
        assert len(blocks(name)) == 3
        assert (await driver.stat("a")).nbytes == 13 * MIB


async def test_memory_that_somebody_else_fills_meanwhile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = os.posix_fallocate
    room = [3]

    def full(fd: int, start: int, nbytes: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, start, nbytes)

    async with ShmDriver(name, size=64 * MIB) as driver:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CapacityExceeded, match="somebody else fills it"):
            await driver.prepare_reservations([(MIB, 5)])
        assert len(blocks(name)) == 3, "what is ready stays"
        assert list((root_of(name) / ".tiercheck/tmp").iterdir()) == []
        assert (await driver.usage()).used_bytes == 0


async def test_cancelling(name: str) -> None:
    async with ShmDriver(name, size=128 * MIB) as driver:
        for turns in (0, 1, 2, 5, 20, 80):
            preparing = asyncio.create_task(driver.prepare_reservations([(4 * MIB, 8)]))
            for _ in range(turns):
                await asyncio.sleep(0)
            preparing.cancel()
            await asyncio.wait({preparing})
            assert list((root_of(name) / ".tiercheck/tmp").iterdir()) == []
            assert (await driver.usage()).used_bytes == 0
            assert len(blocks(name)) <= 8
        await driver.prepare_reservations([(4 * MIB, 8)])
        assert len(blocks(name)) == 8


async def test_wrong_numbers_and_a_closed_driver(name: str) -> None:
    driver = ShmDriver(name, size=4 * MIB)
    with pytest.raises(Closed):
        await driver.prepare_reservations([(MIB, 1)])
    async with driver:
        for wrong in ((-1, 1), (MIB, -1)):
            with pytest.raises(ValueError, match="cannot be prepared"):
                await driver.prepare_reservations([wrong])
        assert blocks(name) == {}
        await driver.prepare_reservations([])


async def test_bases_and_differentials_go_round_with_hardly_a_fresh_page(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three bases deep, and differentials that use some 70% of what is reserved, collected at each new base."""
    chance = random.Random(5)
    base_bytes, differential_bytes = 4 * MIB, MIB
    allocate = os.posix_fallocate
    fresh = [0]

    def count(fd: int, start: int, nbytes: int) -> None:
        fresh[0] += nbytes
        allocate(fd, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", count)
    async with ShmDriver(name, size=256 * MIB) as driver:
        await driver.prepare_reservations([(base_bytes, 3), (differential_bytes, 4)])
        for version in range(128):
            if version == 64:
                fresh[0] = 0
            reservation = await driver.reserve(f"d/{version:03}", differential_bytes)
            reservation.buffer[:4] = b"diff"
            await reservation.publish(int(differential_bytes * chance.uniform(0.69, 0.71)))
            if version % 16 == 0:
                reservation = await driver.reserve(f"b/{version:03}", base_bytes)
                reservation.buffer[:4] = b"base"
                await reservation.publish(base_bytes - 20_000)
                if (old := version - 48) >= 0:
                    await driver.delete([f"b/{old:03}", *(f"d/{n:03}" for n in range(old, old + 16))])
        # What lengths differ by has to be cut and made again; half of the time, 1% of a differential on average.
        assert fresh[0] < 64 * differential_bytes * 0.02 + 4 * 40_000
        assert sum(blocks(name).values()) < 24 * MIB
        assert len(blocks(name)) < 32


async def test_facts(name: str) -> None:
    driver = ShmDriver(name, size=64 * MIB, pin="off", numa="off")
    assert driver.facts() == {}
    async with driver:
        assert driver.facts() == {
            "pages": driver.facts()["pages"],
            "pool": "64.0 MiB at most",
            "mapped": "0 segments",
            "pinned": "off",
            "numa": "off",
        }
        await driver.prepare_reservations([(MIB, 3)])
        assert driver.facts()["pool"] == "3 x 1.0 MiB made ready; 64.0 MiB at most"
        assert driver.facts()["mapped"] == "3 segments"
    async with ShmDriver(name, pin="off", numa="off") as driver:
        half = bytes_text(driver.segments.limit_bytes // 2)
        assert driver.facts()["pool"] == f"{half} at most", "the rest of what is free is for others"

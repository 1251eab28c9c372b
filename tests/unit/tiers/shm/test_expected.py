"""The pool gives back what exceeds that which the tier usually holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.shared_memory import root_of
from tiercheck.errors import CapacityExceeded
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.shm.pool import PERIOD_CHANGES

MIB = 1 << 20


def held(name: str) -> int:
    """MiB of memory, whatever for: pages, and not lengths."""
    return sum(path.stat().st_blocks * 512 for path in root_of(name).rglob("*") if path.is_file()) // MIB


def spares(name: str) -> list[int]:
    """MiB of each."""
    return sorted(path.stat().st_size // MIB for path in (root_of(name) / ".tiercheck/pool").iterdir())


async def put_and_delete(driver: ShmDriver, sizes: Sequence[int]) -> None:
    """Objects of so many MiB, all of them there at a time."""
    for number, mib in enumerate(sizes):
        await driver.put(f"k/{number}", [bytes(mib * MIB)])
    await driver.delete([f"k/{number}" for number in range(len(sizes))])


async def test_what_was_needed_once_is_not_kept_for_ever(name: str) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        await put_and_delete(driver, [1] * 20)
        assert held(name) == 20
        await driver.expect(8 * MIB)
        assert held(name) == 8
        await put_and_delete(driver, [1] * 20)
        assert held(name) == 20, "it may be needed again soon"
        for _ in range(PERIOD_CHANGES):
            await put_and_delete(driver, [1])
        assert held(name) == 8
        await driver.put("a", [bytes(10 * MIB)])
        assert (held(name), spares(name)) == (10, []), "objects may be more, and have nothing beside them then"


async def test_a_tier_that_goes_on_holding_more_makes_no_memory_anew(name: str) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.expect(4 * MIB)
        await put_and_delete(driver, [1] * 12)
        files = {path.stat().st_ino for path in (root_of(name) / ".tiercheck/pool").iterdir()}
        for _ in range(PERIOD_CHANGES // 8):
            await put_and_delete(driver, [1] * 12)
        assert {path.stat().st_ino for path in (root_of(name) / ".tiercheck/pool").iterdir()} == files
        assert held(name) == 12


async def test_all_processes_know_it_and_it_outlives_them(name: str) -> None:
    async with ShmDriver(name, size=64 * MIB) as trainer, ShmDriver(name, size=64 * MIB) as agent:
        await put_and_delete(agent, [1] * 8)
        await trainer.expect(4 * MIB)
        assert held(name) == 4
        await put_and_delete(agent, [2, 2, 2])
        assert held(name) == 6
    async with ShmDriver(name, size=64 * MIB) as again:
        assert held(name) == 6
        await again.expect(5 * MIB)
        await put_and_delete(again, [1] * 5)
        assert held(name) == 5, "the last one counts"


async def test_a_large_file_stays_if_little_must_go(name: str) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.expect(20 * MIB)
        await put_and_delete(driver, [12, 1, 1, 1, 1, 1, 1, 1, 1])
        assert spares(name) == [1] * 8 + [12]
        await driver.put("a", [bytes(2 * MIB)])
        assert spares(name) == [1] * 6 + [12], "though it is the oldest"
        await driver.delete(["a"])


async def test_what_nobody_uses_any_more_goes_though_it_is_larger(name: str) -> None:
    """Such as the file of the base that a generation opens with, which holds no moments yet."""
    async with ShmDriver(name, size=64 * MIB) as driver:
        await driver.put("old", [bytes(4 * MIB)])
        await driver.delete(["old"])
        await driver.expect(12 * MIB)
        await put_and_delete(driver, [2] * 6)
        assert spares(name) == [2] * 6


async def test_reservations_have_room_whatever_is_expected(name: str) -> None:
    async with ShmDriver(name, size=8 * MIB) as driver:
        await driver.expect(0)
        await driver.expect(1)
        held_now = [await driver.reserve(f"k/{number}", 2 * MIB) for number in range(4)]
        with pytest.raises(CapacityExceeded):
            await driver.reserve("k/4", 2 * MIB)
        for each in held_now:
            each.buffer[:] = b"x" * each.buffer.nbytes
            await each.publish()
        assert held(name) == 8
        with pytest.raises(ValueError, match="-1"):
            await driver.expect(-1)


async def test_nothing_is_given_back_before_somebody_says_what_is_expected(name: str) -> None:
    async with ShmDriver(name, size=64 * MIB) as driver:
        await put_and_delete(driver, [1] * 20)
    async with ShmDriver(name, size=64 * MIB):
        assert held(name) == 20

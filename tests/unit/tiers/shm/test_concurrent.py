"""Everything at a time, in two drivers of one namespace: what is read is always one object, whole."""

from __future__ import annotations

import asyncio
import random

import pytest

from tiercheck.errors import CapacityExceeded, NotFound
from tiercheck.tiers.shm.driver import ShmDriver

MIB = 1 << 20
KEYS = [f"{folder}/{n}" for folder in "abc" for n in range(3)]
SIZES = (10, 5000, 130_000, 300_000, 700_000, MIB, 2 * MIB)


def content(nbytes: int) -> bytes:
    return bytes([nbytes % 251]) * nbytes


async def put_and_cancel(driver: ShmDriver, key: str, nbytes: int, chance: random.Random) -> None:
    putting = asyncio.create_task(driver.put(key, [content(nbytes)]))
    for _ in range(chance.randrange(40)):
        await asyncio.sleep(0)
    putting.cancel()
    await asyncio.wait({putting})


async def publish(driver: ShmDriver, key: str, nbytes: int, chance: random.Random) -> None:
    reservation = await driver.reserve(key, chance.choice((nbytes, 2 * MIB + 5000, 4 * MIB)))
    reservation.buffer[:nbytes] = content(nbytes)
    end = chance.random()
    if end < 0.1:
        await reservation.drop()
    elif end < 0.2:
        lingering = reservation.buffer[:100]
        await reservation.publish(nbytes)
        await asyncio.sleep(0)
        del lingering
    else:
        await reservation.publish(nbytes)


async def read(driver: ShmDriver, key: str, chance: random.Random) -> int:
    into = memoryview(bytearray(3 * MIB)) if chance.random() < 0.3 else None
    found = await driver.get(key, into=into)
    for _ in range(chance.randrange(20)):
        await asyncio.sleep(0)
    assert found == content(found.nbytes)
    return 1


async def work(driver: ShmDriver, chance: random.Random, count: int) -> int:
    reads = 0
    for _ in range(count):
        key = chance.choice(KEYS)
        nbytes = chance.choice(SIZES) + chance.randrange(5000)
        action = chance.random()
        try:
            if action < 0.25:
                await driver.put(key, [content(nbytes)])
            elif action < 0.3:
                await put_and_cancel(driver, key, nbytes, chance)
            elif action < 0.6:
                await publish(driver, key, nbytes, chance)
            elif action < 0.7:
                await driver.delete([key])
            elif action < 0.72:
                await driver.prepare_reservations([(MIB, 2), (300_000, 2)])
            else:
                reads += await read(driver, key, chance)
        except (NotFound, CapacityExceeded):
            continue
    return reads


@pytest.mark.parametrize("size", [96 * MIB, 12 * MIB], ids=["with room", "crowded"])
async def test_everything_at_a_time(name: str, size: int) -> None:
    async with ShmDriver(name, size=size, threads=2) as driver, ShmDriver(name, size=size) as other:
        reads = await asyncio.gather(
            *(work((driver, other)[n % 2], random.Random(100 * n + size), 80) for n in range(6))
        )
        assert sum(reads) > 50
        held = [info.nbytes async for info in driver.list()]
        for key in KEYS:
            try:
                found = await other.get(key)
            except NotFound:
                continue
            assert found == content(found.nbytes)
        assert (await driver.usage()).used_bytes == sum(held) <= size
        pool = [path.stat().st_size for path in (driver.segments.root / ".tiercheck/pool").iterdir()]
        assert driver.segments._accounting.read()[:3] == (sum(held), sum(pool), len(pool))
        assert sum(held) + sum(pool) <= size
        assert list((driver.segments.root / ".tiercheck/tmp").iterdir()) == []

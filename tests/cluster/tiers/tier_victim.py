"""Processes that are killed while they write to a tier; run as a module by ``test_tier_kills.py``.

``tier_victim.py points URL`` forks a writer again and again and kills it with SIGKILL before its first, second,
third... system call of note, until one lives. After each death the tier is opened anew and checked.
``tier_victim.py write URL`` writes for ever and reports each round on standard output.
"""

import asyncio
import functools
import sys

from tests.cluster.dying import die_before_event, lives_through
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.types import PutMode

NBYTES = 300_000  # large enough to be recycled by the shm tier
KEYS = ("base/put", "base/created", "base/reserved", "base/deleted")


def content(seed: int, nbytes: int = NBYTES) -> bytes:
    return bytes([seed]) * (nbytes + seed)


async def write_round(driver: TierDriver, seed: int) -> None:
    """Every way in which a name can change."""
    await driver.put("base/put", [content(seed)[:1000], content(seed)[1000:]])
    await driver.delete(["base/created"])
    await driver.put("base/created", [content(seed)], mode=PutMode.CREATE)
    if driver.capabilities.mappable:
        reservation = await driver.reserve("base/reserved", NBYTES + 500)
        reservation.buffer[: NBYTES + seed] = content(seed)
        await reservation.publish(NBYTES + seed)
        dropped = await driver.reserve("base/dropped", NBYTES)
        await dropped.drop()
    await driver.put("base/deleted", [content(seed)])
    await driver.delete(["base/deleted"])


async def start(url: str) -> None:
    async with make_driver(url) as driver:
        await write_round(driver, 1)


async def check(url: str, seeds: tuple[int, ...]) -> None:
    """The tier holds whole objects of ``seeds``, nothing else, and can be written to."""
    async with make_driver(url) as driver:
        infos = [info async for info in driver.list()]
        always = {"base/put", "base/reserved"} if driver.capabilities.mappable else {"base/put"}
        assert always <= {info.key for info in infos}, "an object that was only ever overwritten is gone"
        for info in infos:
            found = bytes(await driver.get(info.key))
            assert info.key in KEYS, info
            assert found in [content(seed) for seed in seeds], f"{info.key} is neither old nor new"
        used = (await driver.usage()).used_bytes
        assert used == sum(info.nbytes for info in infos), f"{used} bytes used, but objects hold {infos}"
        await write_round(driver, 1)


def kill_at_every_point(url: str) -> int:
    async def victim(number: int) -> None:
        async with make_driver(url) as driver:
            die_before_event(number)
            await write_round(driver, 2)

    asyncio.run(start(url))
    number = 0
    while True:
        if lives_through(functools.partial(victim, number)):
            return number
        asyncio.run(check(url, (1, 2)))
        number += 1


async def write_for_ever(url: str) -> None:
    async with make_driver(url) as driver:
        for seed in range(10_000):
            await write_round(driver, seed % 200)
            print(seed, flush=True)


if __name__ == "__main__":
    mode, tier_url = sys.argv[1:]
    if mode == "points":
        print(kill_at_every_point(tier_url))
    else:
        asyncio.run(write_for_ever(tier_url))

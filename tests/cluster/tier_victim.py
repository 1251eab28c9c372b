"""Processes that are killed while they write to a tier; run as a script by ``test_tier_kills.py``.

``tier_victim.py points URL`` forks a writer again and again and kills it with SIGKILL before its first, second,
third... system call of note, until one lives. After each death the tier is opened anew and checked.
``tier_victim.py write URL`` writes for ever and reports each round on standard output.
"""

import asyncio
import os
import signal
import sys
import traceback

from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.types import PutMode

NBYTES = 300_000  # large enough to be recycled by the shm tier
EVENTS = ("open", "os.", "fcntl.", "mmap.", "shutil.")
KEYS = ("base/put", "base/created", "base/reserved", "base/deleted")


def content(seed: int, nbytes: int = NBYTES) -> bytes:
    return bytes([seed]) * (nbytes + seed)


def die_before_event(number: int) -> None:
    """SIGKILL to this process before its ``number``-th audited call that has to do with files."""
    left = [number]

    def hook(event: str, args: object) -> None:
        if event.startswith(EVENTS) and event != "os.kill":
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


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
        child = os.fork()
        if not child:
            code = 1
            try:
                asyncio.run(victim(number))
                code = 0
            except BaseException:  # the child must not return into the parent's code
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the writer failed instead of being killed"
            return number
        assert os.WTERMSIG(status) == signal.SIGKILL
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

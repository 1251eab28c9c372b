"""Processes that share a namespace of the shm tier; run as a module by ``test_shm_processes.py``.

``points URL`` forks processes that make memory ready, each killed with SIGKILL before its next system call of note.
``rank URL NUMBER`` makes memory ready, says which, waits for a line, and goes through cycles in it.
``reader URL KEY`` maps an object and tries to write to it.
"""

import asyncio
import ctypes
import errno
import functools
import json
import os
import sys
from pathlib import Path

from tests.cluster.dying import die_before_event, lives_through
from tiercheck.tiers.posix.direct import address_of
from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.url import TierURL

SIZES = [(300_000, 2), (600_000, 1)]
KEPT = 200_000
CYCLED = (300_000, 310_000, 590_000, 1000)
"""Bytes of an object that is published again and again from a reservation of 600000: as expected, and not."""
RANK_SIZES = [(1 << 20, 3)]


def open_driver(url: str) -> ShmDriver:
    return ShmDriver.from_url(TierURL.parse(url))


def pool_of(driver: ShmDriver) -> list[os.stat_result]:
    return [path.stat() for path in (driver.segments.root / ".tiercheck/pool").iterdir()]


async def check_after_death(url: str) -> None:
    async with open_driver(url) as driver:
        infos = [info async for info in driver.list()]
        assert [info.key for info in infos] in (["kept"], ["cycled", "kept"])
        assert bytes(await driver.get("kept")) == b"k" * KEPT
        cycled = infos[0].nbytes if len(infos) == 2 else 0
        if cycled:
            assert cycled in CYCLED
            assert bytes(await driver.get("cycled")) == bytes([cycled % 251]) * cycled
        assert (await driver.usage()).used_bytes == KEPT + cycled
        assert list((driver.segments.root / ".tiercheck/tmp").iterdir()) == []
        counts = driver.segments._accounting.read()
        assert (counts.charged, counts.pooled_files) == (KEPT + cycled, len(pool_of(driver)))
        await driver.prepare_reservations(SIZES)
        assert len(pool_of(driver)) <= 3 + 2, "what the dead had is used, not left"
        held = [await driver.reserve("a", nbytes) for nbytes, count in SIZES for _ in range(count)]
        for one in held:
            one.buffer[:] = b"x" * one.buffer.nbytes
            await one.drop()


def kill_at_every_point(url: str) -> int:
    async def victim(number: int) -> None:
        async with open_driver(url) as driver:
            die_before_event(number)
            await driver.prepare_reservations(SIZES)
            for nbytes in CYCLED:
                reservation = await driver.reserve("cycled", 600_000)
                reservation.buffer[:nbytes] = bytes([nbytes % 251]) * nbytes
                await reservation.publish(nbytes)

    async def start() -> None:
        async with open_driver(url) as driver:
            await driver.put("kept", [b"k" * KEPT])

    asyncio.run(start())
    number = 0
    while True:
        if number % 3 == 0:  # otherwise what there is is used again
            with_empty_pool(url)
        if lives_through(functools.partial(victim, number)):
            return number
        asyncio.run(check_after_death(url))
        number += 1


def with_empty_pool(url: str) -> None:
    async def empty() -> None:
        async with open_driver(url) as driver:
            with driver.segments.locked():
                driver.segments.empty_pool()

    asyncio.run(empty())


async def rank(url: str, number: int) -> None:
    async with open_driver(url) as driver:
        await driver.prepare_reservations(RANK_SIZES)
        print(json.dumps(sorted(driver._mapped.cache._kept)), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for step in range(60):
            key = f"{number}/{step % 2}"
            reservation = await driver.reserve(key, 1 << 20)
            content = bytes([64 * number + step]) * (700_000 + step)
            reservation.buffer[: len(content)] = content
            await reservation.publish(len(content))
            assert await driver.get(key) == content
            if step % 5 == 4:
                await driver.delete([key])
        print(json.dumps(len(driver._mapped.cache._kept)), flush=True)


async def read(url: str, key: str) -> None:
    async with open_driver(url) as driver:
        content = await driver.get(key)
        assert content.readonly
        try:
            content[0] = 1
        except TypeError:
            pass
        else:
            raise AssertionError("the view can be written to")
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(f"/{key}")]
        assert [line.split()[1] for line in maps] == ["r--s"], maps
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        refused = libc.mprotect(address_of(content), 4096, 3)
        assert (refused, ctypes.get_errno()) == (-1, errno.EACCES), "the kernel would let it be written to"
        for fd in Path("/proc/self/fd").iterdir():
            if fd.exists() and str(fd.readlink()).endswith(f"/{key}"):
                flags = Path(f"/proc/self/fdinfo/{fd.name}").read_text().split("flags:")[1].split()[0]
                assert int(flags, 8) & os.O_ACCMODE == os.O_RDONLY


if __name__ == "__main__":
    mode, tier_url, *rest = sys.argv[1:]
    if mode == "points":
        print(kill_at_every_point(tier_url))
    elif mode == "rank":
        asyncio.run(rank(tier_url, int(rest[0])))
    else:
        asyncio.run(read(tier_url, rest[0]))

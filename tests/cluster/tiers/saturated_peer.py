"""A peer server whose store is slow, in a process of its own, and a client that asks it for more than it takes."""

from __future__ import annotations

import asyncio
import sys

from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.peer import PeerServer
from tiercheck.tiers.peer.driver import PeerDriver
from tiercheck.tiers.peer.server.limits import PeerLimits
from tiercheck.types import ObjectInfo

CALLS = 8


class Slow(MemoryDriver):
    async def stat(self, key: str) -> ObjectInfo:
        await asyncio.sleep(6.0)
        return await super().stat(key)


async def serve() -> None:
    async def opened(name: str) -> Slow:
        driver = Slow()
        await driver.open()
        return driver

    server = PeerServer(opened, limits=PeerLimits(calls=CALLS))
    await server.start()
    print(server.endpoint, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await server.close()


async def ask(endpoint: str) -> None:
    async with PeerDriver("run", endpoint) as driver:
        asking = [asyncio.create_task(driver.stat(f"r{number}")) for number in range(CALLS + 1)]
        await asyncio.sleep(0.5)
        asking += [asyncio.create_task(driver.put(f"k{number}", [bytearray(4 << 20)])) for number in range(20)]
        await asyncio.sleep(0.5)
        print("asked", flush=True)
        await asyncio.gather(*asking)


if __name__ == "__main__":
    asyncio.run(ask(sys.argv[1]) if len(sys.argv) > 1 else serve())

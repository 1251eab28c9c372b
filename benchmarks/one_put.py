"""One large put in a process of its own, for whoever watches its memory: ``python -m benchmarks.one_put URL NBYTES``.

Opens the tier, says ``ready``, waits for a line, puts, says ``stored`` (or what went wrong), and ends with its
standard input. The payload is one buffer, again and again.
"""

from __future__ import annotations

import asyncio
import sys

from benchmarks.ceilings.buffers import filled_buffer
from tiercheck.errors import TierCheckError
from tiercheck.tiers.registry import make_driver

BUFFER_BYTES = (16 << 20) - 1
"""Odd on purpose: no buffer but the first starts where a driver would like it to."""


async def put_when_told(url: str, nbytes: int) -> None:
    block = filled_buffer(BUFFER_BYTES)
    payload = [block[: min(BUFFER_BYTES, nbytes - start)] for start in range(0, nbytes, BUFFER_BYTES)]
    async with make_driver(url) as driver:
        print("ready", flush=True)
        if not await asyncio.to_thread(sys.stdin.readline):
            return
        try:
            info = await driver.put("large", payload)
        except TierCheckError as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            print("stored" if info.nbytes == nbytes else f"{info.nbytes} bytes instead of {nbytes}", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(put_when_told(sys.argv[1], int(sys.argv[2])))

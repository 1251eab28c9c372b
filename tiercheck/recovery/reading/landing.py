"""Reads a long base in parts, some of them ahead, and verifies each part when it has come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from tiercheck.format.container import Shard, header_length
from tiercheck.format.index.logical import MASTER
from tiercheck.format.landing import LandedShard, Landing
from tiercheck.format.memory import fresh_memory
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ByteRange

__all__ = ["LONG_NBYTES", "landed"]

WINDOW_NBYTES = 16 << 20
WINDOWS = 3
"""How many windows there are: one is being verified, the others are being filled."""
LONG_NBYTES = 2 * WINDOW_NBYTES
"""Shorter objects are read by one call."""


async def landed(
    driver: TierDriver,
    key: str,
    tier: str,
    parsed: Callable[[memoryview, int], Shard],
    came: Callable[[int], None] = lambda _: None,
) -> LandedShard | None:
    """Read the base under this key, and verify all of it. Its trained tensors are placed in memory of their own, since
    they are copied once more. ``tier``: its name. ``parsed``: parses the header, from the header's bytes and the
    object's length. ``came``: told how many bytes have come. Needs the memory of the base and of :data:`WINDOWS`
    windows.

    Returns ``None`` if the object is shorter than :data:`LONG_NBYTES`, or its header longer than one window. Errors:
    those of the driver; ``Corruption``.
    """
    nbytes = (await driver.stat(key)).nbytes
    if nbytes < LONG_NBYTES:
        return None
    landing: Landing | None = None
    so_far = 0
    async with aclosing(_windows(driver, key, nbytes)) as windows:
        async for window in windows:
            so_far += len(window)
            came(so_far)
            begins = 0
            if landing is None:
                begins = header_length(window, key=key, tier=tier)
                if begins > len(window):
                    return None
                shard = parsed(memoryview(bytes(window[:begins])), nbytes)
                landing = Landing(shard, lambda name: name.startswith(MASTER))
            await asyncio.to_thread(landing.take, window[begins:])
    assert landing is not None
    return landing.finish()


async def _windows(driver: TierDriver, key: str, nbytes: int) -> AsyncGenerator[memoryview, None]:
    """The object's bytes from beginning to end. Each window holds its bytes until the next one is asked for."""
    free = deque(fresh_memory(WINDOW_NBYTES) for _ in range(WINDOWS))
    coming: deque[tuple[memoryview, asyncio.Future[memoryview]]] = deque()
    starts = deque(range(0, nbytes, WINDOW_NBYTES))
    try:
        while starts or coming:
            while starts and free:
                part = ByteRange(starts[0], min(starts.popleft() + WINDOW_NBYTES, nbytes))
                window = free.popleft()
                coming.append((window, asyncio.ensure_future(driver.get(key, range=part, into=window))))
            window, reading = coming.popleft()
            yield await reading
            free.append(window)
    finally:
        for _, reading in coming:
            reading.cancel()
            # Its error is taken, so that asyncio does not log it.
            reading.add_done_callback(lambda done: done.cancelled() or done.exception())

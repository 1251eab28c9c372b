"""Page-locked segments on a real GPU: copies land in them, at the speed of page-locked memory."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from tiercheck.tiers.shm.driver import ShmDriver
from tiercheck.tiers.shm.pinning import CudaPinning

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def gpu() -> None:
    pinning = CudaPinning("auto")
    if not pinning.available():
        pytest.skip(f"needs a GPU: {pinning.obstacle}")


async def test_copies_from_the_device_land_in_pinned_segments_again_and_again(name: str) -> None:
    cupy = pytest.importorskip("cupy", reason="needs cupy")
    nbytes = 16 * MIB
    async with ShmDriver(name, size=256 * MIB, pin="on") as driver:
        await driver.prepare_reservations([(nbytes, 2)])
        assert driver.facts()["pinned"] == "2 of the segments that are mapped"
        for n in range(8):
            device = cupy.full(nbytes, n, dtype=cupy.uint8)
            for used in (nbytes, nbytes - 5, nbytes // 2):
                reservation = await driver.reserve("a", nbytes)
                host = np.frombuffer(reservation.buffer, np.uint8)[:nbytes]
                attributes = cupy.cuda.runtime.pointerGetAttributes(host.ctypes.data)
                assert attributes.type == cupy.cuda.runtime.memoryTypeHost, "CUDA knows the memory as page-locked"
                device.get(out=host)
                del host
                await reservation.publish(used)
                assert bytes(await driver.get("a")) == bytes([n]) * used


async def test_pinned_memory_is_faster(name: str) -> None:
    cupy = pytest.importorskip("cupy", reason="needs cupy")
    nbytes = 256 * MIB
    device = cupy.zeros(nbytes, dtype=cupy.uint8)
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for pin in seconds:
        async with ShmDriver(f"{name}", size=1024 * MIB, pin=pin) as driver:
            await driver.prepare_reservations([(nbytes, 1)])
            for _ in range(5):
                reservation = await driver.reserve("a", nbytes)
                host = np.frombuffer(reservation.buffer, np.uint8)[:nbytes]
                began = time.perf_counter()
                device.get(out=host)
                seconds[pin].append(time.perf_counter() - began)
                del host
                await reservation.publish()
    assert statistics.median(seconds["on"]) < statistics.median(seconds["off"])

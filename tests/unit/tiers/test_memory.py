"""What only the memory tier does: names, limits, forgetting."""

from __future__ import annotations

import pytest

from tiercheck.errors import CapacityExceeded, NotFound
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.types import Survives


async def test_a_name_is_shared_and_no_name_is_not() -> None:
    async with make_driver("memory://shared") as one, make_driver("memory://shared") as two:
        await one.put("a", [b"x"])
        assert bytes(await two.get("a")) == b"x"
    async with make_driver("memory://shared") as again:
        assert bytes(await again.get("a")) == b"x"
    MemoryDriver.forget("shared")
    async with (
        make_driver("memory://shared") as anew,
        make_driver("memory://") as lonely,
        make_driver("memory://") as b,
    ):
        await lonely.put("a", [b"x"])
        for driver in (anew, b):
            with pytest.raises(NotFound):
                await driver.get("a")
    MemoryDriver.forget("shared")
    MemoryDriver.forget("shared")


async def test_the_limit() -> None:
    async with make_driver("memory://?size=1KiB") as driver:
        await driver.put("a", [bytes(1000)])
        reservation = await driver.reserve("b", 24)
        for attempt in (lambda: driver.put("c", [b"x"]), lambda: driver.reserve("c", 1)):
            with pytest.raises(CapacityExceeded, match="1 bytes do not fit: 1024 of 1024"):
                await attempt()
        await reservation.drop()
        await driver.put("c", [b"x"])
        assert (await driver.usage()).free_bytes == 23


def test_it_survives_nothing() -> None:
    assert make_driver("memory://").capabilities.survives is Survives.NOTHING

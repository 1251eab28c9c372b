"""The conformance kit on memory inside the tier."""

from __future__ import annotations

import asyncio
import random

import pytest

from tiercheck.errors import AlreadyExists, Closed, NotFound, Unsupported
from tiercheck.testing.contents import difference
from tiercheck.testing.driver_kit.base import TierKit
from tiercheck.tiers.driver import Reservation, TierDriver
from tiercheck.types import ObjectInfo, PutMode

__all__ = ["ReservationTests"]


class ReservationTests(TierKit):
    """``reserve``, where the driver is mappable; that it refuses, where not."""

    # Memory inside the tier.

    @pytest.mark.certifies("mappable")
    async def test_reserve_and_publish(self, driver: TierDriver) -> None:
        if not driver.capabilities.mappable:
            with pytest.raises(Unsupported):
                await driver.reserve("a", 10)
            return
        for nbytes in (0, 1, 4096, self.large_nbytes):
            key = f"reserved/{nbytes}"
            reservation = await driver.reserve(key, nbytes)
            buffer = reservation.buffer
            assert (buffer.nbytes, buffer.readonly, buffer.format) == (nbytes, False, "B")
            content = random.Random(3).randbytes(nbytes)
            buffer[:] = content
            assert await self.raw_get(driver, key) is None
            assert key not in await self.keys(driver)
            with pytest.raises(NotFound):
                await driver.stat(key)
            info = await reservation.publish()
            assert await driver.stat(key) == info
            assert not difference(await self.raw_get(driver, key), content)
            assert not difference(await self.content(driver, key), content)
            with pytest.raises(RuntimeError):
                await reservation.publish()
            await reservation.drop()
            assert not difference(await self.raw_get(driver, key), content)

    @pytest.mark.certifies("mappable")
    async def test_at_once_from_another_thread(self, driver: TierDriver) -> None:
        """From a thread that is not the event loop's, as training does; what a driver leaves out is awaited."""
        if not driver.capabilities.mappable:
            assert await asyncio.to_thread(driver.reserve_nowait, "a", 10) is None
            return
        await driver.put("a", [b"first"])
        for nbytes in (1, 4096, self.large_nbytes):
            before = (await driver.usage()).used_bytes
            reservation = await reserved_nowait(driver, "a", nbytes)
            assert (reservation.buffer.nbytes, reservation.buffer.readonly) == (nbytes, False)
            assert (await driver.usage()).used_bytes >= before + nbytes
            content = random.Random(nbytes).randbytes(nbytes)
            reservation.buffer[:] = content
            wanted = max(1, nbytes - 100)
            info = await published_nowait(reservation, wanted)
            assert await driver.stat("a") == info
            assert not difference(await self.raw_get(driver, "a"), content[:wanted])
            with pytest.raises(RuntimeError):
                await published_nowait(reservation)
            assert (await driver.usage()).used_bytes == wanted

    @pytest.mark.certifies("mappable")
    async def test_what_cannot_be_at_once_changes_nothing(self, driver: TierDriver) -> None:
        if not driver.capabilities.mappable:
            assert await asyncio.to_thread(driver.reserve_nowait, "a", 10) is None
            return
        await driver.put("a", [b"first"])
        for key, nbytes in (("../a", 10), ("a", -1)):
            with pytest.raises(ValueError):
                await reserved_nowait(driver, key, nbytes)
        reservation = await driver.reserve("a", 6)
        reservation.buffer[:] = b"second"
        for wrong in (-1, 7):
            with pytest.raises(ValueError):
                await published_nowait(reservation, wrong)
        with pytest.raises(AlreadyExists if driver.capabilities.conditional_put else Unsupported):
            await published_nowait(reservation, mode=PutMode.CREATE)
        assert await self.raw_get(driver, "a") == b"first"
        assert (await driver.usage()).used_bytes == 5

    @pytest.mark.certifies("mappable")
    async def test_part_of_a_reservation_is_published(self, driver: TierDriver) -> None:
        if not driver.capabilities.mappable:
            with pytest.raises(Unsupported):
                await driver.reserve("a", 10)
            return
        for nbytes in (0, 1, 5000, 9999, 10000):
            reservation = await driver.reserve("a", 10000)
            reservation.buffer[:] = b"0123456789" * 1000
            for wrong in (-1, 10001):
                with pytest.raises(ValueError):
                    await reservation.publish(wrong)
            info = await reservation.publish(nbytes)
            assert info.nbytes == nbytes
            assert not difference(await self.raw_get(driver, "a"), (b"0123456789" * 1000)[:nbytes])
        await driver.delete(["a"])
        assert (await driver.usage()).used_bytes == 0
        with pytest.raises(ValueError):
            await driver.reserve("a", -1)

    @pytest.mark.certifies("mappable")
    async def test_reservations_are_counted_and_given_back(self, driver: TierDriver) -> None:
        if not driver.capabilities.mappable:
            with pytest.raises(Unsupported):
                await driver.reserve("a", 10)
            return
        before = (await driver.usage()).used_bytes
        reservation = await driver.reserve("a", 1 << 20)
        assert (await driver.usage()).used_bytes >= before + (1 << 20)
        await reservation.drop()
        await reservation.drop()
        with pytest.raises(RuntimeError):
            await reservation.publish()
        assert (await driver.usage()).used_bytes == before
        assert await self.keys(driver) == []

    @pytest.mark.certifies("mappable")
    async def test_a_reservation_left_behind_is_no_object(self) -> None:
        driver = await self.make_driver()
        async with driver:
            if not driver.capabilities.mappable:
                with pytest.raises(Unsupported):
                    await driver.reserve("a", 10)
                return
            reservation = await driver.reserve("a", 1 << 20)
            reservation.buffer[:4] = b"half"
        with pytest.raises((Closed, RuntimeError)):
            await reservation.publish()
        async with await self.second_client(driver) as second:
            assert await self.keys(second) == []
            assert (await second.usage()).used_bytes == 0

    @pytest.mark.certifies("mappable")
    async def test_publishing_under_a_condition(self, driver: TierDriver) -> None:
        if not driver.capabilities.mappable:
            with pytest.raises(Unsupported):
                await driver.reserve("a", 10)
            return
        await driver.put("a", [b"first"])
        reservation = await driver.reserve("a", 6)
        reservation.buffer[:] = b"second"
        with pytest.raises(AlreadyExists if driver.capabilities.conditional_put else Unsupported):
            await reservation.publish(mode=PutMode.CREATE)
        with pytest.raises(RuntimeError):
            await reservation.publish()
        assert await self.raw_get(driver, "a") == b"first"
        assert (await driver.usage()).used_bytes == 5

    @pytest.mark.certifies("mappable")
    async def test_a_cancelled_reserve_keeps_nothing(self, driver: TierDriver) -> None:
        if not driver.capabilities.mappable:
            with pytest.raises(Unsupported):
                await driver.reserve("a", 10)
            return
        for turns in (0, 1, 2, 3, 5, 8, 13, 34, 89):
            reserving = asyncio.create_task(driver.reserve("a", self.large_nbytes))
            for _ in range(turns):
                await asyncio.sleep(0)
            reserving.cancel()
            await asyncio.wait({reserving})
            if not reserving.cancelled():
                await reserving.result().drop()
            assert (await driver.usage()).used_bytes == 0

    @pytest.mark.certifies("mappable")
    async def test_a_cancelled_publish_leaves_the_old_or_the_new(self, driver: TierDriver) -> None:
        if not driver.capabilities.mappable:
            with pytest.raises(Unsupported):
                await driver.reserve("a", 10)
            return
        for turns in (0, 1, 2, 3, 5, 8, 13, 34, 89):
            await driver.put("a", [b"old"])
            reservation = await driver.reserve("a", 1 << 18)
            reservation.buffer[:] = b"n" * (1 << 18)
            publishing = asyncio.create_task(reservation.publish())
            for _ in range(turns):
                await asyncio.sleep(0)
            publishing.cancel()
            await asyncio.wait({publishing})
            assert await self.raw_get(driver, "a") in (b"old", b"n" * (1 << 18))
            await reservation.drop()
            await driver.delete(["a"])
            assert (await driver.usage()).used_bytes == 0


async def reserved_nowait(driver: TierDriver, key: str, nbytes: int) -> Reservation:
    found = await asyncio.to_thread(driver.reserve_nowait, key, nbytes)
    return await driver.reserve(key, nbytes) if found is None else found


async def published_nowait(
    reservation: Reservation, nbytes: int | None = None, mode: PutMode = PutMode.OVERWRITE
) -> ObjectInfo:
    found = await asyncio.to_thread(reservation.publish_nowait, nbytes, mode=mode)
    return await reservation.publish(nbytes, mode=mode) if found is None else found

"""The conformance kit on writers: those that race, and those that are cancelled or killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest

from tiercheck.errors import AlreadyExists, NotFound, PreconditionFailed, TierError, Unsupported
from tiercheck.testing.contents import difference
from tiercheck.testing.driver_kit.base import TierKit
from tiercheck.testing.faults import FaultPlan, FaultyDriver, Killed
from tiercheck.testing.plugin import CRASHED
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ObjectInfo, PutMode, Survives

__all__ = ["WriterTests"]


class WriterTests(TierKit):
    """Several callers at once, and what one that stops half-way leaves behind."""

    # Conditional puts.

    @pytest.mark.certifies("conditional_put")
    async def test_create(self, driver: TierDriver) -> None:
        if not driver.capabilities.conditional_put:
            with pytest.raises(Unsupported):
                await driver.put("a", [b"x"], mode=PutMode.CREATE)
            assert await self.raw_get(driver, "a") is None
            return
        info = await driver.put("a", [b"first"], mode=PutMode.CREATE)
        with pytest.raises(AlreadyExists):
            await driver.put("a", [b"second"], mode=PutMode.CREATE)
        assert await self.raw_get(driver, "a") == b"first"
        assert await driver.stat("a") == info
        await driver.delete(["a"])
        await driver.put("a", [b"third"], mode=PutMode.CREATE)
        assert await self.raw_get(driver, "a") == b"third"

    @pytest.mark.certifies("conditional_put")
    async def test_update(self, driver: TierDriver) -> None:
        first = await driver.put("a", [b"first"])
        if not driver.capabilities.conditional_put:
            with pytest.raises(Unsupported):
                await driver.put("a", [b"x"], mode=PutMode.UPDATE(first.etag))
            assert await self.raw_get(driver, "a") == b"first"
            return
        second = await driver.put("a", [b"second"], mode=PutMode.UPDATE(first.etag))
        for stale in (first.etag, "", "no such etag"):
            with pytest.raises(PreconditionFailed):
                await driver.put("a", [b"third"], mode=PutMode.UPDATE(stale))
        assert await self.raw_get(driver, "a") == b"second"
        assert await driver.stat("a") == second
        await driver.delete(["a"])
        with pytest.raises(PreconditionFailed):
            await driver.put("a", [b"third"], mode=PutMode.UPDATE(second.etag))
        assert await self.raw_get(driver, "a") is None

    @pytest.mark.certifies("conditional_put")
    async def test_one_of_many_creators_wins(self, driver: TierDriver) -> None:
        if not driver.capabilities.conditional_put:
            with pytest.raises(Unsupported):
                await driver.put("race", [b"x"], mode=PutMode.CREATE)
            return
        async with await self.second_client(driver) as second:
            for round_number in range(self.races):
                key = f"race/{round_number}"
                clients = (driver, second)
                results = await asyncio.gather(
                    *(clients[n % 2].put(key, [b"%d" % n], mode=PutMode.CREATE) for n in range(8)),
                    return_exceptions=True,
                )
                won = [n for n, result in enumerate(results) if isinstance(result, ObjectInfo)]
                assert len(won) == 1, results
                assert sum(isinstance(result, AlreadyExists) for result in results) == 7, results
                assert await self.raw_get(driver, key) == b"%d" % won[0]

    @pytest.mark.certifies("conditional_put")
    async def test_no_increment_is_lost(self, driver: TierDriver) -> None:
        """5 workers x 10 increments by compare-and-swap make 50."""
        start = await driver.put("counter", [b"0"])
        if not driver.capabilities.conditional_put:
            with pytest.raises(Unsupported):
                await driver.put("counter", [b"1"], mode=PutMode.UPDATE(start.etag))
            return

        async def worker(client: TierDriver) -> None:
            for _ in range(10):
                while True:
                    etag = (await client.stat("counter")).etag
                    value = int(await self.content(client, "counter") or b"")
                    try:
                        await client.put("counter", [b"%d" % (value + 1)], mode=PutMode.UPDATE(etag))
                    except PreconditionFailed:
                        continue
                    break

        async with await self.second_client(driver) as second:
            await asyncio.gather(*(worker((driver, second)[n % 2]) for n in range(5)))
        assert await self.raw_get(driver, "counter") == b"50"

    # What writers leave behind.

    async def test_no_buffer_is_kept(self, driver: TierDriver) -> None:
        content = bytearray(b"0123456789" * 1000)
        view = memoryview(content)
        await driver.put("a", [view[:5000], view[5000:]])
        view.release()
        content[:] = b"!" * len(content)
        content.append(0)  # BufferError, were there still a view of it
        assert not difference(await self.content(driver, "a"), b"0123456789" * 1000)
        into = bytearray(10000)
        view = memoryview(into)
        (await driver.get("a", into=view)).release()
        view.release()
        into.append(0)

    async def test_no_buffer_is_kept_when_the_put_fails(self, driver: TierDriver) -> None:
        await driver.put("a", [b"first"])
        mode = PutMode.UPDATE("no such etag")
        content = bytearray(b"second")
        with pytest.raises((PreconditionFailed, Unsupported)) as caught:
            await driver.put("a", [content], mode=mode)
        content.append(0)
        assert caught.value.key == "a"
        assert await self.keys(driver) == ["a"]

    async def test_a_cancelled_put_leaves_the_old_or_the_new(self, driver: TierDriver) -> None:
        old, new = b"o" * self.large_nbytes, b"n" * self.large_nbytes
        await driver.put("a", [old])
        for turns in (0, 1, 2, 3, 5, 8, 13, 21, 55, 144, 377):
            buffer = bytearray(new)
            putting = asyncio.create_task(driver.put("a", [buffer[:10], memoryview(buffer)[10:]]))
            for _ in range(turns):
                await asyncio.sleep(0)
            putting.cancel()
            await asyncio.wait({putting})
            # The call has returned: the buffer is the caller's again, whatever the driver still does.
            buffer[:] = b"!" * len(buffer)
            first = await self.raw_get(driver, "a")
            assert first in (old, new)
            if not putting.cancelled():
                assert not difference(first, new), "a put that returned did publish"
            await driver.put("a", [old])
            assert not difference(await self.raw_get(driver, "a"), old)
        used = await driver.usage()
        assert used.used_bytes < 2 * self.large_nbytes, "a cancelled put leaves nothing lying about"

    async def test_a_cancelled_get_writes_no_more(self, driver: TierDriver) -> None:
        await driver.put("a", [b"x" * self.large_nbytes])
        for turns in (0, 1, 2, 5, 21, 89):
            into = bytearray(self.large_nbytes)
            getting = asyncio.create_task(driver.get("a", into=memoryview(into)))
            for _ in range(turns):
                await asyncio.sleep(0)
            getting.cancel()
            await asyncio.wait({getting})
            into[:] = bytes(self.large_nbytes)
            assert not difference(await self.content(driver, "a"), b"x" * self.large_nbytes)
            assert not any(into)

    async def test_readers_see_whole_objects_while_one_writes(self, driver: TierDriver) -> None:
        nbytes = 1 << 18
        await driver.put("a", [bytes([0]) * nbytes])
        async with await self.second_client(driver) as second:

            async def write() -> None:
                for n in range(1, self.overwrites):
                    await driver.put("a", [bytes([n]) * (nbytes // 2), bytes([n]) * (nbytes // 2 + n)])
                    await driver.put("b", [bytes([n]) * nbytes])
                    await driver.delete(["b"])

            def check(content: memoryview) -> None:
                assert not difference(content, bytes([content[0]]) * (nbytes + content[0]))

            writing = asyncio.create_task(write())
            into = memoryview(bytearray(nbytes + 256))
            held: list[memoryview] = []
            while not writing.done():
                check(await second.get("a", into=into))
                held = [await second.get("a"), *held[:4]]
                for content in held:
                    check(content)
                await asyncio.sleep(0)  # a driver that never waits would not let the writer go on
            await writing

    async def test_of_two_writers_one_is_last(self, driver: TierDriver) -> None:
        """Never a mixture, and stat, list and get speak of the same put."""
        nbytes = 1 << 18
        async with await self.second_client(driver) as second:
            for round_number in range(8):
                key = f"both/{round_number}"
                contents = [b"1" * nbytes, b"2" * (nbytes + 1)]
                infos = await asyncio.gather(driver.put(key, [contents[0]]), second.put(key, [contents[1]]))
                found = await self.content(driver, key)
                assert found in contents
                winner = infos[contents.index(found)]
                assert await driver.stat(key) == winner
                assert await second.stat(key) == winner
                assert [item async for item in second.list(key)] == [self.as_listed(second, winner)]

    async def test_two_clients_may_delete_the_same_objects(self, driver: TierDriver) -> None:
        keys = [f"d/{n}" for n in range(20)]
        async with await self.second_client(driver) as second:
            for _ in range(self.races):
                for key in keys:
                    await driver.put(key, [b"x"])
                await asyncio.gather(driver.delete(keys), second.delete(reversed(keys)))
                assert await self.keys(driver) == []

    async def test_readers_see_whole_objects_or_none_while_they_are_deleted(self, driver: TierDriver) -> None:
        content = bytes(range(256)) * 1024
        async with await self.second_client(driver) as second:

            async def come_and_go() -> None:
                for _ in range(self.overwrites):
                    await driver.put("a", [content])
                    await driver.delete(["a"])

            writing = asyncio.create_task(come_and_go())
            into = memoryview(bytearray(len(content)))
            while not writing.done():
                assert await self.content(second, "a") in (None, content)
                with contextlib.suppress(NotFound):
                    found = await second.get("a", into=into)
                    assert (found.format, difference(found, content)) == ("B", "")
                await asyncio.sleep(0)
            await writing
            assert await self.content(second, "a") is None

    async def test_a_crash_before_publish_leaves_no_trace(self, driver: TierDriver) -> None:
        await driver.put("old", [b"old"])
        crash = self.crash_before_publish(driver)
        if crash is not None:
            self.note(CRASHED, "before it published")
            with crash:
                for key in ("old", "new"):
                    with pytest.raises(Killed):
                        await driver.put(key, [b"half"])
                if driver.capabilities.mappable:
                    reservation = await driver.reserve("new", 4)
                    with pytest.raises(Killed):
                        await reservation.publish()
        async with await self.second_client(driver) as second:
            assert await self.keys(second) == ["old"]
            assert await self.content(second, "old") == b"old"
            await second.put("new", [b"new"])
        assert await self.raw_get(driver, "new") == b"new"

    async def test_what_a_living_writer_has_begun_is_no_leftover(self, driver: TierDriver) -> None:
        """Neither is an object."""
        await driver.put("kept", [b"kept"])
        begun = await driver.reserve("begun", 4) if driver.capabilities.mappable else None
        async with await self.second_client(driver) as second:

            async def write() -> None:
                for _ in range(self.overwrites):
                    await driver.put("a", [b"a" * self.large_nbytes])

            writing = asyncio.create_task(write())
            while not writing.done():
                assert not await second.leftovers()
                await asyncio.sleep(0)
            await writing
            if begun is not None:
                begun.buffer[:] = b"done"
                await begun.publish()
            assert not await second.leftovers()
            assert await self.keys(second) == ["a", *(["begun"] if begun else []), "kept"]

    async def test_whoever_asks_for_leftovers_changes_nothing(self, driver: TierDriver) -> None:
        await driver.put("old", [b"old"])
        crash = self.crash_before_publish(driver)
        if crash is not None:
            with crash, pytest.raises(Killed):
                await driver.put("new", [b"half"])
        async with await self.second_client(driver) as second:
            first = await second.leftovers()
            assert [(each.what, each.name) for each in await second.leftovers()] == [
                (each.what, each.name) for each in first
            ], "whoever asks again is told the same"
            for each in first:
                assert each.what, each.name
                assert each.age_s >= 0
                assert each.nbytes is None or each.nbytes >= 0
            assert await self.keys(second) == ["old"]
        assert await self.raw_get(driver, "old") == b"old"

    async def test_a_kill_at_any_point_of_a_put_leaves_the_old_or_the_new(self, driver: TierDriver) -> None:
        async def overwrite(plan: FaultPlan) -> None:
            faulty = FaultyDriver(await self.second_client(driver), plan)
            async with faulty:
                await faulty.put("a", [b"new", b"er"])
                if driver.capabilities.mappable:
                    reservation = await faulty.reserve("b", 5)
                    reservation.buffer[:] = b"newer"
                    await reservation.publish()

        # A client may suspend more often in one run than in the next. So they are not counted beforehand: each run is
        # killed one point later, until one ends before it gets there.
        for n in itertools.count():
            for key in ("a", "b"):
                await driver.put(key, [b"old"])
            killed = False
            try:
                await overwrite(FaultPlan.kill_at(n))
            except Killed:
                killed = True
            allowed = (b"old", b"newer") if killed else (b"newer",)
            assert await self.raw_get(driver, "a") in allowed
            assert await self.raw_get(driver, "b") in (allowed if driver.capabilities.mappable else (b"old",))
            assert await self.keys(driver) == ["a", "b"]
            if not killed:
                break
        assert n >= 6

    async def test_a_buffer_read_keeps_its_content(self, driver: TierDriver) -> None:
        """Across an overwrite, a delete, and whatever is written next into memory that became free."""
        nbytes = 1 << 20
        held = []
        for n in range(12):
            key = f"k/{n % 2}"
            await driver.put(key, [bytes([n]) * nbytes])
            held.append(await driver.get(key, range=None))
            if n % 3 == 2:
                await driver.delete([key])
            for index, content in enumerate(held):
                assert not difference(content, bytes([index]) * nbytes)
        del held

    async def test_concurrent_calls_do_not_mix(self, driver: TierDriver) -> None:
        async def one(n: int) -> None:
            content = bytes([n]) * (10_000 + n)
            await driver.put(f"c/{n}", [content])
            into = memoryview(bytearray(len(content)))
            found = await driver.get(f"c/{n}", into=into)
            assert (found.format, difference(found, content)) == ("B", "")
            assert (await driver.stat(f"c/{n}")).nbytes == len(content)
            if n % 2:
                await driver.delete([f"c/{n}"])

        await asyncio.gather(*(one(n) for n in range(40)))
        assert await self.keys(driver) == sorted(f"c/{n}" for n in range(0, 40, 2))

    async def test_capabilities_are_constant_while_open(self) -> None:
        """What opening finds out about the tier may change them; nothing after that."""
        driver = await self.make_driver()
        assert isinstance(driver.capabilities.survives, Survives)
        async with driver:
            opened = driver.capabilities
            await driver.put("a", [b"x"])
            await driver.delete(["a"])
            assert driver.capabilities == opened
            assert opened.part_bytes > 0
            assert opened.parts_in_flight > 0

    async def test_errors_are_tier_errors_that_name_the_tier(self, driver: TierDriver) -> None:
        with pytest.raises(TierError) as caught:
            await driver.stat("absent")
        assert "absent" in str(caught.value)
        assert driver.url in str(caught.value)

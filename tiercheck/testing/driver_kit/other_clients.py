"""The conformance kit on other clients: those that no event loop makes take turns, and those that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator

import pytest

from tiercheck.errors import NotFound, Unsupported
from tiercheck.testing.contents import difference
from tiercheck.testing.driver_kit import process_client
from tiercheck.testing.driver_kit.base import TierKit
from tiercheck.testing.driver_kit.process_client import InAnotherProcess, InAnotherThread, Job, OtherClient
from tiercheck.testing.plugin import KILLED, OTHER_CLIENT
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import PutMode, Survives

__all__ = ["OtherClientTests"]

GIVE_ONE = (
    "what outlives its process can be opened by another: let client_factory() return what makes a driver there, "
    "such as functools.partial(make_driver, url)"
)


class OtherClientTests(TierKit):
    """The driver here, and a client in another process; in another thread if no process can open the tier."""

    @contextlib.asynccontextmanager
    async def doing(self, driver: TierDriver, job: Job, *arguments: object) -> AsyncIterator[OtherClient]:
        """Another client that is open, and waits for the word to do ``job``."""
        make = self.client_factory(driver)
        other: OtherClient
        if make is None:
            assert driver.capabilities.survives is Survives.NOTHING, GIVE_ONE
            other = InAnotherThread(await self.second_client(driver), job, *arguments)
        else:
            other = InAnotherProcess(make, job, *arguments)
        self.note(OTHER_CLIENT, other.place)
        try:
            await other.ready()
            yield other
        finally:
            await other.end()

    @pytest.mark.certifies("conditional_put")
    async def test_of_creators_against_another_client_one_wins(self, driver: TierDriver) -> None:
        if not driver.capabilities.conditional_put:
            with pytest.raises(Unsupported):
                await driver.put("race/0", [b"here"], mode=PutMode.CREATE)
            assert await self.raw_get(driver, "race/0") is None
            return
        names = ("here", "there")
        limits = (self.races, self.race_s)
        async with self.doing(driver, process_client.create_all, names[1], -1, *limits) as other:
            begin = time.monotonic() + 0.01  # when the word has arrived
            other.go(begin)
            won_here = await process_client.create_all(driver, no_word, names[0], 0, *limits, begin)
            won_there = await other.result()
        for n, won in enumerate(itertools.zip_longest(won_here, won_there, fillvalue=False)):
            winners = [name for name, it_won in zip(names, won, strict=True) if it_won]
            assert len(winners) == 1, f"race/{n} was created by {winners or 'nobody'}"
            assert await self.raw_get(driver, f"race/{n}") == winners[0].encode()

    @pytest.mark.certifies("conditional_put")
    async def test_no_increment_of_another_client_is_lost(self, driver: TierDriver) -> None:
        start = await driver.put("counter", [b"0"])
        if not driver.capabilities.conditional_put:
            with pytest.raises(Unsupported):
                await driver.put("counter", [b"1"], mode=PutMode.UPDATE(start.etag))
            return
        async with self.doing(driver, process_client.increment, "counter", self.race_s) as other:
            other.go()
            here = await process_client.increment(driver, no_word, "counter", self.race_s)
            there = await other.result()
        assert await self.raw_get(driver, "counter") == b"%d" % (len(here) + len(there))
        assert len({start.etag, *here, *there}) == 1 + len(here) + len(there), "an etag came back"

    async def test_readers_see_whole_objects_while_another_client_writes(self, driver: TierDriver) -> None:
        nbytes = 1 << 18
        await driver.put("kept", process_client.payload_of(0, nbytes))
        into = memoryview(bytearray(nbytes + process_client.GENERATIONS))
        job = (process_client.overwrite, "kept", "passing", nbytes, self.races, self.race_s)
        async with self.doing(driver, *job) as other:
            other.go()
            writing = asyncio.create_task(other.result())
            reads = 0
            try:
                while reads < self.races or not writing.done():
                    reads += 1
                    await self.check_reads(driver, "kept", nbytes, into)
                    with contextlib.suppress(NotFound):
                        await self.check_reads(driver, "passing", nbytes, into)
                    await asyncio.sleep(0)
                assert await writing >= self.races
            finally:
                writing.cancel()
                await asyncio.wait({writing})
        assert await self.raw_get(driver, "passing") is None

    @staticmethod
    async def check_reads(driver: TierDriver, key: str, nbytes: int, into: memoryview) -> None:
        found = await driver.get(key)
        assert process_client.is_whole(found, nbytes), (
            f"{key} was read as {found.nbytes} bytes, {bytes(found[:8])!r}..."
        )
        found = await driver.get(key, into=into)
        assert process_client.is_whole(found, nbytes), f"{key} was read as {found.nbytes} bytes into a buffer"
        assert nbytes <= (await driver.stat(key)).nbytes < nbytes + process_client.GENERATIONS

    async def test_kill_9_in_a_large_put_leaves_the_old_or_the_new(self, driver: TierDriver) -> None:
        """What was acknowledged stays; what was under way is there whole, or not at all."""
        if self.client_factory(driver) is None:
            # Nothing but this process could be killed, and what the tier holds would go with it.
            assert driver.capabilities.survives is Survives.NOTHING, GIVE_ONE
            return
        chance = random.Random(8)
        job = (process_client.write_until_killed, "kept", "fresh", self.kill_nbytes)
        for _ in range(self.kills):
            await driver.put("kept", process_client.payload_of(0, self.kill_nbytes))
            await driver.delete(["fresh"])
            async with self.doing(driver, *job) as other:
                assert isinstance(other, InAnotherProcess)
                other.go()
                generation = await other.told()
                for _ in range(chance.randint(2, 3)):  # one of either kind
                    began = time.monotonic()
                    generation = await other.told()
                await asyncio.sleep(chance.random() * (time.monotonic() - began))  # about as long as a put takes
                generation = max([generation, *await other.killed()])
            self.note(KILLED, "kill -9")
            await self.check_what_a_kill_left(driver, generation)

    async def check_what_a_kill_left(self, driver: TierDriver, generation: int) -> None:
        """``generation`` was the last one that was begun."""
        async with await self.second_client(driver) as second:
            for client in (driver, second):
                listed = await self.keys(client)
                for key, allowed in may_remain(generation).items():
                    content = await self.content(client, key)
                    assert not difference(content, await self.raw_get(driver, key)), key
                    assert (key in listed) == (content is not None)
                    found = None if content is None else content[:1] or b"nothing"
                    whole = content is None or process_client.is_whole(content, self.kill_nbytes)
                    assert whole, f"after kill -9 {key} has {len(content or b'')} bytes of {found!r}..., and others"
                    assert found in allowed, f"after kill -9 {key} is {found!r}, which is none of {allowed}"
                assert set(listed) <= {"kept", "fresh"}, "what the dead left is no object"
            await second.put("fresh", [b"after the death"])
        assert await self.content(driver, "fresh") == b"after the death"


def may_remain(generation: int) -> dict[str, set[bytes | None]]:
    """By key, the first bytes of what may be there when ``generation`` has begun; ``None``: no object."""

    def first(number: int) -> bytes:
        return bytes([number % process_client.GENERATIONS])

    if generation % 2:
        before = first(generation - 1) if generation > 1 else None
        return {"kept": {first(max(generation - 2, 0)), first(generation)}, "fresh": {before}}
    before = first(generation - 2) if generation > 2 else None
    return {"kept": {first(generation - 1)}, "fresh": {before, None, first(generation)}}


def no_word(value: object) -> None:
    """Here nobody listens."""

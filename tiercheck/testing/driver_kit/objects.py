"""The conformance kit on objects one by one: opening and closing, putting and getting, keys, listing."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import pytest

from tiercheck.errors import Closed, NotFound, Unsupported
from tiercheck.keys import ShardKey
from tiercheck.runtime.turns import in_turns
from tiercheck.testing.blocking import waits_on_this_thread
from tiercheck.testing.contents import difference
from tiercheck.testing.driver_kit.base import TierKit
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ByteRange, Payload, Survives

__all__ = ["BAD_KEYS", "GOOD_KEYS", "ObjectTests"]

BAD_KEYS = (
    "", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a\0b", "a\nb", "a\\b", "a\x7f", "a\ud800",
    "k" * 256, "/".join(["k" * 100] * 6),
)  # fmt: skip
GOOD_KEYS = (
    "a",
    "a b",
    "a.b",
    "a/b.c/d",
    "é/ü",
    "日本語",
    "%2e%2e",
    "a?b=c",
    "a#b",
    "~",
    "-",
    "k" * 255,
    ".hidden",
    "a:b",
)
PAYLOADS: dict[str, Payload] = {
    "no buffer": [],
    "empty": [b""],
    "1 byte": [b"x"],
    "mixed": [b"", b"ab", b"", bytearray(b"cde"), memoryview(b"fgh")[1:]],
    "2500 buffers": [bytes([n % 256]) for n in range(2500)],
    "1 MiB": [bytes(range(256)) * 4096, b"tail"],
}

KEY_BYTES_NEEDED = len(str(ShardKey.differential(1, 1, 2, 0)))
"""What the longest of TierCheck's own keys takes."""


class ObjectTests(TierKit):
    """One client, one call at a time."""

    # Opening and closing.

    async def test_calls_outside_of_open_and_close_raise_closed(self) -> None:
        driver = await self.make_driver()
        await self.check_closed(driver)
        async with driver:
            await driver.put("a", [b"x"])
            with pytest.raises(RuntimeError):
                await driver.open()
            assert await self.content(driver, "a") == b"x"
        await driver.close()
        await self.check_closed(driver)

    async def test_no_call_waits_on_the_event_loop(self) -> None:
        """All tiers of a process share one event loop: what waits for a disk or a network does so in a thread, or by
        ``await``. A tier that lives in a node's memory may call the file system that is there."""
        driver = await self.make_driver()
        in_memory = driver.capabilities.survives <= Survives.PROCESS or driver.capabilities.mappable
        with waits_on_this_thread(files=False) as at_open:
            await driver.open()
        try:
            large = random.Random(7).randbytes(self.large_nbytes)
            with waits_on_this_thread(files=not in_memory) as at_calls:
                await driver.put("some/large", [large[:1000], large[1000:]])
                await driver.put("some/small", [b"small"])
                assert not difference(await self.content(driver, "some/large"), large)
                into = memoryview(bytearray(self.large_nbytes))
                assert not difference(await driver.get("some/large", into=into), large)
                assert (await driver.stat("some/small")).nbytes == len(b"small")
                assert await self.keys(driver, "some/") == ["some/large", "some/small"]
                await driver.usage()
                await driver.leftovers()
                await driver.delete(["some/large", "some/small"])
        finally:
            with waits_on_this_thread(files=False) as at_close:
                await driver.close()
        found = "".join([*at_open, *at_calls, *at_close])
        assert not found, f"what waits must not do so on the event loop (asyncio.to_thread can do it):\n{found}"

    async def check_closed(self, driver: TierDriver) -> None:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: driver.put("a", [b""]),
            lambda: driver.get("a"),
            lambda: driver.stat("a"),
            lambda: self.keys(driver),
            lambda: driver.delete(["a"]),
            driver.usage,
        ]
        if driver.capabilities.mappable:
            calls.append(lambda: driver.reserve("a", 1))
        for call in calls:
            with pytest.raises(Closed):
                await call()

    async def test_objects_stay_when_the_driver_closes(self) -> None:
        driver = await self.make_driver()
        async with driver:
            info = await driver.put("a/b", [b"content"])
        async with await self.second_client(driver) as second:
            assert await self.content(second, "a/b") == b"content"
            assert await second.stat("a/b") == info

    async def test_the_url_names_the_tier(self, driver: TierDriver) -> None:
        assert "://" in driver.url
        with pytest.raises(NotFound) as caught:
            await driver.get("absent/object")
        assert (caught.value.tier, caught.value.key) == (driver.url, "absent/object")

    # Putting and getting.

    async def test_what_is_put_is_what_is_there(self, driver: TierDriver) -> None:
        for name, payload in PAYLOADS.items():
            expected = b"".join(payload)
            info = await driver.put("some/object", payload)
            assert (info.key, info.nbytes) == ("some/object", len(expected)), name
            assert info.etag, name
            assert await self.raw_get(driver, "some/object") == expected, name
            assert await self.content(driver, "some/object") == expected, name
            assert await driver.stat("some/object") == info, name
            assert [found async for found in driver.list()] == [self.as_listed(driver, info)], name
            await driver.delete(["some/object"])

    async def test_what_others_put_is_read(self, driver: TierDriver) -> None:
        await self.raw_put(driver, "from/outside", b"raw")
        assert await self.content(driver, "from/outside") == b"raw"
        assert (await driver.stat("from/outside")).nbytes == 3
        assert await self.keys(driver) == ["from/outside"]

    async def test_a_large_object_goes_round(self, driver: TierDriver) -> None:
        content = random.Random(1).randbytes(self.large_nbytes)
        cuts = [0, 1, 4097, self.large_nbytes // 2, self.large_nbytes]
        await driver.put("large", [content[a:b] for a, b in itertools.pairwise(cuts)])
        assert not difference(await self.raw_get(driver, "large"), content)
        into = bytearray(self.large_nbytes + 5)
        filled = await driver.get("large", into=memoryview(into))
        assert filled.nbytes == self.large_nbytes
        assert not difference(into, content + bytes(5))

    async def test_a_put_that_waits_between_its_parts_is_whole(self, driver: TierDriver) -> None:
        """Asking before a part is optional. Who asks tells no more bytes than it sends, parts sent again included."""
        content = random.Random(2).randbytes(self.large_nbytes)

        class Waiting:
            asked = 0

            async def turn(self, nbytes: int) -> None:
                self.asked += nbytes
                await asyncio.sleep(0.001)

        waiting = Waiting()
        with in_turns(waiting):
            await driver.put("large", [content])
        assert not difference(await self.raw_get(driver, "large"), content)
        assert waiting.asked % self.large_nbytes == 0, "it asks for all of it, or for nothing"

    @pytest.mark.certifies("ranged_get")
    async def test_ranges(self, driver: TierDriver) -> None:
        await driver.put("a", [b"0123456789"])
        if not driver.capabilities.ranged_get:
            with pytest.raises(Unsupported):
                await driver.get("a", range=ByteRange(0, 1))
            return
        for start, stop in [(0, 10), (0, 0), (10, 10), (3, 7), (9, 10)]:
            expected = b"0123456789"[start:stop]
            assert bytes(await driver.get("a", range=ByteRange(start, stop))) == expected
            into = bytearray(b"." * 12)
            found = await driver.get("a", range=ByteRange(start, stop), into=memoryview(into)[1:])
            assert bytes(found) == expected
            assert into == b"." + expected + b"." * (11 - len(expected))
        for start, stop in [(0, 11), (10, 11), (11, 12), (11, 11)]:
            with pytest.raises(ValueError):
                await driver.get("a", range=ByteRange(start, stop))

    @pytest.mark.certifies("ranged_get")
    async def test_ranges_of_a_large_object(self, driver: TierDriver) -> None:
        content = random.Random(4).randbytes(self.large_nbytes)
        await driver.put("large", [content])
        cuts = [0, 1, 4096, self.large_nbytes // 3, self.large_nbytes - 4097, self.large_nbytes]
        wanted = [ByteRange(start, stop) for start, stop in itertools.combinations(cuts, 2)]
        if not driver.capabilities.ranged_get:
            for each in wanted:
                with pytest.raises(Unsupported):
                    await driver.get("large", range=each)
            return
        found = await asyncio.gather(*(driver.get("large", range=each) for each in wanted))
        for each, part in zip(wanted, found, strict=True):
            off = difference(part, content[each.start : each.stop])
            assert not off, f"{each}: {off}"

    async def test_into_must_be_large_enough(self, driver: TierDriver) -> None:
        await driver.put("a", [b"0123456789"])
        into = bytearray(9)
        with pytest.raises(ValueError):
            await driver.get("a", into=memoryview(into))
        assert into == bytes(9)

    async def test_what_get_returns_is_read_only(self, driver: TierDriver) -> None:
        await driver.put("a", [b"0123456789"])
        found = await driver.get("a")
        assert (found.readonly, found.format, found.contiguous, found.ndim) == (True, "B", True, 1)

    async def test_absent_objects(self, driver: TierDriver) -> None:
        await driver.put("a/b", [b"x"])
        for key in ("b", "a/c", "a", "a/b/c"):
            for call in (driver.get, driver.stat):
                with pytest.raises(NotFound):
                    await call(key)
            await driver.delete([key])
        with pytest.raises(NotFound):
            await driver.get("b", into=memoryview(bytearray(4)))
        assert await self.keys(driver) == ["a/b"]

    async def test_overwriting_changes_content_and_etag(self, driver: TierDriver) -> None:
        etags = set()
        for content in (b"one", b"two", b"", b"three" * 1000, b"two", b"two"):
            info = await driver.put("a", [content])
            etags.add(info.etag)
            assert await self.raw_get(driver, "a") == content
            assert await self.content(driver, "a") == content
            assert await driver.stat("a") == info
        assert len(etags) == 6

    async def test_an_etag_does_not_return_with_the_key(self, driver: TierDriver) -> None:
        etags = set()
        for _ in range(10):
            etags.add((await driver.put("a", [b"same"])).etag)
            await driver.delete(["a"])
        assert len(etags) == 10

    # Keys.

    async def test_unsafe_keys_are_refused(self, driver: TierDriver) -> None:
        await driver.put("a", [b"kept"])
        for key in BAD_KEYS:
            calls: list[Callable[[], Awaitable[object]]] = [
                partial(driver.put, key, [b"x"]),
                partial(driver.get, key),
                partial(driver.stat, key),
                partial(driver.delete, ["a", key]),
            ]
            if driver.capabilities.mappable:
                calls.append(partial(driver.reserve, key, 1))
            for call in calls:
                try:
                    await call()
                except ValueError:
                    continue
                pytest.fail(f"the key {key!a} is taken by {call}")
            assert await self.keys(driver) == ["a"], f"{key!a} is to be refused before anything is touched"

    async def test_odd_but_safe_keys_are_taken_as_they_are(self, driver: TierDriver) -> None:
        for key in GOOD_KEYS:
            if key != "a":  # beside "a/b.c/d" it is the next test's
                await driver.put(key, [key.encode()])
        for key in set(GOOD_KEYS) - {"a"}:
            assert await self.content(driver, key) == key.encode()
        assert await self.keys(driver) == sorted(set(GOOD_KEYS) - {"a"}, key=str.encode)

    @pytest.mark.certifies("key_bytes_max")
    async def test_keys_of_the_longest_length_are_taken_and_longer_ones_refused(self, driver: TierDriver) -> None:
        longest = driver.capabilities.key_bytes_max
        assert longest >= KEY_BYTES_NEEDED, "TierCheck's own keys must fit"
        key = "/".join(["k" * 99] * (longest // 100 + 1))[:longest].removesuffix("/")
        key += "k" * (longest - len(key))
        await driver.put(key, [b"x"])
        assert await self.content(driver, key) == b"x"
        assert await self.keys(driver) == [key]
        with pytest.raises(ValueError):
            await driver.put(key + "k", [b"x"])
        await driver.delete([key])
        assert await self.keys(driver) == []

    async def test_keys_above_and_below_each_other(self, driver: TierDriver) -> None:
        """Either the tier holds both, or it refuses the second as unsupported and keeps the first."""
        for first, second in (("a", "a/b"), ("x/y/z", "x/y"), ("p", "p/q/r")):
            await driver.put(first, [b"first"])
            try:
                await driver.put(second, [b"second"])
            except Unsupported:
                assert await self.content(driver, second) is None
            else:
                assert await self.content(driver, second) == b"second"
            assert await self.content(driver, first) == b"first"

    # Listing, deleting, counting.

    async def test_list_is_in_byte_order_and_filtered_by_prefix(self, driver: TierDriver) -> None:
        keys = ["a-b", "a/b", "a/b-c", "a/b0", "a/é", "a0", "aé", "b/c/d", "B", "b.c", "z"]
        for key in random.Random(2).sample(keys, len(keys)):
            await driver.put(key, [key.encode()])
        ordered = sorted(keys, key=str.encode)
        prefixes = [
            "",
            "a",
            "a/",
            "a/b",
            "a/b-",
            "b",
            "b/c",
            "b/c/",
            "b/c/d",
            "b/c/d/",
            "nothing",
            "é",
            "/",
            "..",
            "a//",
        ]
        for prefix in prefixes:
            assert await self.keys(driver, prefix) == [key for key in ordered if key.startswith(prefix)], prefix
        assert [found.nbytes async for found in driver.list()] == [len(key.encode()) for key in ordered]

    async def test_list_is_complete_over_many_pages(self, driver: TierDriver) -> None:
        keys = [f"many/{n % 7}/{n:05d}" for n in range(self.listed)]
        for start in range(0, len(keys), 50):
            await asyncio.gather(*(driver.put(key, [b"."]) for key in keys[start : start + 50]))
        assert await self.keys(driver, "many/") == sorted(keys)
        assert await self.keys(driver, "many/3/") == sorted(key for key in keys if key.startswith("many/3/"))

    async def test_list_shows_what_stays_while_others_come_and_go(self, driver: TierDriver) -> None:
        staying = [f"d/{n:03d}" for n in range(0, 60, 2)]
        for key in staying:
            await driver.put(key, [b"stays"])

        async def churn() -> None:
            for n in range(1, 60, 2):
                await driver.put(f"d/{n:03d}", [b"goes"])
                await driver.put(staying[n // 2], [b"stays"])
                await driver.delete([f"d/{n:03d}"])

        churning = asyncio.create_task(churn())
        while not churning.done():
            found = await self.keys(driver, "d/")
            assert found == sorted(set(found))
            assert set(staying) <= set(found)
            await asyncio.sleep(0)  # a driver that never waits would not let the others come and go
        await churning

    async def test_delete(self, driver: TierDriver) -> None:
        for key in ("a/b/c", "a/b/d", "e"):
            await driver.put(key, [b"x"])
        await driver.delete([])
        await driver.delete(["a/b/c", "absent", "a/absent", "a/b/c"])
        assert await self.raw_get(driver, "a/b/c") is None
        assert await self.keys(driver) == ["a/b/d", "e"]
        await driver.delete(key for key in ("a/b/d", "e"))
        assert await self.keys(driver) == []
        await driver.put("a/b", [b"a key where others lay below"])
        assert await self.keys(driver) == ["a/b"]

    async def test_who_opens_it_to_read_finds_what_is_there(self, driver: TierDriver) -> None:
        await driver.put("a/b", [b"content"])
        reader = await self.second_client(driver)
        await reader.open_to_read()
        try:
            assert await self.content(reader, "a/b") == b"content"
            assert await self.keys(reader) == ["a/b"]
            assert (await reader.stat("a/b")).nbytes == 7
        finally:
            await reader.close()

    async def test_usage_grows_and_shrinks(self, driver: TierDriver) -> None:
        nbytes = 1 << 20
        before = (await driver.usage()).used_bytes
        await driver.put("a", [bytes(nbytes)])
        await driver.put("b", [bytes(nbytes)])
        usage = await driver.usage()
        assert usage.used_bytes - before >= 2 * nbytes
        assert usage.limit_bytes is None or usage.limit_bytes >= usage.used_bytes
        await driver.put("a", [b"x"])
        assert nbytes <= (await driver.usage()).used_bytes - before < 2 * nbytes
        await driver.delete(["a", "b"])
        assert (await driver.usage()).used_bytes == before

    # What it says of itself.

    async def test_facts_are_short_texts(self) -> None:
        driver = await self.make_driver()
        check_texts(driver.facts())
        async with driver:
            check_texts(driver.facts())
            assert "://" in driver.url
        check_texts(driver.facts())

    async def test_preparing_is_a_hint(self, driver: TierDriver) -> None:
        await driver.prepare_reservations([(4096, 2), (self.large_nbytes, 1), (0, 1)])
        await driver.prepare_reservations([(4096, 2)])
        assert await self.keys(driver) == []
        await driver.put("a", [b"x"])
        assert await self.content(driver, "a") == b"x"

    async def test_expecting_is_a_hint(self, driver: TierDriver) -> None:
        content = bytes(self.large_nbytes)
        await driver.put("a", [content])
        for nbytes in (10, 0):
            await driver.expect(nbytes)
            await driver.put("b", [content])
            for key in ("a", "b"):
                assert not difference(await self.content(driver, key), content), key


def check_texts(facts: Mapping[str, str]) -> None:
    for name, value in facts.items():
        assert isinstance(name, str)
        assert isinstance(value, str)
        assert name
        assert "\n" not in name + value

"""Sealed records: damage, another key's record and what is too large are told apart from every record there is."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from tiercheck.errors import ConfigurationError, Corruption, NotFound
from tiercheck.format import host_state
from tiercheck.format.host_state import Unstorable
from tiercheck.keys import ClaimKey, CommitKey, JobKey, Key, LineageKey, MarkerKey, ShardKey
from tiercheck.policy.commit import CommitRecord
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.replication.objects.records import HEAD_NBYTES, MAGIC, digest_of, nbytes_max, read_record, seal, unseal
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.registry import make_driver

KEY = ClaimKey(2, "ab" * 8)
VALUE = {"generation": 2, "parent": 1, "left_at": 7, "token": "ab" * 8}
KINDS: list[Key] = [KEY, LineageKey(2), JobKey(0), MarkerKey(CommitKey(2, 7), 0), CommitKey(2, 7)]


@pytest.mark.parametrize("key", KINDS, ids=str)
def test_a_record_comes_back(key: Key) -> None:
    assert unseal(seal(key, VALUE), dict, key=key, tier="shm") == VALUE


def test_every_flipped_bit_and_every_length_is_corruption_that_names_key_and_tier() -> None:
    sealed = seal(KEY, VALUE)
    damaged = [sealed[:length] for length in range(len(sealed))]
    for position in range(len(sealed)):
        for bit in range(8):
            flipped = bytearray(sealed)
            flipped[position] ^= 1 << bit
            damaged.append(bytes(flipped))
    for content in [*damaged, sealed + b"\0", host_state.pack(VALUE)]:
        with pytest.raises(Corruption) as caught:
            unseal(content, dict, key=KEY, tier="shm")
        assert (caught.value.tier, caught.value.key) == ("shm", str(KEY))


@pytest.mark.parametrize("other", [key for key in KINDS if key != KEY] + [LineageKey(3)], ids=str)
def test_a_record_under_another_key_is_corruption(other: Key) -> None:
    with pytest.raises(Corruption, match="belongs under another key"):
        unseal(seal(KEY, VALUE), dict, key=other, tier="shm")


@pytest.mark.parametrize("value", [{"token": "x" * 2000}, list(range(100)), 10**100, [[[[[[[0]]]]]]], "\ud800"])
def test_what_no_reader_would_take_is_not_written(value: object) -> None:
    with pytest.raises(Unstorable, match="job/lineage/g000002"):
        seal(KEY, value)


def test_a_record_well_sealed_and_too_large_is_corruption() -> None:
    for body in (host_state.pack("x" * 2000), host_state.pack([0] * 100), host_state.pack(10**100), b"\xc1"):
        with pytest.raises(Corruption):
            unseal(MAGIC + digest_of(KEY, body) + body, dict, key=KEY, tier="shm")


def test_a_shard_is_no_record() -> None:
    with pytest.raises(ValueError, match="names a shard"):
        seal(ShardKey.base(1, 0, 0), VALUE)


def test_nothing_longer_than_a_record_is_fetched() -> None:
    async def run() -> None:
        async with make_driver("memory://") as driver:
            assert isinstance(driver, MemoryDriver)
            with pytest.raises(NotFound):
                await read_record(driver, KEY, dict)
            await driver.put(str(KEY), [seal(KEY, VALUE)])
            assert await read_record(driver, KEY, dict) == VALUE
            await driver.put(str(KEY), [bytes(nbytes_max(KEY) + 1)])
            with pytest.raises(Corruption, match="at most"):
                await read_record(driver, KEY, dict)

    asyncio.run(run())


def test_a_record_of_many_ranks_is_unpacked_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    key = CommitKey(2, 7)
    many = [{"nbytes": rank, "digest": "0" * 16} for rank in range(10_000)]
    used: list[object] = []
    to_thread = asyncio.to_thread

    def noted(work: Callable[..., Any], *args: Any, **named: Any) -> Any:
        used.append(work)
        return to_thread(work, *args, **named)

    monkeypatch.setattr(asyncio, "to_thread", noted)

    async def run() -> None:
        async with make_driver("memory://") as driver:
            await driver.put(str(key), [seal(key, many)])
            assert await read_record(driver, key, list) == many

    asyncio.run(run())
    assert unseal in used


def test_a_record_takes_little_memory_to_refuse() -> None:
    content = MAGIC + bytes(HEAD_NBYTES - len(MAGIC)) + b"\xdd\xff\xff\xff\xff"
    tracemalloc.start()
    try:
        with pytest.raises(Corruption):
            unseal(content, CommitRecord, key=CommitKey(1, 1), tier="shm")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_record_of_another_major_is_refused_and_is_no_damage() -> None:
    sealed = seal(KEY, {**VALUE, "world_size": 1, "major": 2})
    with pytest.raises(
        ConfigurationError, match=r"job/lineage/g000002\.\w+ in shm was written by another release .*major 2"
    ):
        unseal(sealed, Branch, key=KEY, tier="shm")
    assert unseal(seal(KEY, {**VALUE, "world_size": 1, "major": 1}), Branch, key=KEY, tier="shm").left_at == 7


def test_what_has_other_fields_is_corruption_that_names_key_and_tier() -> None:
    with pytest.raises(Corruption, match=r"invalid Branch: .*world_size") as caught:
        unseal(seal(KEY, VALUE), Branch, key=KEY, tier="shm")
    assert (caught.value.tier, caught.value.key) == ("shm", str(KEY))

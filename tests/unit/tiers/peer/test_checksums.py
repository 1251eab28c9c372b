"""Checksums that a peer server remembers from a put, and sends with a get."""

from __future__ import annotations

import random
from array import array

import pytest

from tests.property.peer_network import Network
from tiercheck.errors import Corruption
from tiercheck.tiers.peer import checksums
from tiercheck.tiers.peer.checksums import KnownChecksums
from tiercheck.tiers.peer.client.content import PayloadChunks
from tiercheck.tiers.peer.client.get import Getting
from tiercheck.tiers.peer.client.put import Putting
from tiercheck.tiers.peer.driver import new_transfer
from tiercheck.types import ByteRange, ObjectInfo, PutMode

CHUNK = 1 << 16


def known(key: str = "a", etag: str = "1", sums: tuple[int, ...] = (7, 8, 9)) -> tuple[ObjectInfo, array[int]]:
    return ObjectInfo(key, (len(sums) - 1) * 10 + 3, etag), array("Q", sums)


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 10, 7), (10, 20, 8), (20, 23, 9), (0, 9, None), (1, 10, None), (0, 20, None), (20, 30, None), (30, 30, None)],
)
def test_only_a_whole_chunk_of_the_put_has_a_known_checksum(start: int, stop: int, expected: int | None) -> None:
    kept = KnownChecksums()
    info, sums = known()
    kept.keep("n", info, 10, sums)
    assert kept.find("n", "a", "1", ByteRange(start, stop)) == expected


def test_another_object_is_not_mistaken_for_it() -> None:
    kept = KnownChecksums()
    info, sums = known()
    kept.keep("n", info, 10, sums)
    part = ByteRange(0, 10)
    assert kept.find("other", "a", "1", part) is None
    assert kept.find("n", "b", "1", part) is None
    assert kept.find("n", "a", "2", part) is None, "it was overwritten"
    again, others = known(etag="2", sums=(1, 2))
    kept.keep("n", again, 10, others)
    assert kept.find("n", "a", "1", part) is None
    assert kept.find("n", "a", "2", part) == 1


def test_the_oldest_is_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "CHUNKS_MAX", 7)
    monkeypatch.setattr(checksums, "OBJECTS_MAX", 3)
    kept = KnownChecksums()
    for key in "abc":
        info, sums = known(key)
        kept.keep("n", info, 10, sums)
    assert [kept.find("n", key, "1", ByteRange(0, 10)) for key in "abc"] == [None, 7, 7]
    for key in "cdef":
        info, sums = known(key, sums=(5,))
        kept.keep("n", info, 10, sums)
    assert [kept.find("n", key, "1", ByteRange(0, 3)) for key in "bcdef"] == [None, None, 5, 5, 5]


@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_what_decays_in_the_servers_memory_is_corruption_and_ends_the_get(chunk: int) -> None:
    network = Network(1, {})
    data = random.Random(1).randbytes(4 * CHUNK + 5)
    network.settle(network.begin(Putting("n", "a", PayloadChunks([data]), PutMode.OVERWRITE, new_transfer)))
    assert network.settle(network.begin(Getting("n", "a", None, None, new_transfer))) == [data]

    decayed = bytearray(data)
    decayed[chunk * CHUNK + 4] ^= 1
    network.store.objects["a"] = (bytes(decayed), network.store.objects["a"][1])
    (result,) = network.settle(network.begin(Getting("n", "a", None, None, new_transfer)))
    assert isinstance(result, Corruption)
    assert "not what was put" in str(result)
    assert network.server.desk.dropped == {"decayed": 1}
    # What is whole can still be read.
    part = ByteRange(CHUNK, 2 * CHUNK)
    assert network.settle(network.begin(Getting("n", "a", part, None, new_transfer))) == [data[CHUNK : 2 * CHUNK]]


@pytest.mark.parametrize("chance", [0.02, 0.08])
def test_chunks_that_are_lost_or_flipped_under_way_are_no_decay(chance: float) -> None:
    for seed in range(8):
        network = Network(seed, {"flip": chance, "swallow": chance})
        data = random.Random(seed).randbytes(6 * CHUNK + 5)
        results = network.settle(
            network.begin(Putting("n", "a", PayloadChunks([data]), PutMode.OVERWRITE, new_transfer))
        )
        assert isinstance(results[0], ObjectInfo)
        assert network.settle(network.begin(Getting("n", "a", None, None, new_transfer))) == [data]
        assert "decayed" not in network.server.desk.dropped

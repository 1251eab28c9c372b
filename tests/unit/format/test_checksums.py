"""Checksums by blocks: the same of all ways to compute them, and each block's its own."""

from __future__ import annotations

import random

import pytest
import xxhash

from tiercheck.format import checksums
from tiercheck.format.checksums import (
    RunningChecksum,
    block_digests,
    blocks_around,
    check_blocks,
    checksum_of,
    checksum_of_blocks,
    copy_with_checksum,
)
from tiercheck.format.copying import CACHED_BYTES
from tiercheck.types import ByteRange

BLOCK = 64


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK_NBYTES", BLOCK)


LENGTHS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 7]


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("part", [1, BLOCK - 1, BLOCK, 5 * BLOCK])
def test_a_checksum_is_the_same_whole_in_parts_and_of_a_copy(nbytes: int, part: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    running = RunningChecksum()
    for start in range(0, nbytes, part):
        running.update(data[start : start + part])
    copy = bytearray(nbytes)
    assert running.text == checksum_of(data) == copy_with_checksum(memoryview(copy), memoryview(data))
    assert copy == data


@pytest.mark.usefixtures("short_blocks")
def test_it_is_that_of_the_bytes_or_of_the_digests_of_their_blocks() -> None:
    data = random.Random(1).randbytes(2 * BLOCK + 1)
    assert checksum_of(data[:BLOCK]) == xxhash.xxh3_64_hexdigest(data[:BLOCK])
    digests = b"".join(xxhash.xxh3_64_digest(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK))
    assert checksum_of(data) == checksum_of_blocks(block_digests(data)) == xxhash.xxh3_64_hexdigest(digests)


def test_a_copy_of_many_pieces_has_the_checksum_of_its_bytes() -> None:
    for nbytes in (0, 1, 64, CACHED_BYTES - 1, CACHED_BYTES, CACHED_BYTES + 1, 3 * CACHED_BYTES + 7):
        source = random.Random(nbytes).randbytes(nbytes)
        copy = bytearray(nbytes)
        assert copy_with_checksum(memoryview(copy), memoryview(source)) == checksum_of(source), nbytes
        assert copy == source, nbytes
    with pytest.raises(ValueError, match="3 bytes cannot be copied to 2"):
        copy_with_checksum(memoryview(bytearray(2)), memoryview(b"abc"))


@pytest.mark.usefixtures("short_blocks")
def test_any_part_is_verified_by_the_blocks_around_it_alone() -> None:
    data = bytearray(random.Random(1).randbytes(3 * BLOCK + 7))
    digests = block_digests(data)
    for start in range(0, len(data), 5):
        for stop in range(start, len(data), 7):
            around = blocks_around(ByteRange(start, stop), len(data))
            assert around.start <= start <= stop <= around.stop <= len(data)
            check_blocks(data[around.start : around.stop], around.start, digests)
    data[2 * BLOCK + 3] ^= 1
    check_blocks(data[: 2 * BLOCK], 0, digests)
    for begin in (0, BLOCK, 2 * BLOCK):
        with pytest.raises(ValueError, match=f"block that begins at byte {2 * BLOCK} does not"):
            check_blocks(data[begin:], begin, digests)
    with pytest.raises(ValueError, match="there are 199 bytes"):
        blocks_around(ByteRange(0, 200), 199)

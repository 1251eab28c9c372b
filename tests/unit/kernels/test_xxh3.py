"""Checksums of many parts at once are those of the library."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from tiercheck import kernels


@pytest.mark.parametrize("by", ["reference", "numba"])
def test_a_part_of_any_length_has_the_digest_of_the_library(by: str) -> None:
    """Each length up to where the algorithm takes all bytes alike, and around the end of a block of 1 KiB."""
    sizes = np.array([*range(700), *range(1000, 1100), *range(2040, 2060), 65_537])
    generator = np.random.default_rng(5)
    data = generator.integers(0, 256, 100_000, dtype=np.uint8)
    starts = generator.integers(0, data.size - sizes)
    found = kernels.hash_each.by(by)(data, starts, starts + sizes)
    parts = [data[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    assert found.dtype == np.uint64
    assert found.tolist() == [xxhash.xxh3_64_intdigest(part.tobytes()) for part in parts]


@pytest.mark.parametrize("by", ["reference", "numba"])
@pytest.mark.parametrize(
    ("starts", "stops", "message"),
    [([0], [5], "4 bytes"), ([-1], [2], "4 bytes"), ([3], [2], "4 bytes"), ([0, 1], [2], "one tensor each")],
)
def test_nothing_outside_of_the_array_is_read(by: str, starts: list[int], stops: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.hash_each.by(by)(np.zeros(4, np.uint8), np.array(starts, np.int64), np.array(stops, np.int64))

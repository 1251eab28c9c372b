"""Exponents in few bits: the reference by its word, and Numba against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiercheck import kernels

BACKENDS = ("reference", "numba")
SIZES = (0, 1, 2, 63, 64, 255, 256, 257, 511, 512, 1000, 70_001)
BLOCK, CODE_BYTES = 256, 96


def pack(exponents: NDArray[np.uint8], by: str) -> NDArray[np.uint8]:
    packed = np.full(kernels.packed_bytes_max(exponents.size), 0xA5, np.uint8)
    return packed[: kernels.pack_exponents.by(by)(exponents, packed)]


def unpack(packed: NDArray[np.uint8], size: int, by: str) -> NDArray[np.uint8]:
    exponents = np.full(size, 0xA5, np.uint8)
    kernels.unpack_exponents.by(by)(packed, exponents)
    return exponents


def samples(size: int) -> list[NDArray[np.uint8]]:
    generator = np.random.default_rng(size)
    return [
        each.astype(np.uint8)
        for each in (
            np.zeros(size),
            np.full(size, 255),
            generator.integers(0, 256, size),
            generator.normal(110, 2, size).clip(0, 255),
            generator.choice([0, 3, 252, 255], size),  # on both sides of where a byte begins anew
            np.arange(size) % 256,
        )
    ]


def test_all_come_back_and_both_pack_alike() -> None:
    for exponents in (each for size in SIZES for each in samples(size)):
        packed = pack(exponents, "reference")
        assert pack(exponents, "numba").tobytes() == packed.tobytes(), exponents
        for by in BACKENDS:
            assert unpack(packed, exponents.size, by).tobytes() == exponents.tobytes(), exponents


def split_and_pack(patterns: NDArray[Any], by: str) -> tuple[bytes, bytes]:
    """The rest, and the packed exponents; both lie between bytes that nobody may write to."""
    rest_bytes, margin = patterns.size * (patterns.itemsize - 1), 512
    rest = np.full(rest_bytes + 2 * margin, 0xA5, np.uint8)
    packed = np.full(kernels.packed_bytes_max(patterns.size) + 2 * margin, 0xA5, np.uint8)
    inner = rest[margin:-margin], packed[margin:-margin]
    nbytes = kernels.split_and_pack_exponents.by(by)(patterns, *inner)
    assert all(np.all(each[:margin] == 0xA5) and np.all(each[-margin:] == 0xA5) for each in (rest, packed))
    return inner[0].tobytes(), inner[1][:nbytes].tobytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_in_one_pass_they_are_what_they_are_in_two(dtype: type) -> None:
    generator = np.random.default_rng(0)
    shift = 8 * np.dtype(dtype).itemsize - 9
    for exponents in (each for size in SIZES for each in samples(size)):
        size = exponents.size
        noise = generator.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
        patterns = (noise & ~dtype(0xFF << shift) | exponents.astype(dtype) << dtype(shift)).astype(dtype)
        rest = np.empty(size * (patterns.itemsize - 1), np.uint8)
        parted = np.empty(size, np.uint8)
        kernels.split_exponents.by("reference")(patterns, parted, rest)
        assert parted.tobytes() == exponents.tobytes()
        for by in BACKENDS:
            assert split_and_pack(patterns, by) == (rest.tobytes(), pack(exponents, "reference").tobytes())


@pytest.mark.parametrize("by", BACKENDS)
def test_in_one_pass_too_little_room_is_refused(by: str) -> None:
    patterns, packed = np.zeros(300, np.uint32), np.full(706, 0xA5, np.uint8)
    rest = np.full(900, 0xA5, np.uint8)
    with pytest.raises(ValueError, match="there is room for 705"):
        kernels.split_and_pack_exponents.by(by)(patterns, rest, packed[:705])
    with pytest.raises(ValueError, match="300 values need"):
        kernels.split_and_pack_exponents.by(by)(patterns, rest[:899], packed)
    with pytest.raises(TypeError, match="not float32"):
        kernels.split_and_pack_exponents.by(by)(patterns.view(np.float32), rest, packed)
    assert np.all(packed == 0xA5)
    assert np.all(rest == 0xA5)


@given(st.binary(max_size=700))
@settings(max_examples=100)
def test_any_bytes_come_back(content: bytes) -> None:
    exponents = np.frombuffer(content, np.uint8)
    packed = pack(exponents, "reference")
    assert pack(exponents, "numba").tobytes() == packed.tobytes()
    for by in BACKENDS:
        assert unpack(packed, exponents.size, by).tobytes() == content


@given(st.integers(0, 600), st.binary(max_size=700))
@settings(max_examples=200)
def test_any_bytes_of_the_right_number_are_exponents(size: int, content: bytes) -> None:
    """And both backends agree which number is right, and which exponents they are."""
    found: list[bytes | None] = []
    for by in BACKENDS:
        try:
            found.append(unpack(np.frombuffer(content, np.uint8), size, by).tobytes())
        except ValueError:
            found.append(None)
    assert found[0] == found[1]


@pytest.mark.parametrize("by", BACKENDS)
def test_the_form_is_what_it_is_said_to_be(by: str) -> None:
    exponents = np.full(BLOCK, 120, np.uint8)
    exponents[[1, 65, 129]] = 119, 118, 114
    exponents[[5, 250]] = 113, 126
    packed = pack(exponents, by)
    low = np.zeros(64, np.uint8)
    low[1] = 1 | 2 << 2 | 2 << 4
    low[5] = 3
    low[250 - 192] = 3 << 6
    high = np.zeros(32, np.uint8)
    high[129 % 32] |= 1 << 129 // 32
    high[5] |= 1
    high[250 % 32] |= 1 << 250 // 32
    assert packed.tolist() == [120, *low, *high, 113, 126]


@pytest.mark.parametrize("by", BACKENDS)
def test_the_highest_is_the_one_with_which_the_fewest_are_stored(by: str) -> None:
    exponents = np.concatenate([np.full(10, 130), np.full(200, 120), np.full(46, 118)]).astype(np.uint8)
    packed = pack(exponents, by)
    assert packed[0] == 124  # 130 - 6: the largest are stored, and all others have a code
    assert packed[1 + CODE_BYTES :].tolist() == [130] * 10


@pytest.mark.parametrize("by", BACKENDS)
def test_a_gradient_takes_half(by: str) -> None:
    values = np.random.default_rng(0).standard_normal(50_000, dtype=np.float32)
    exponents = (values.view(np.uint32) >> 23 & 0xFF).astype(np.uint8)
    assert pack(exponents, by).size < 0.45 * exponents.size


@pytest.mark.parametrize("by", BACKENDS)
def test_what_does_not_fit_is_refused_and_nothing_is_written(by: str) -> None:
    exponents = np.arange(300, dtype=np.uint16).astype(np.uint8)
    room = np.zeros(kernels.packed_bytes_max(300) - 1, np.uint8)
    with pytest.raises(ValueError, match="there is room for"):
        kernels.pack_exponents.by(by)(exponents, room)
    assert not room.any()
    packed = pack(exponents, by)
    for wrong in (packed[:0], packed[:100], packed[:-1], np.append(packed, packed[:1])):
        with pytest.raises(ValueError, match=r"blocks of exponents|stored exponents"):
            unpack(wrong, 300, by)


@pytest.mark.parametrize("by", BACKENDS)
def test_nothing_beyond_what_is_returned_matters_or_is_written_beyond_the_room(by: str) -> None:
    exponents = np.random.default_rng(1).integers(0, 256, 1000).astype(np.uint8)
    guarded = np.full(kernels.packed_bytes_max(1000) + 64, 0x5A, np.uint8)
    kernels.pack_exponents.by(by)(exponents, guarded[:-64])
    assert (guarded[-64:] == 0x5A).all()
    target = np.full(1000 + 64, 0x5A, np.uint8)
    kernels.unpack_exponents.by(by)(pack(exponents, by), target[:1000])
    assert (target[1000:] == 0x5A).all()

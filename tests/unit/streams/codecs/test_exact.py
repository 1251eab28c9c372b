"""The codecs that keep every bit, and the bytes that they save all the same."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.encoding import Stored, encode, gradient, hold, raw, round_trip
from tiercheck import kernels
from tiercheck.errors import Corruption
from tiercheck.kernels import HalfGradient
from tiercheck.streams.codecs import DTYPES, FLOATS, Encoding, codec_of, decode, decode_sparse, entropy
from tiercheck.streams.codecs.entropy import FRAME_ELEMENTS
from tiercheck.streams.codecs.exact import Exact, encode_scaled

NANS = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0xFF800000, 0x80000000, 1], np.uint32)


def nbytes(parts: dict[str, Stored]) -> int:
    return sum(len(part.data) for part in parts.values())


def exactly_bfloat16(size: int) -> NDArray[np.float32]:
    return (gradient(size).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("name", ["exact", "exact+entropy", "nonzero"])
class TestEveryBit:
    def test_of_every_dtype_comes_back(self, name: str) -> None:
        for dtype, kind in DTYPES.items():
            noise = np.random.default_rng(5).integers(0, 2 if dtype == "BOOL" else 256, 35 * kind.itemsize, np.uint8)
            array = noise.view(kind).reshape(5, 7)
            assert raw(round_trip(name, array, dtype)) == raw(array), dtype

    def test_of_a_nan_comes_back(self, name: str) -> None:
        padded = np.concatenate((NANS, np.zeros(100, np.uint32)))
        for bits in (NANS, NANS & np.uint32(0xFFFF0000), padded, padded & np.uint32(0xFFFF0000)):
            assert raw(round_trip(name, bits.view(np.float32), "F32")) == raw(bits)

    def test_never_takes_more_bytes_than_the_tensor(self, name: str) -> None:
        for dtype, size in itertools.product(FLOATS, (0, 1, 2, 7, 100, 5000)):
            noise = np.random.default_rng(size).integers(0, 256, size * DTYPES[dtype].itemsize, dtype=np.uint8)
            array = noise.view(DTYPES[dtype])
            _, parts = encode(name, array, dtype)
            assert nbytes(parts) <= array.nbytes, (dtype, size)


class TestExact:
    def test_values_that_are_exactly_bf16_take_half_the_bytes(self) -> None:
        array = exactly_bfloat16(4096).reshape(64, 64)
        _, parts = encode("exact", array, "F32")
        assert (parts[""].dtype, parts[""].shape, len(parts[""].data)) == ("BF16", (64, 64), 2 * 4096)
        array[63, 63] = 0.1
        _, parts = encode("exact", array, "F32")
        assert (parts[""].dtype, len(parts[""].data)) == ("F32", 4 * 4096)

    def test_decoding_copies_nothing(self) -> None:
        encoding, parts = encode("exact", gradient(100), "F32")
        decoded = decode(encoding.to_object(), parts)
        assert np.shares_memory(decoded, np.frombuffer(parts[""].data, np.float32))


def half_of(encoding: Encoding, parts: Mapping[str, Stored]) -> HalfGradient | None:
    """Of what is read, by what was written."""
    read = Encoding.from_object(encoding.to_object())
    return codec_of(read).decode_half(read, parts)


class TestHalves:
    """An fp32 tensor that is stored in half precision can be had as it is stored."""

    def test_a_view_of_what_is_stored(self) -> None:
        array = exactly_bfloat16(1000)
        encoding, parts = encode("exact", array, "F32")
        half = half_of(encoding, parts)
        assert half is not None
        assert half.scale is None
        assert np.shares_memory(half.halves, np.frombuffer(parts[""].data, np.uint16))
        assert raw(kernels.widened(half)) == raw(decode(encoding.to_object(), parts)) == raw(array)

    @pytest.mark.parametrize("fp16", [False, True])
    def test_with_its_scale(self, fp16: bool) -> None:
        scale = float(np.float32(0.7))
        numbers = np.random.default_rng(0).integers(0x3C00, 0x4000, 1000).astype(np.uint16)
        products = kernels.widen_scaled(numbers.view(np.float16) if fp16 else numbers, scale)
        stored: dict[str, Stored] = {}

        def slot(suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
            stored[suffix] = Stored(dtype, shape, memoryview(bytearray(2 * 1000)))
            return stored[suffix].data

        encoding = encode_scaled(products, fp16, scale, Exact(), slot)
        assert encoding is not None
        half = half_of(encoding, stored)
        assert half is not None
        assert half.scale == scale
        assert raw(kernels.widened(half)) == raw(decode(encoding.to_object(), stored)) == raw(products)

    @pytest.mark.parametrize(("dtype", "codec"), [("F32", "exact"), ("BF16", "exact"), ("F32", "exact+entropy")])
    def test_others_are_decoded(self, dtype: str, codec: str) -> None:
        encoding, parts = encode(codec, hold(gradient(1000), dtype), dtype)
        assert half_of(encoding, parts) is None

    def test_what_no_codec_wrote_is_damaged(self) -> None:
        encoding, parts = encode("exact", exactly_bfloat16(1000), "F32")
        shorter = {"": Stored("BF16", (999,), memoryview(bytes(parts[""].data))[:1998])}
        with pytest.raises(Corruption):
            half_of(encoding, shorter)


class TestEntropy:
    @pytest.mark.parametrize(("dtype", "share"), [("F32", 0.87), ("BF16", 0.75)])
    def test_gradients_get_smaller(self, dtype: str, share: float) -> None:
        array = hold(gradient(100_000), dtype)
        _, parts = encode("exact+entropy", array, dtype)
        assert nbytes(parts) < share * array.nbytes

    def test_values_that_are_exactly_bf16_are_coded_as_such(self) -> None:
        array = exactly_bfloat16(100_000)
        encoding, parts = encode("exact+entropy", array, "F32")
        assert nbytes(parts) < 0.75 * 2 * array.size
        assert raw(decode(encoding.to_object(), parts)) == raw(array)

    def test_exponents_that_do_not_compress_are_stored_as_they_are(self) -> None:
        bits = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32)
        encoding, parts = encode("exact+entropy", bits.view(np.float32), "F32")
        assert bytes(parts["exponents"].data) == (bits >> 23 & 0xFF).astype(np.uint8).tobytes()
        assert raw(decode(encoding.to_object(), parts)) == raw(bits)

    @pytest.mark.parametrize("size", [FRAME_ELEMENTS - 1, FRAME_ELEMENTS, FRAME_ELEMENTS + 1, 3 * FRAME_ELEMENTS + 5])
    def test_frames(self, size: int) -> None:
        array = hold(gradient(size), "BF16")
        encoding, parts = encode("exact+entropy", array, "BF16", threads=2)
        (length,) = struct.unpack_from("<I", parts["exponents"].data)
        first = np.empty(min(size, FRAME_ELEMENTS), np.uint8)
        kernels.unpack_exponents(np.frombuffer(parts["exponents"].data[4 : 4 + length], np.uint8), first)
        assert first.tobytes() == (array[: first.size] >> 7).astype(np.uint8).tobytes()
        assert raw(decode(encoding.to_object(), parts, threads=3)) == raw(array)


class TestMalformedFrames:
    """Nothing is believed of a frame but that it holds what it should; then any bytes are exponents."""

    SIZE = 2000

    def decode(self, coded: bytes) -> NDArray[Any]:
        encoding, parts = encode("exact+entropy", gradient(self.SIZE), "F32")
        assert len(coded) < self.SIZE
        memory = memoryview(coded)
        return decode(encoding.to_object(), {**parts, "exponents": Stored("U8", (len(coded),), memory)})

    @staticmethod
    def framed(*frames: bytes) -> bytes:
        return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)

    def frame(self, size: int) -> bytes:
        packed = np.empty(kernels.packed_bytes_max(size), np.uint8)
        exponents = np.random.default_rng(0).integers(100, 108, size).astype(np.uint8)
        return packed[: kernels.pack_exponents(exponents, packed)].tobytes()

    def test_what_it_should_be(self) -> None:
        assert self.decode(self.framed(self.frame(self.SIZE))).size == self.SIZE

    @pytest.mark.parametrize("size", [SIZE - 256, SIZE + 256, 0])
    def test_another_size_than_the_tensors(self, size: int) -> None:
        with pytest.raises(Corruption, match="frame 1"):
            self.decode(self.framed(self.frame(size)))

    def test_trailing_garbage(self) -> None:
        frame = self.frame(self.SIZE)
        for coded in (
            self.framed(frame) + b"\0",
            self.framed(frame, frame[:10]),
            self.framed(frame + b"\0"),
        ):
            with pytest.raises(Corruption):
                self.decode(coded)

    def test_cut_anywhere(self) -> None:
        whole = self.framed(self.frame(self.SIZE))
        for length in range(len(whole)):
            with pytest.raises(Corruption):
                self.decode(whole[:length])
        for length in range(len(whole) - 4):
            with pytest.raises(Corruption):
                self.decode(self.framed(whole[4 : 4 + length]))

    def test_any_byte_flipped(self) -> None:
        whole = bytearray(self.framed(self.frame(self.SIZE)))
        right, damaged = self.decode(bytes(whole)), 0
        for position in range(len(whole)):
            whole[position] ^= 0x10
            try:
                found = self.decode(bytes(whole))
            except Corruption:
                damaged += 1
            else:
                assert (found.shape, found.dtype) == (right.shape, right.dtype)
                assert raw(found) != raw(right) or position < 4 + 8 * 97
            whole[position] ^= 0x10
        assert damaged >= 4

    def test_a_length_that_leaves_the_part(self) -> None:
        frame = self.frame(self.SIZE)
        for length in (0, len(frame) - 1, len(frame) + 1, 2**32 - 1):
            with pytest.raises(Corruption):
                self.decode(struct.pack("<I", length) + frame)

    def test_frames_are_bounded_one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(entropy, "FRAME_ELEMENTS", 512)
        frames = [self.frame(512)] * 3 + [self.frame(464)]
        assert self.decode(self.framed(*frames)).size == self.SIZE
        for sizes in ([512] * 3, [512] * 5, [512, 256, 768, 464], [2000]):
            with pytest.raises(Corruption):
                self.decode(self.framed(*map(self.frame, sizes)))


class TestNonzero:
    def test_only_what_is_not_zero_is_stored(self) -> None:
        array = np.zeros(1000, np.float32)
        array[[3, 500, 999]] = 1.5, -0.0, np.nan
        encoding, parts = encode("nonzero", array, "F32")
        assert np.frombuffer(parts["indices"].data, np.uint32).tolist() == [3, 500, 999]
        assert (parts["values"].dtype, parts["values"].shape) == ("F32", (3,))
        assert raw(decode(encoding.to_object(), parts)) == raw(array)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_the_smaller_form_is_chosen(self, dtype: str) -> None:
        for share in (0.0, 0.01, 0.3, 0.49, 0.51, 1.0):
            array = hold(np.where(np.arange(10_000) < share * 10_000, gradient(10_000), np.float32(0)), dtype)
            encoding, parts = encode("nonzero", array, dtype)
            count = np.count_nonzero(array)
            sparse = count * (4 + array.itemsize) < array.nbytes
            assert encoding.codec == ("nonzero" if sparse else "exact"), share
            assert nbytes(parts) <= min(array.nbytes, count * (4 + array.itemsize) if sparse else array.nbytes), share
            assert raw(decode(encoding.to_object(), parts)) == raw(array), share

    def test_a_compressed_gradient_stays_what_it_is(self) -> None:
        """Sparse with loss first, as training applies it; then without."""
        applied = round_trip("sparse", gradient(200_000), "F32") * np.float32(0.37)
        encoding, parts = encode("nonzero", applied, "F32")
        assert nbytes(parts) < 0.03 * applied.nbytes
        sparse = decode_sparse(encoding.to_object(), parts)
        assert sparse is not None
        assert raw(sparse.values) == raw(applied[sparse.indices])
        assert raw(decode(encoding.to_object(), parts)) == raw(applied)

    def test_a_part_of_another_dtype_is_refused(self) -> None:
        array = np.where(np.arange(100) < 2, np.float32(1), np.float32(0))
        encoding, parts = encode("nonzero", array, "F32")
        with pytest.raises(Corruption):
            decode(encoding.to_object(), {**parts, "values": replace(parts["values"], dtype="I32")})

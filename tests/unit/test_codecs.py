"""What each codec keeps, and that malformed parts are refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.streams import codecs
from tiercheck.streams.codecs import CODECS, DTYPES, Encoding, codec, decode
from tiercheck.types import Fidelity

FLOATS = ("F32", "BF16", "F16")


@dataclass
class Memory:
    """The parts of one encoded tensor, as a shard would hold them."""

    parts: dict[str, Stored] = field(default_factory=dict)

    def slot(self, suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        assert suffix not in self.parts, "a slot was asked for twice"
        memory = memoryview(bytearray(math.prod(shape) * DTYPES[dtype].itemsize))
        self.parts[suffix] = Stored(dtype, shape, memory)
        return memory


@dataclass(frozen=True)
class Stored:
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def encode(name: str, array: NDArray[Any], dtype: str, seed: int = 1) -> tuple[Encoding, dict[str, Stored]]:
    memory = Memory()
    return codec(name).encode(array, dtype, seed=seed, slot=memory.slot), memory.parts


def round_trip(name: str, array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Through the description's msgpack, as in a shard."""
    encoding, parts = encode(name, array, dtype)
    return decode(msgpack.unpackb(msgpack.packb(encoding.to_object())), parts)


def hold(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """fp32 values as an array that holds ``dtype``."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16).reshape(values.shape)
    return values.astype(DTYPES[dtype])


def read(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    return kernels.widen(array.reshape(-1)).reshape(array.shape) if dtype == "BF16" else array.astype(np.float32)


def raw(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def gradient(size: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32) * np.float32(1e-3)


SHAPES: dict[str, NDArray[np.float32]] = {
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(-2.5).reshape(()),
    "one": np.array([1e-3], np.float32),
    "odd": gradient(257),
    "matrix": gradient(12 * 34).reshape(12, 34),
    "transposed": gradient(12 * 34).reshape(12, 34).T,
    "strided": gradient(1000)[::3],
    "reversed": gradient(100)[::-1],
    "constant": np.full(1000, 0.125, np.float32),
    "zero": np.zeros(1000, np.float32),
    "denormal": (np.arange(1, 500) * 2.0**-149).astype(np.float32),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", SHAPES)
def test_any_array_comes_back_in_its_dtype_and_shape_within_the_plan(name: str, dtype: str, kind: str) -> None:
    array = hold(SHAPES[kind], dtype)
    before = raw(array)
    encoding, parts = encode(name, array, dtype)
    planned = {part.suffix: part for part in codec(name).plan(dtype, array.shape)}
    assert tuple(parts) == encoding.parts == tuple(planned)
    for suffix, stored in parts.items():
        assert len(stored.data) <= planned[suffix].nbytes
        assert len(stored.shape) == len(planned[suffix].shape)
    decoded = decode(encoding.to_object(), parts)
    assert (decoded.dtype, decoded.shape) == (array.dtype, array.shape)
    assert raw(array) == before
    largest = np.abs(read(array, dtype)).max(initial=0)
    assert np.all(np.abs(read(decoded, dtype) - read(array, dtype)) <= largest)


class TestExact:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_bit_of_every_dtype_comes_back(self, dtype: str) -> None:
        kind = DTYPES[dtype]
        noise = np.random.default_rng(5).integers(0, 2 if dtype == "BOOL" else 256, 35 * kind.itemsize, dtype=np.uint8)
        array = noise.view(kind).reshape(5, 7)
        assert raw(round_trip("exact", array, dtype)) == raw(array)

    def test_the_payloads_of_nans_come_back(self) -> None:
        bits = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0xFF800000, 0x80000000], np.uint32)
        for patterns in (bits, bits & np.uint32(0xFFFF0000)):
            assert raw(round_trip("exact", patterns.view(np.float32), "F32")) == raw(patterns)

    def test_values_that_are_exactly_bf16_take_half_the_bytes(self) -> None:
        array = (gradient(4096).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).reshape(64, 64)
        _, parts = encode("exact", array, "F32")
        assert (parts[""].dtype, parts[""].shape, len(parts[""].data)) == ("BF16", (64, 64), 2 * 4096)
        array[63, 63] = 0.1
        _, parts = encode("exact", array, "F32")
        assert (parts[""].dtype, len(parts[""].data)) == ("F32", 4 * 4096)

    def test_decoding_copies_nothing(self) -> None:
        encoding, parts = encode("exact", gradient(100), "F32")
        decoded = decode(encoding.to_object(), parts)
        assert np.shares_memory(decoded, np.frombuffer(parts[""].data, np.float32))

    def test_an_unaligned_part_is_read(self) -> None:
        encoding, parts = encode("exact", gradient(100), "F32")
        shifted = bytearray(1 + 400)
        shifted[1:] = parts[""].data
        moved = {"": replace(parts[""], data=memoryview(shifted)[1:])}
        decoded = decode(encoding.to_object(), moved)
        assert decoded.flags.aligned
        assert raw(decoded) == raw(gradient(100))


class TestInt8:
    def test_the_error_is_half_a_scale(self) -> None:
        array = gradient(10_000)
        encoding, parts = encode("int8", array, "F32")
        scales = np.frombuffer(parts["scales"].data, np.float32)
        decoded = decode(encoding.to_object(), parts)
        assert np.all(np.abs(decoded - array) <= np.repeat(scales, 256)[:10_000] * (0.5 + 127 * 2.0**-22))
        assert np.all(decoded[np.abs(array) > np.repeat(scales, 256)[:10_000]] != 0)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_what_is_not_finite_comes_back_as_nan_and_is_counted(self, dtype: str) -> None:
        values = np.linspace(-1, 1, 600, dtype=np.float32)
        values[[0, 300, 599]] = np.nan, np.inf, -np.inf
        encoding, parts = encode("int8", hold(values, dtype), dtype)
        assert encoding.scalars == {"nonfinite": 3}
        decoded = read(decode(encoding.to_object(), parts), dtype)
        assert np.flatnonzero(~np.isfinite(decoded)).tolist() == [0, 300, 599]
        finite = np.isfinite(values)
        assert np.all(np.abs(decoded[finite] - values[finite]) < 0.02)


class TestSparse:
    def test_the_largest_hundredth_is_kept_and_the_rest_is_zero(self) -> None:
        array = gradient(50_000)
        decoded = round_trip("sparse", array, "F32")
        kept = np.flatnonzero(decoded)
        assert kept.size == 500
        assert np.abs(array[kept]).min() >= np.sort(np.abs(array))[-500]
        assert np.all(np.abs(decoded[kept] - array[kept]) <= np.abs(array[kept]) * 2.0**-11)

    def test_a_large_tensor_keeps_about_a_hundredth(self) -> None:
        array = gradient(1_000_000)
        _, parts = encode("sparse", array, "F32")
        assert 8_500 < parts["indices"].shape[0] < 11_500

    def test_is_deterministic_for_a_seed(self) -> None:
        array = gradient(300_000)
        results = [encode("sparse", array, "F32", seed) for seed in (3, 3, 5)]
        content = [{suffix: bytes(part.data) for suffix, part in parts.items()} for _, parts in results]
        assert content[0] == content[1] != content[2]

    def test_ties_are_cut_at_the_capacity_first_come_first_kept(self) -> None:
        array = np.full(10_000, -0.5, np.float32)
        decoded = round_trip("sparse", array, "F32")
        assert np.flatnonzero(decoded).tolist() == list(range(125))
        assert np.all(decoded[:125] == -0.5)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_nan_and_infinity_come_back_and_are_counted(self, dtype: str) -> None:
        values = np.full(10_000, 0.5, np.float32)
        values[[5, 5_000, 9_999]] = np.nan, np.inf, -np.inf
        encoding, parts = encode("sparse", hold(values, dtype), dtype)
        assert encoding.scalars["nonfinite"] == 3
        decoded = read(decode(encoding.to_object(), parts), dtype)
        assert np.isnan(decoded[5])
        assert decoded[[5_000, 9_999]].tolist() == [np.inf, -np.inf]
        assert np.count_nonzero(decoded) == 125

    @pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-10, 1.0, 1e20, 3.4e38])
    def test_gradients_of_any_magnitude_are_kept(self, magnitude: float) -> None:
        array = np.zeros(1000, np.float32)
        array[10] = magnitude
        decoded = round_trip("sparse", array, "F32")
        assert decoded[10] == pytest.approx(array[10], rel=2**-11)
        assert np.count_nonzero(decoded) == 1

    def test_zeros_are_no_survivors(self) -> None:
        _, parts = encode("sparse", np.zeros(5000, np.float32), "F32")
        assert parts["indices"].shape == (0,)

    def test_a_tensor_past_32_bit_indices_is_refused_before_it_exists(self) -> None:
        with pytest.raises(ConfigurationError, match="split it"):
            codec("sparse").plan("F32", (2**16, 2**16))


class TestAdaptive:
    @pytest.mark.parametrize(("size", "chosen"), [(99_999, "int8"), (100_000, "sparse")])
    def test_size_chooses(self, size: int, chosen: str) -> None:
        array = gradient(size)
        encoding, parts = encode("adaptive", array, "F32")
        assert encoding.codec == chosen
        assert raw(decode(encoding.to_object(), parts)) == raw(round_trip(chosen, array, "F32"))

    def test_what_is_no_float_is_exact(self) -> None:
        encoding, _ = encode("adaptive", np.arange(10), "I64")
        assert encoding.codec == "exact"

    def test_no_tensor_says_it_was_encoded_by_adaptive(self) -> None:
        encoding, parts = encode("adaptive", gradient(5), "F32")
        with pytest.raises(Corruption, match="adaptive"):
            decode({**encoding.to_object(), "codec": "adaptive"}, parts)


class TestRegistry:
    def test_an_unknown_name_lists_the_names(self) -> None:
        with pytest.raises(ConfigurationError, match="exact, int8, sparse, adaptive"):
            codec("nf5")

    def test_only_exact_is_called_exact(self) -> None:
        assert [name for name in CODECS if CODECS[name].fidelity is Fidelity.EXACT] == ["exact"]
        assert all(CODECS[name].name == name for name in CODECS)

    @pytest.mark.parametrize("name", CODECS)
    def test_an_unknown_dtype_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="F12"):
            codec(name).plan("F12", (3,))

    @pytest.mark.parametrize("name", ["int8", "sparse"])
    def test_integers_are_not_approximated(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="not 'I64'"):
            encode(name, np.arange(10), "I64")

    @pytest.mark.parametrize("name", CODECS)
    def test_an_array_that_does_not_hold_the_dtype_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="uint16, not float32"):
            encode(name, gradient(4), "BF16")

    @pytest.mark.parametrize("name", CODECS)
    def test_memory_of_another_size_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="writable memory"):
            codec(name).encode(gradient(4), "F32", seed=0, slot=lambda *_: memoryview(bytearray(3)))


class TestMalformed:
    """Nothing that a shard says is believed before it was checked."""

    @pytest.mark.parametrize(
        "change",
        [
            {"codec": 3},
            {"dtype": "F12"},
            {"dtype": ["F32"]},
            {"shape": [-1]},
            {"shape": [True]},
            {"shape": [2**40, 2**40]},
            {"shape": [1] * 100},
            {"shape": "300"},
            {"parts": [""]},
            {"parts": None},
            {"scalars": {}},
            {"scalars": {"nonfinite": 1.5}},
            {"scalars": {"nonfinite": 0, "more": 1}},
            {"extra": 1},
        ],
    )
    @pytest.mark.parametrize("name", ["int8", "sparse"])
    def test_descriptions(self, name: str, change: dict[str, Any]) -> None:
        encoding, parts = encode(name, gradient(300), "F32")
        with pytest.raises(Corruption):
            decode({**encoding.to_object(), **change}, parts)

    @pytest.mark.parametrize("name", ["exact", "int8"])
    def test_a_shape_that_is_not_the_parts_own(self, name: str) -> None:
        encoding, parts = encode(name, gradient(300), "F32")
        for shape in ([301], [299], [0], [600], []):
            with pytest.raises(Corruption):
                decode({**encoding.to_object(), "shape": shape}, parts)

    def test_a_codec_of_another_version_is_not_called_corruption(self) -> None:
        encoding, parts = encode("exact", gradient(5), "F32")
        with pytest.raises(ConfigurationError, match=r"'nf5'.*has exact, int8"):
            decode({**encoding.to_object(), "codec": "nf5"}, parts)

    @pytest.mark.parametrize("value", [None, 3, [], {}, "exact", {"codec": "exact"}])
    def test_things_that_are_no_description(self, value: object) -> None:
        with pytest.raises(Corruption):
            decode(value, {})

    @pytest.mark.parametrize("name", ["exact", "int8", "sparse"])
    def test_parts_that_are_missing_unknown_cut_or_of_another_kind(self, name: str) -> None:
        encoding, parts = encode(name, gradient(300), "F32")
        description = encoding.to_object()
        for suffix, part in parts.items():
            others = {key: value for key, value in parts.items() if key != suffix}
            broken: list[dict[str, Stored]] = [
                others,
                {**parts, "other": part},
                {**others, suffix: replace(part, data=part.data[:-1])},
                {**others, suffix: replace(part, dtype="U64")},
                {**others, suffix: replace(part, dtype="F12")},
                {**others, suffix: replace(part, shape=(part.shape[0] + 1,))},
                {**others, suffix: replace(part, shape=(2**60,))},
                {**others, suffix: replace(part, shape=())},
                {**others, suffix: replace(part, shape=(*part.shape, 1))},
            ]
            for each in broken:
                with pytest.raises(Corruption):
                    decode(description, each)

    @pytest.mark.parametrize("indices", [[1, 1, 2], [2, 1, 3], [0, 1, 300], [0, 1, 2**32 - 1], [2**32 - 1, 0, 1]])
    def test_indices_that_repeat_descend_or_leave_the_tensor(self, indices: list[int]) -> None:
        encoding, parts = encode("sparse", gradient(300), "F32")
        assert parts["indices"].shape == (3,)
        parts["indices"].data[:] = np.array(indices, np.uint32).tobytes()
        with pytest.raises(Corruption, match="ascend"):
            decode(encoding.to_object(), parts)

    def test_more_indices_than_the_codec_would_keep(self) -> None:
        encoding, _ = encode("sparse", gradient(300), "F32")
        parts = {
            "indices": Stored("U32", (200,), memoryview(np.arange(200, dtype=np.uint32).tobytes())),
            "values": Stored("F16", (200,), memoryview(bytes(400))),
        }
        with pytest.raises(Corruption, match="not of a tensor"):
            decode(encoding.to_object(), parts)

    @pytest.mark.parametrize("exponent", [10**9, -(10**9), codecs.EXPONENT_MAX + 1])
    def test_an_exponent_out_of_range(self, exponent: int) -> None:
        encoding, parts = encode("sparse", gradient(300), "F32")
        description = {**encoding.to_object(), "scalars": {"exponent": exponent, "nonfinite": 0}}
        with pytest.raises(Corruption, match="exponent"):
            decode(description, parts)

    def test_a_sparse_tensor_that_says_it_is_huge_allocates_nothing(self) -> None:
        encoding, parts = encode("sparse", gradient(300), "F32")
        with pytest.raises(Corruption, match="32-bit"):
            decode({**encoding.to_object(), "shape": [2**33]}, parts)

    @pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
    def test_a_scale_that_is_none(self, scale: float) -> None:
        encoding, parts = encode("int8", gradient(300), "F32")
        parts["scales"].data[:4] = np.float32(scale).tobytes()
        with pytest.raises(Corruption, match="scale"):
            decode(encoding.to_object(), parts)

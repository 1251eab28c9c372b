"""What the approximate codecs keep, each by its own rule."""

from __future__ import annotations

import numpy as np
import pytest

from tests.encoding import encode, gradient, hold, raw, read, round_trip
from tiercheck import kernels
from tiercheck.errors import Corruption
from tiercheck.streams.codecs import FLOATS, codec, decode


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


class TestNf4:
    def test_takes_half_a_byte_and_the_error_is_bounded(self) -> None:
        array = gradient(10_240)
        encoding, parts = encode("nf4", array, "F32")
        assert (len(parts["codes"].data), len(parts["scales"].data)) == (5120, 160)
        scales = np.repeat(np.frombuffer(parts["scales"].data, np.float32), 256)
        assert np.all(np.abs(decode(encoding.to_object(), parts) - array) <= scales * 0.152)

    def test_zeros_and_the_largest_come_back(self) -> None:
        array = np.zeros(300, np.float32)
        array[[5, 290]] = 3.0, -7.0
        assert raw(round_trip("nf4", array, "F32")) == raw(array)

    @pytest.mark.parametrize(("dtype", "bad"), [("F32", np.nan), ("BF16", np.inf), ("F16", -np.inf)])
    def test_a_block_with_what_is_not_finite_comes_back_as_nan(self, dtype: str, bad: float) -> None:
        values = np.linspace(-1, 1, 600, dtype=np.float32)
        values[[300, 599]] = bad
        encoding, parts = encode("nf4", hold(values, dtype), dtype)
        decoded = read(decode(encoding.to_object(), parts), dtype)
        assert np.isnan(decoded).tolist() == [False] * 256 + [True] * 344
        assert encoding.scalars == {"nonfinite": 344}


class TestOneBit:
    def test_takes_a_bit_and_keeps_signs_and_mean_magnitudes(self) -> None:
        array = gradient(1280)
        encoding, parts = encode("onebit", array, "F32")
        assert (len(parts["bits"].data), len(parts["scales"].data)) == (160, 20)
        decoded = decode(encoding.to_object(), parts)
        assert np.array_equal(np.signbit(decoded), np.signbit(array))
        means = np.abs(array).reshape(10, 128).mean(axis=1)
        assert np.allclose(np.abs(decoded).reshape(10, 128), means[:, None], rtol=2**-8)

    @pytest.mark.parametrize(("dtype", "bad"), [("F32", np.nan), ("BF16", np.inf), ("F16", -np.inf)])
    def test_a_block_with_what_is_not_finite_comes_back_as_nan(self, dtype: str, bad: float) -> None:
        values = np.linspace(-1, 1, 300, dtype=np.float32)
        values[[130, 299]] = bad
        encoding, parts = encode("onebit", hold(values, dtype), dtype)
        decoded = read(decode(encoding.to_object(), parts), dtype)
        assert np.isnan(decoded).tolist() == [False] * 128 + [True] * 172
        assert encoding.scalars == {"nonfinite": 172}


@pytest.mark.parametrize("name", ["int8", "nf4", "onebit"])
def test_a_bound_is_kept_and_nearly_reached(name: str) -> None:
    """A bound far above what is lost would be true, and worth nothing."""
    array = np.random.default_rng(7).uniform(-1, 1, 64 * kernels.BLOCK).astype(np.float32)
    array[: kernels.BLOCK] = 0
    array[[0, kernels.ONEBIT_BLOCK]] = 1  # alone in their blocks: the furthest that a mean can be from a value
    error = np.abs(round_trip(name, array, "F32").astype(np.float64) - array)
    bound = codec(name).bound(array)
    assert np.all(error <= bound)
    assert np.max(error / bound) > 0.97


class TestSparse:
    def test_the_largest_hundredth_is_kept_and_the_rest_is_zero(self) -> None:
        array = gradient(50_000)
        decoded = round_trip("sparse", array, "F32")
        kept = np.flatnonzero(decoded)
        assert kept.size == 500
        assert np.abs(array[kept]).min() >= np.sort(np.abs(array))[-500]
        assert np.all(np.abs(decoded[kept] - array[kept]) <= np.abs(array[kept]) * 2.0**-11)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_a_large_tensor_keeps_about_a_hundredth(self, dtype: str) -> None:
        _, parts = encode("sparse", hold(gradient(1_000_000), dtype), dtype)
        assert 8_500 < parts["indices"].shape[0] <= 12_500

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

    @pytest.mark.parametrize(("dtype", "feedback"), [("F32", False), ("F32", True), ("BF16", True), ("F16", False)])
    def test_too_many_survivors_are_cut_to_the_largest_piece_by_piece(self, dtype: str, feedback: bool) -> None:
        """Half of the elements are equal, so that the sampled threshold lets them all through."""
        size = 700_001
        values = np.where(np.arange(size) % 2 == 0, np.float32(0.25), gradient(size))
        values[[7, 400_001, size - 1]] = 0.5, 1.0, -2.0
        residual = np.zeros(size, np.float32) if feedback else None
        encoding, parts = encode("sparse", hold(values, dtype), dtype, residual=residual)
        kept = np.frombuffer(parts["indices"].data, np.uint32)
        assert kept.size == 8751
        others = set(kept.tolist()) - {7, 400_001, size - 1}
        assert others == set(range(0, 2 * 8748, 2))
        decoded = read(decode(encoding.to_object(), parts), dtype)
        assert decoded[[7, 400_001, size - 1]].tolist() == [0.5, 1.0, -2.0]
        if residual is not None:
            assert np.array_equal(residual, read(hold(values, dtype), dtype) - decoded)

    def test_more_that_is_not_finite_than_is_kept(self) -> None:
        values = gradient(200_000)
        values[::2] = np.inf
        residual = np.zeros(values.size, np.float32)
        encoding, parts = encode("sparse", values, "F32", residual=residual)
        assert encoding.scalars["nonfinite"] == 100_000
        assert np.flatnonzero(decode(encoding.to_object(), parts)).tolist() == list(range(0, 5000, 2))
        assert np.array_equal(residual, np.where(np.isfinite(values), values, np.float32(0)))

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

    def test_gradients_of_any_magnitude_are_kept(self) -> None:
        for magnitude in (1e-45, 1e-38, 1e-10, 1.0, 1e20, 3.4e38):
            array = np.zeros(1000, np.float32)
            array[10] = magnitude
            decoded = round_trip("sparse", array, "F32")
            assert decoded[10] == pytest.approx(array[10], rel=2**-11), magnitude
            assert np.count_nonzero(decoded) == 1, magnitude

    def test_zeros_are_no_survivors(self) -> None:
        _, parts = encode("sparse", np.zeros(5000, np.float32), "F32")
        assert parts["indices"].shape == (0,)

    def test_the_largest_of_equal_ones_are_the_first(self) -> None:
        survivors = np.array([1, -2, 2, np.nan, 2, 0.5, -2, np.inf], np.float32)
        assert kernels.largest_of(survivors, 4).tolist() == [1, 2, 3, 7]
        assert kernels.largest_of(survivors, 8).tolist() == list(range(8))
        assert kernels.largest_of(survivors, 1).tolist() == [3]


class TestAdaptive:
    @pytest.mark.parametrize(("size", "chosen"), [(99_999, "int8"), (100_000, "sparse")])
    def test_size_chooses(self, size: int, chosen: str) -> None:
        array = gradient(size)
        encoding, parts = encode("adaptive", array, "F32")
        assert encoding.codec == chosen
        assert raw(decode(encoding.to_object(), parts)) == raw(round_trip(chosen, array, "F32"))

    @pytest.mark.parametrize("name", ["adaptive", "adaptive+feedback"])
    def test_what_is_no_float_is_exact(self, name: str) -> None:
        encoding, _ = encode(name, np.arange(10), "I64")
        assert encoding.codec == "exact"

    def test_no_tensor_says_it_was_encoded_by_adaptive(self) -> None:
        encoding, parts = encode("adaptive", gradient(5), "F32")
        with pytest.raises(Corruption, match="adaptive"):
            decode({**encoding.to_object(), "codec": "adaptive"}, parts)


class TestFeedback:
    """What error feedback is for: what was too small to be sent is sent once it has added up."""

    @pytest.mark.parametrize(("name", "plain"), [("sparse+feedback", "sparse"), ("nf4+feedback", "nf4")])
    def test_a_small_gradient_is_sent_in_the_end(self, name: str, plain: str) -> None:
        array = np.zeros(100, np.float32)
        array[3], array[50] = 1.0, 0.03
        residual = np.zeros(100, np.float32)
        sent = np.zeros((2, 100), np.float32)
        for step in range(200):
            encoding, parts = encode(name, array, "F32", step, residual=residual)
            sent[0] += decode(encoding.to_object(), parts)
            sent[1] += round_trip(plain, array, "F32")
        assert sent[0][50] == pytest.approx(200 * 0.03, abs=1.1)
        assert sent[1][50] == 0

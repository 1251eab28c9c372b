"""Compaction: NumPy says what is right, a loop in Python checks it, the Numba kernels give the same bits."""

from __future__ import annotations

import itertools
import mmap
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.kernels.cpu.compaction import compact as numba
from tiercheck.kernels.cpu.compaction import fp16 as numba_halves
from tiercheck.kernels.cpu.compaction import scatter as numba_scatter
from tiercheck.kernels.cpu.compaction import threshold as numba_threshold
from tiercheck.kernels.cpu.compiled import frozen
from tiercheck.kernels.reference import compaction as reference
from tiercheck.kernels.reference import fp16 as reference_halves
from tiercheck.kernels.reference import scatter as reference_scatter

BOTH = (reference, numba)
COMPILED = (numba.collect, numba.fill, numba_threshold.look, numba_threshold.select)
BOTH_HALVES = (reference_halves, numba_halves)
BOTH_SCATTERS = (reference_scatter, numba_scatter)
DTYPES = (np.float32, np.float16, np.uint16)
SIZES = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4097)
NOT_FINITE = (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF)
SPECIAL = np.array(
    [0, 1 << 31, 1, (1 << 31) + 1, 0x007FFFFF, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF, *NOT_FINITE],
    np.uint32,
)
"""Zeros, denormals, ones, the largest numbers, infinities, NaNs."""

words = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(SPECIAL.tolist()))
patterns = hnp.arrays(np.uint32, st.integers(0, 400), elements=words)
threads = st.integers(1, 4)
floats = st.floats(0, width=32, allow_nan=False)


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Threads and chunks for arrays of a few hundred elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercheck.kernels.threads.PIECE_MIN", 64)
        patch.setattr(numba, "CHUNK", 128)
        numba.idle.clear()
        yield
    numba.idle.clear()


def expected(bits: NDArray[np.uint32], threshold: float) -> list[tuple[int, int]]:
    """Index and pattern of each survivor, the slow way."""
    least = int(np.float32(threshold).view(np.uint32))
    return [(i, bit) for i, bit in enumerate(bits.tolist()) if bit & 0x7FFFFFFF >= least]


def listed(indices: NDArray[np.uint32], survivors: NDArray[np.float32]) -> list[tuple[int, int]]:
    assert indices.dtype == np.uint32
    assert survivors.dtype == np.float32
    return list(zip(indices.tolist(), survivors.view(np.uint32).tolist(), strict=True))


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def same_numbers(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """The same bits but for the payloads of NaNs: of a sum of two NaNs, the hardware keeps either."""
    equal = a.view(np.uint32) == b.view(np.uint32)
    return a.shape == b.shape and bool(np.all(equal | (np.isnan(a) & np.isnan(b))))


def thresholds_at(bits: NDArray[np.uint32]) -> list[float]:
    """Magnitudes that occur, and their neighbours."""
    magnitudes = {int(bit) & 0x7FFFFFFF for bit in bits}
    near = {each + step for each in magnitudes for step in (-1, 0, 1)} | {0, 0x7F800000}
    return [float(np.uint32(each).view(np.float32)) for each in near if 0 <= each <= 0x7F800000]


def some_values(size: int, dtype: type, seed: int = 0) -> NDArray[Any]:
    generator = np.random.default_rng((size, seed))
    if dtype is np.uint16:
        return generator.integers(0, 2**16, size, dtype=np.uint16)
    return generator.standard_normal(size).astype(dtype)


class TestThreshold:
    @pytest.mark.parametrize("kernel", BOTH)
    def test_reaches_the_ratio_from_samples(self, kernel: ModuleType) -> None:
        values = np.random.default_rng(0).standard_normal(1_000_000, dtype=np.float32)
        magnitudes = np.sort(np.abs(values))
        thresholds = np.array([kernel.select_threshold(values, 0.01, seed) for seed in range(40)], np.float32)
        reached = (values.size - np.searchsorted(magnitudes, thresholds)) / (0.01 * values.size)
        assert np.all((reached > 0.85) & (reached < 1.15))
        assert 0.98 < reached.mean() < 1.02
        assert 0.02 < reached.std() < 0.06  # 0.039 for independent samples

    def test_reaches_the_ratio_where_the_large_ones_stand_at_equal_distances(self) -> None:
        plain = np.random.default_rng(0).random(1_000_000, dtype=np.float32)
        for period in (2, 64, 96, 4096, 65536, 100_000):
            values = plain.copy()
            values[np.arange(values.size) % period < -(-period // 50)] += 1
            for seed in range(5):
                threshold = np.float32(numba.select_threshold(values, 0.01, seed))
                assert 0.85 < np.count_nonzero(values >= threshold) / 10_000 < 1.15, (period, seed)

    @pytest.mark.parametrize("kernel", BOTH)
    def test_is_the_exact_quantile_of_a_small_tensor(self, kernel: ModuleType) -> None:
        values = np.arange(1, 1001, dtype=np.float32) * np.float32(-1)
        assert kernel.select_threshold(values, 0.01, 0) == 991.0

    @given(patterns, st.floats(0, 1, exclude_min=True), st.data())
    @settings(max_examples=60)
    def test_of_a_small_tensor_is_the_same_by_numba(
        self, bits: NDArray[np.uint32], ratio: float, data: st.DataObject
    ) -> None:
        residual = data.draw(st.none() | hnp.arrays(np.uint32, bits.size, elements=words))
        kept = None if residual is None else residual.view(np.float32)
        theirs, ours = (kernel.select_threshold(bits.view(np.float32), ratio, 0, residual=kept) for kernel in BOTH)
        assert ours == theirs

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_samples_is_the_same_by_numba(self, dtype: type) -> None:
        generator = np.random.default_rng(1)
        for zeros in (0.0, 0.5, 0.995, 1.0):
            values = some_values(150_001, dtype)
            values[generator.random(values.size) < zeros] = 0
            for size in (reference.SAMPLES - 1, reference.SAMPLES, reference.SAMPLES + 1, values.size):
                for residual in (None, generator.standard_normal(size, dtype=np.float32)):
                    for seed, ratio in ((0, 0.01), (-1, 1.0), (2**70, 1e-9)):
                        theirs, ours = (
                            kernel.select_threshold(values[:size], ratio, seed, residual=residual) for kernel in BOTH
                        )
                        assert ours == theirs, (zeros, size, residual is None, seed)

    @pytest.mark.parametrize("size", [reference.SAMPLES, reference.SAMPLES + 7, 2**32 - 1])
    def test_positions_are_a_run_in_each_stratum(self, size: int) -> None:
        together = reference.SAMPLED_TOGETHER
        runs, places = reference.SAMPLES // together, size // together
        for seed in range(3):
            positions = reference.sample_positions(size, seed).astype(np.int64).reshape(runs, together)
            starts = positions[:, 0]
            assert np.array_equal(positions, starts[:, None] + np.arange(together))
            assert not np.any(starts % together)
            assert int(positions.max()) < size
            begins = np.arange(runs + 1) * places
            assert np.all(begins[:-1] // runs <= starts // together)
            assert np.all(starts // together <= (begins[1:] - 1) // runs)

    def test_positions_are_anywhere_in_their_strata(self) -> None:
        size, runs = 2**31, reference.SAMPLES // reference.SAMPLED_TOGETHER
        width = size // runs
        for seed in range(3):
            within = reference.sample_positions(size, seed)[:: reference.SAMPLED_TOGETHER].astype(np.int64) % width
            counts = np.bincount(within * 16 // width, minlength=16)
            assert np.all(np.abs(counts - runs / 16) < 6 * (runs / 16) ** 0.5)
        assert not np.array_equal(reference.sample_positions(10**6, 1), reference.sample_positions(10**6, 2))

    @pytest.mark.parametrize("kernel", BOTH)
    def test_depends_on_the_seed_and_nothing_else(self, kernel: ModuleType) -> None:
        values = np.random.default_rng(0).standard_normal(200_000, dtype=np.float32)
        chosen = kernel.select_threshold(values, 0.01, 7)
        assert kernel.select_threshold(values.copy(), 0.01, 7) == chosen
        assert kernel.select_threshold(values, 0.01, 8) != chosen

    @pytest.mark.parametrize("kernel", BOTH)
    def test_looks_at_values_and_residual_together_and_changes_neither(self, kernel: ModuleType) -> None:
        generator = np.random.default_rng(0)
        values, residual = (generator.standard_normal(200_000, dtype=np.float32) for _ in range(2))
        before = values.copy(), residual.copy()
        together = kernel.select_threshold(values, 0.01, 3, residual=residual)
        assert together == kernel.select_threshold(values + residual, 0.01, 3)
        assert same_bits(values, before[0])
        assert same_bits(residual, before[1])

    @pytest.mark.parametrize("kernel", BOTH)
    def test_is_never_zero_and_never_above_infinity(self, kernel: ModuleType) -> None:
        assert kernel.select_threshold(np.zeros(100, np.float32), 0.01, 0) > 0
        assert kernel.select_threshold(np.zeros(0, np.float32), 0.01, 0) > 0
        assert kernel.select_threshold(np.full(100, np.nan, np.float32), 0.01, 0) == np.inf

    @pytest.mark.parametrize("kernel", BOTH)
    def test_refuses_a_ratio_outside_of_0_to_1(self, kernel: ModuleType) -> None:
        for ratio in (0.0, -1.0, 1.5, float("nan")):
            with pytest.raises(ValueError, match="ratio"):
                kernel.select_threshold(np.ones(4, np.float32), ratio, 0)


class TestCompact:
    @pytest.mark.parametrize("kernel", BOTH)
    def test_keeps_what_reaches_the_threshold_in_order(self, kernel: ModuleType) -> None:
        values = np.array([0.5, -2.0, 1.0, np.nan, -np.inf, 0.99, -1.0], np.float32)
        indices, survivors = kernel.compact(values, 1.0)
        assert indices.tolist() == [1, 2, 3, 4, 6]
        assert same_bits(survivors, values[indices])

    @pytest.mark.parametrize("kernel", BOTH)
    def test_keeps_every_nan_and_infinity_at_the_largest_threshold(self, kernel: ModuleType) -> None:
        assert kernel.compact(SPECIAL.view(np.float32), float("inf"))[0].tolist() == [9, 10, 11, 12, 13, 14]

    @given(patterns, st.integers(0, 0x7F800000), threads)
    @settings(max_examples=80)
    def test_is_what_a_loop_finds(self, bits: NDArray[np.uint32], threshold: int, count: int) -> None:
        least = float(np.uint32(threshold).view(np.float32))
        for kernel in BOTH:
            found = listed(*kernel.compact(bits.view(np.float32), least, threads=count))
            assert found == expected(bits, least)

    @given(hnp.arrays(np.uint32, st.integers(1, 150), elements=words))
    @settings(max_examples=10)
    def test_a_threshold_that_occurs_is_reached_and_the_next_one_is_not(self, bits: NDArray[np.uint32]) -> None:
        for threshold in thresholds_at(bits):
            for kernel in BOTH:
                assert listed(*kernel.compact(bits.view(np.float32), threshold)) == expected(bits, threshold)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_numba_equals_the_reference_at_the_edges_of_its_groups(self, dtype: type) -> None:
        for size, threshold in itertools.product(SIZES, (0.0, 0.5, 2.0, 1e30)):
            values = some_values(size, dtype)
            theirs = reference.compact(values, threshold)
            for count in (1, 2, 3, 4):
                ours = numba.compact(values, threshold, threads=count)
                assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True)), (size, threshold, count)

    def test_all_equal_elements_survive_together(self) -> None:
        magnitudes = (0.0, 1e-45, 1.5, np.inf)
        for value, threshold in itertools.product((*magnitudes, -0.0, np.nan), magnitudes):
            values = np.full(1001, value, np.float32)
            survives = not abs(value) < threshold
            for count in (1, 4):
                found = numba.compact(values, threshold, threads=count)[0]
                assert found.size == survives * values.size, (value, threshold, count)

    @pytest.mark.parametrize("dtype", [np.uint16, np.float16])
    def test_sixteen_bit_patterns_compare_by_their_values(self, dtype: type) -> None:
        values: NDArray[Any] = np.arange(2**16, dtype=np.uint16).view(dtype)
        wide = reference.widened(values)
        thresholds = [float(each) for each in np.abs(wide[::997]) if not np.isnan(each)]
        for threshold in (*thresholds, 0.0, 1e-45, 5.9e-8, 6e-8, 65504.0, 65519.0, 65521.0, 1e30, np.inf):
            theirs = reference.compact(wide, threshold)
            for kernel in BOTH:
                assert all(same_bits(a, b) for a, b in zip(kernel.compact(values, threshold), theirs, strict=True))

    @pytest.mark.parametrize("kernel", BOTH)
    def test_refuses_a_threshold_that_is_no_magnitude(self, kernel: ModuleType) -> None:
        for threshold in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="magnitude"):
                kernel.compact(np.ones(3, np.float32), threshold)

    @pytest.mark.parametrize("kernel", BOTH)
    def test_refuses_arrays_that_it_cannot_work_on(self, kernel: ModuleType) -> None:
        values = np.ones(8, np.float32)
        with pytest.raises(ValueError, match="float32, float16 or bf16"):
            kernel.compact(values.astype(np.float64), 1.0)
        with pytest.raises(ValueError, match="contiguous"):
            kernel.compact(values[::2], 1.0)
        with pytest.raises(ValueError, match="aligned"):
            kernel.compact(np.frombuffer(bytes(33), np.float32, offset=1), 1.0)
        with pytest.raises(ValueError, match="32 bits"):
            kernel.compact(np.broadcast_to(np.float32(0), 2**32), 1.0)
        for residual in (np.ones(7, np.float32), np.ones(8, np.float64)):
            with pytest.raises(ValueError, match="residual"):
                kernel.compact(values, 1.0, residual=residual)
        residual.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            kernel.compact(values, 1.0, residual=frozen(np.ones(8, np.float32)))

    def test_indices_past_two_to_the_31_are_right(self) -> None:
        """The pages are never written to, so that the array takes no memory."""
        values = np.zeros(2**31 + 1000, np.uint16)
        ends = [0, 2**31 - 1, 2**31, 2**31 + 999]
        values[ends] = 0x3F80
        assert listed(*numba.compact(values, 1.0, threads=2)) == [(each, 0x3F800000) for each in ends]


class TestBuffers:
    @pytest.mark.parametrize("kernel", BOTH)
    @pytest.mark.parametrize("threshold", [0.0, 0.7, 2.5, 9.0])
    def test_hold_the_first_and_nothing_is_written_around_them(self, kernel: ModuleType, threshold: float) -> None:
        values = some_values(700, np.float32)
        indices, survivors = reference.compact(values, threshold)
        capacities = {0, 1, 63, 64, 65, 130, 400, 699, 700, 900, indices.size, max(0, indices.size - 1)}
        for count, capacity in itertools.product((1, 2, 4), capacities):
            space = np.full(capacity + 200, 7, np.uint32), np.full(capacity + 200, 7, np.float32)
            found = kernel.compact_into(
                values, threshold, *(each[100 : 100 + capacity] for each in space), threads=count
            )
            held = min(found, capacity)
            assert found == indices.size
            assert same_bits(space[0][100 : 100 + held], indices[:held])
            assert same_bits(space[1][100 : 100 + held], survivors[:held])
            assert all(np.all(each[:100] == 7) and np.all(each[100 + capacity :] == 7) for each in space)

    @given(st.integers(0, 300), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 2999), st.integers(0, 300))))
    @settings(max_examples=40)
    def test_clusters_anywhere_fill_them_in_order(
        self, capacity: int, count: int, clusters: list[tuple[int, int]]
    ) -> None:
        values = np.zeros(3000, np.float32)
        for start, length in clusters:
            values[start : start + length] = 1 + start
        found, exact = reference.compact(values, 1.0)
        indices, survivors = np.empty(capacity, np.uint32), np.empty(capacity, np.float32)
        assert numba.compact_into(values, 1.0, indices, survivors, threads=count) == found.size
        held = min(capacity, found.size)
        assert same_bits(indices[:held], found[:held])
        assert same_bits(survivors[:held], exact[:held])

    @pytest.mark.parametrize("kernel", BOTH)
    def test_of_other_sizes_dtypes_or_layouts_are_refused(self, kernel: ModuleType) -> None:
        values, indices, survivors = np.ones(8, np.float32), np.empty(8, np.uint32), np.empty(8, np.float32)
        for wrong in ((indices[:7], survivors), (indices.view(np.int32), survivors), (indices, indices)):
            with pytest.raises(ValueError, match="indices are uint32"):
                kernel.compact_into(values, 1.0, *wrong)
        with pytest.raises(ValueError, match="contiguous"):
            kernel.compact_into(values, 1.0, indices[::2], survivors[::2])
        with pytest.raises(ValueError, match="read-only"):
            kernel.compact_into(values, 1.0, indices, frozen(survivors))

    @pytest.mark.parametrize("count", [1, 3])
    def test_that_are_given_are_all_the_memory_it_takes(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        values = some_values(2_000_000, np.float32)
        indices, survivors = np.empty(100_000, np.uint32), np.empty(100_000, np.float32)
        monkeypatch.setattr(numba, "CHUNK", 1 << 16)
        numba.idle.clear()
        for _ in range(2):  # the first call makes the threads' private buffers
            tracemalloc.start()
            found = numba.compact_into(values, 2.4, indices, survivors, threads=count)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        numba.idle.clear()
        assert 10_000 < found < 100_000
        assert peak < 50_000


class TestResidual:
    @given(patterns, st.data(), threads, floats)
    @settings(max_examples=60)
    def test_is_added_first_and_becomes_the_sum(
        self, bits: NDArray[np.uint32], data: st.DataObject, count: int, threshold: float
    ) -> None:
        kept = data.draw(hnp.arrays(np.uint32, bits.size, elements=words)).view(np.float32)
        values = bits.view(np.float32)
        with np.errstate(all="ignore"):
            exact = values + kept
        for kernel in BOTH:
            residual = kept.copy()
            indices, survivors = kernel.compact(values, threshold, residual=residual, threads=count)
            assert same_numbers(residual, exact)
            assert same_bits(survivors, residual[indices])
            assert listed(indices, survivors) == expected(residual.view(np.uint32), threshold)

    @pytest.mark.parametrize("dtype", DTYPES)
    @given(size=st.sampled_from(SIZES) | st.integers(0, 4097), capacity=st.sampled_from([0, 1, 100, 5000]))
    @example(size=1000, capacity=100)  # the buffers are full in the midst of a thread's chunk,
    @example(size=4097, capacity=0)  # and before the first
    @settings(max_examples=40)
    def test_is_the_sum_everywhere_where_the_buffers_are_too_small(self, dtype: type, size: int, capacity: int) -> None:
        values, start = some_values(size, dtype), some_values(size, np.float32, seed=1)
        exact = start.copy()
        indices, survivors = reference.compact(values, 0.5, residual=exact)
        for count in (1, 2, 4):
            residual, held = start.copy(), min(capacity, indices.size)
            buffers = np.empty(capacity, np.uint32), np.empty(capacity, np.float32)
            found = numba.compact_into(values, 0.5, *buffers, residual=residual, threads=count)
            assert found == indices.size
            assert same_numbers(residual, exact)
            assert same_bits(buffers[0][:held], indices[:held])
            assert same_numbers(buffers[1][:held], survivors[:held])
            again = numba.compact(residual, 0.5, threads=count)
            assert same_bits(again[0], indices)

    def test_nothing_is_lost_over_many_encodings(self) -> None:
        """What was stored plus the residual is the sum of all gradients."""
        generator = np.random.default_rng(0)
        total, stored = (np.zeros(5000, np.float64) for _ in range(2))
        residual, halves = np.zeros(5000, np.float32), np.empty(5000, np.float16)
        for seed in range(10):
            gradient = generator.standard_normal(5000, dtype=np.float32)
            threshold = numba.select_threshold(gradient, 0.01, seed, residual=residual)
            indices, survivors = numba.compact(gradient, threshold, residual=residual)
            exponent = numba_halves.to_half(survivors, halves[: indices.size])
            decoded = numba_halves.from_half(halves[: indices.size], exponent)
            numba_scatter.settle(residual, indices, survivors, decoded)
            total += gradient
            stored[indices] += decoded
            assert 0 < indices.size < 200
        assert np.allclose(stored + residual, total, atol=1e-5)


class TestHalves:
    @given(hnp.arrays(np.uint32, st.integers(0, 200), elements=words), st.integers(0, 255))
    @settings(max_examples=150)
    def test_numba_equals_the_reference(self, bits: NDArray[np.uint32], top: int) -> None:
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = np.where(finite & ((bits >> 23) & 0xFF > top), bits & np.uint32(0x80FFFFFF), bits)
        self.check(bits.view(np.float32))

    def test_numba_equals_the_reference_at_the_ends(self) -> None:
        for values in ([], [0.0, -0.0], [np.nan, np.inf], [1e-45], [3.4028235e38, 1e-45]):
            self.check(np.array(values, np.float32))

    @staticmethod
    def check(values: NDArray[np.float32]) -> None:
        theirs, ours = (np.empty(values.size, np.float16) for _ in range(2))
        exponent = reference_halves.to_half(values, theirs)
        assert numba_halves.to_half(values, ours) == exponent
        assert same_bits(ours, theirs)
        decoded = reference_halves.from_half(theirs, exponent)
        assert same_bits(numba_halves.from_half(ours, exponent), decoded)
        finite = np.isfinite(values)
        assert np.array_equal(finite, np.isfinite(decoded))
        before, after = (each[finite].astype(np.float64) for each in (values, decoded))
        size, off = np.abs(before), np.abs(after - before)
        assert np.all(off <= np.maximum(size * 2.0**-11, size.max(initial=0) * 2.0**-39))
        if size.max(initial=0):
            assert 2.0**14 <= size.max() * 2.0**exponent < 2.0**15

    def test_every_half_comes_back_alike_under_every_scale(self) -> None:
        every = np.arange(2**16, dtype=np.uint16).view(np.float16)
        limit = reference_halves.EXPONENT_MAX
        for exponent in (*range(-limit, limit + 1, 7), -127, -126, 126, 127, -149, 149, -limit, limit):
            theirs, ours = (kernel.from_half(every, exponent) for kernel in BOTH_HALVES)
            assert same_bits(ours, theirs)

    @pytest.mark.parametrize("kernel", BOTH_HALVES)
    def test_refuses_other_sizes_and_scales(self, kernel: ModuleType) -> None:
        with pytest.raises(ValueError, match="do not go into"):
            kernel.to_half(np.ones(3, np.float32), np.empty(2, np.float16))
        with pytest.raises(ValueError, match="do not go into"):
            kernel.to_half(np.ones(3, np.float32), np.empty(3, np.uint16))
        for exponent in (165, -165, 2**40):
            with pytest.raises(ValueError, match="exponent"):
                kernel.from_half(np.ones(3, np.float16), exponent)


class TestScatter:
    @given(hnp.arrays(np.uint32, st.integers(0, 60), elements=st.integers(0, 49)), st.integers(0, 2**32))
    @settings(max_examples=40)
    def test_numba_equals_the_reference(self, indices: NDArray[np.uint32], seed: int) -> None:
        generator = np.random.default_rng(seed)
        values, decoded, start = (generator.standard_normal(n, dtype=np.float32) for n in (indices.size,) * 2 + (50,))
        values[::5], decoded[::7], values[3:4] = np.inf, values[::7], np.nan
        for name, arguments in (("scatter", (values,)), ("scatter_add", (values,))):
            outs = [start.copy() for _ in BOTH_SCATTERS]
            for kernel, out in zip(BOTH_SCATTERS, outs, strict=True):
                getattr(kernel, name)(indices, *arguments, out)
            assert same_numbers(*outs)
        outs = [start.copy() for _ in BOTH_SCATTERS]
        for kernel, out in zip(BOTH_SCATTERS, outs, strict=True):
            kernel.settle(out, indices, values, decoded)
        assert same_numbers(*outs)
        assert np.all(np.isfinite(outs[0]))

    @pytest.mark.parametrize("kernel", BOTH_SCATTERS)
    def test_scatters_and_settles(self, kernel: ModuleType) -> None:
        indices, values = np.array([1, 3], np.uint32), np.array([2, np.nan], np.float32)
        out = np.ones(5, np.float32)
        kernel.scatter(indices, values, out)
        assert np.array_equal(out, [0, 2, 0, np.nan, 0], equal_nan=True)
        out[:] = 1
        kernel.scatter_add(indices, np.array([2, 4], np.float32), out)
        assert out.tolist() == [1, 3, 1, 5, 1]
        kernel.settle(out, indices, values, np.array([1.5, np.nan], np.float32))
        assert out.tolist() == [1, 0.5, 1, 0, 1]

    @pytest.mark.parametrize("kernel", BOTH_SCATTERS)
    def test_an_index_beyond_the_end_writes_nothing(self, kernel: ModuleType) -> None:
        values, out = np.ones(2, np.float32), np.full(5, 7, np.float32)
        for bad in (5, 2**31, 2**32 - 1):
            indices = np.array([0, bad], np.uint32)
            with pytest.raises(IndexError, match="beyond"):
                kernel.scatter(indices, values, out)
            with pytest.raises(IndexError, match="beyond"):
                kernel.scatter_add(indices, values, out)
            with pytest.raises(IndexError, match="beyond"):
                kernel.settle(out, indices, values, values)
        assert np.all(out == 7)

    @pytest.mark.parametrize("kernel", BOTH_SCATTERS)
    def test_refuses_other_sizes_and_dtypes(self, kernel: ModuleType) -> None:
        indices, values, out = np.zeros(2, np.uint32), np.ones(3, np.float32), np.ones(5, np.float32)
        with pytest.raises(ValueError, match="one value each"):
            kernel.scatter(indices, values, out)
        with pytest.raises(ValueError, match="uint32"):
            kernel.scatter(indices.view(np.int32), values[:2], out)
        with pytest.raises(ValueError, match="float32"):
            kernel.scatter_add(indices, values[:2].astype(np.float64), out)
        with pytest.raises(ValueError, match="read-only"):
            kernel.settle(frozen(out), indices, values[:2], values[:2])


class TestCompilation:
    def test_after_a_warm_up_no_call_compiles(self, tmp_path: Path) -> None:
        """Whether the values can be written to, lie in mapped memory, or are a slice of something."""
        kernels.warm_up()
        before = [len(kernel.signatures) for kernel in COMPILED]
        path = tmp_path / "gradient"
        path.write_bytes(some_values(1000, np.float32).tobytes())
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for dtype in DTYPES:
                own, view = some_values(1000, dtype), np.frombuffer(mapped, dtype)
                for values in (own, own[100:], frozen(own), view):
                    buffers = np.empty(300, np.uint32), np.empty(300, np.float32)
                    for residual in (None, np.zeros(values.size, np.float32)):
                        numba.select_threshold(values, 0.01, 0, residual=residual)
                        numba.compact(values, 1.0, residual=residual, threads=2)
                        numba.compact_into(values, 1.0, *buffers, residual=residual)
                del values, view
        assert [len(kernel.signatures) for kernel in COMPILED] == before

"""What the CUDA kernels must do wherever they run: the bits of the reference, and no write beyond an array's ends.

A subclass gives the fixture ``machine``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gpu.exponent_tests import CudaExponentTests
from tests.gpu.inputs import (
    Floats,
    adam_steps,
    gradient,
    identical,
    narrowed,
    same,
    sums_that_depend_on_their_order,
)
from tests.gpu.machine import Machine, need_cupy
from tests.gpu.replay_tests import CudaReplayTests
from tiercheck.errors import ConfigurationError
from tiercheck.kernels.gpu_adam import FAST, ROUNDINGS, Powers
from tiercheck.kernels.reference import (
    averages,
    bfloat16,
    blocks,
    compaction,
    fp16,
    nf4,
    onebit,
    planes,
    scale_search,
    scaled,
)
from tiercheck.kernels.reference.scatter import scatter, scatter_add, settle
from tiercheck.streams.codecs import DTYPES
from tiercheck.streams.codecs import codec as codec_of
from tiercheck.streams.codecs.floats import from_float32

need_cupy()

from tiercheck.kernels import cuda  # noqa: E402  it imports CuPy, which was just asked for

__all__ = ["CudaKernelTests"]


class CudaKernelTests(CudaExponentTests, CudaReplayTests):
    """Every kernel against the reference."""

    # compaction

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
    @pytest.mark.parametrize("with_residual", [False, True])
    def test_compaction(self, machine: Machine, dtype: type, with_residual: bool) -> None:
        for size in machine.sizes:
            values = narrowed(gradient(size), dtype)
            residual = gradient(size, seed=1, special=False) if with_residual else None
            threshold = 0.01 if size % 2 else 0.0
            self.compact_and_compare(machine, values, threshold, residual, slack=3)

    def test_a_full_buffer_keeps_the_first_and_the_count_tells(self, machine: Machine) -> None:
        values = gradient(9001)
        for slack in (-1, -100, 0, -10_000):
            self.compact_and_compare(machine, values, 0.01, gradient(9001, seed=1, special=False), slack=slack)

    def test_elements_that_equal_the_threshold_survive(self, machine: Machine) -> None:
        values = np.full(5000, -0.25, np.float32)
        assert self.compact_and_compare(machine, values, 0.25, None, slack=0) == 5000
        assert self.compact_and_compare(machine, values, np.nextafter(np.float32(0.25), np.float32(1)), None, 0) == 0

    def compact_and_compare(
        self, machine: Machine, values: NDArray[Any], threshold: float, residual: Floats | None, slack: int
    ) -> int:
        expected_residual = None if residual is None else residual.copy()
        found, survived = compaction.compact(values, threshold, residual=expected_residual)
        capacity = max(0, found.size + slack)
        held = min(capacity, found.size)
        indices, survivors = machine.put(np.zeros(capacity, np.uint32)), machine.put(np.zeros(capacity, np.float32))
        count = machine.put(np.full(1, 99, np.uint32))
        workspace = machine.put(np.full(cuda.compact_workspace(values.size), 2**63 + 5, np.uint64))
        on_device, lost = machine.put(values), None if residual is None else machine.put(residual)
        cuda.compact_into(
            on_device,
            machine.put(np.array([threshold], np.float32)),
            indices,
            survivors,
            count,
            workspace,
            residual=lost,
            stream=machine.stream,
        )
        assert machine.get(count)[0] == found.size
        assert identical(machine.get(indices)[:held], found[:held])
        assert identical(machine.get(survivors)[:held], survived[:held])
        assert identical(machine.get(on_device), values)
        for array in (indices, survivors, count, workspace):
            assert machine.intact(array)
        if lost is not None and expected_residual is not None:
            assert identical(machine.get(lost), expected_residual)
            assert machine.intact(lost)
        return int(found.size)

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
    @pytest.mark.parametrize("with_residual", [False, True])
    def test_of_too_many_the_largest_are_kept(self, machine: Machine, dtype: type, with_residual: bool) -> None:
        for size in machine.sizes:
            values = narrowed(gradient(size), dtype)
            residual = gradient(size, seed=1, special=False) if with_residual else None
            for capacity in {0, 1, size // 90, size // 2, size - 1, size} - {-1}:
                self.keep_and_compare(machine, values, 0.01, residual, capacity)

    def test_of_equal_ones_the_first_are_kept(self, machine: Machine) -> None:
        values = np.full(5000, -0.25, np.float32)
        values[1::2] *= -1
        for capacity in (1, 1024, 2500, 4999):
            self.keep_and_compare(machine, values, 0.25, None, capacity)
        values[[7, 2050, 4999]] = [0.5, -0.5, np.inf]
        for capacity in (1, 3, 5, 1500):
            self.keep_and_compare(machine, values, 0.25, np.zeros(5000, np.float32), capacity)

    def test_more_that_are_not_finite_than_are_wanted_are_counted(self, machine: Machine) -> None:
        values = np.full(3000, np.nan, np.float32)
        values[::3] = np.inf
        values[5::100] = 1
        for residual in (None, np.full(3000, 0.5, np.float32)):
            assert self.keep_and_compare(machine, values, 1.0, residual, 40) == 3000 - 30

    def keep_and_compare(
        self, machine: Machine, values: NDArray[Any], threshold: float, residual: Floats | None, capacity: int
    ) -> int:
        elements = np.zeros(values.size, np.float32) if residual is None else residual.copy()
        if residual is None:
            elements = compaction.widened(values).copy()
        found, _ = compaction.compact(values, threshold, residual=None if residual is None else elements)
        strange = ~np.isfinite(elements)
        too_many = found.size > capacity
        kept = compaction.largest_of(elements, capacity) if too_many and capacity else found[:capacity]
        left = elements.copy()
        if too_many:
            left[strange] = 0

        on_device, lost = machine.put(values), None if residual is None else machine.put(residual)
        indices, survivors = machine.put(np.zeros(capacity, np.uint32)), machine.put(np.zeros(capacity, np.float32))
        count, nonfinite = machine.put(np.full(1, 99, np.uint32)), machine.put(np.full(1, 99, np.uint32))
        least = machine.put(np.array([threshold], np.float32))
        workspace = machine.put(np.zeros(cuda.compact_workspace(values.size), np.uint64))
        to: dict[str, Any] = {"residual": lost, "stream": machine.stream}
        cuda.compact_into(on_device, least, indices, survivors, count, workspace, **to)
        cuda.keep_largest(on_device, indices, survivors, count, nonfinite, **to)
        assert machine.get(count)[0] == kept.size
        assert machine.get(nonfinite)[0] == np.count_nonzero(strange)
        assert identical(machine.get(indices)[: kept.size], kept.astype(np.uint32))
        assert identical(machine.get(survivors)[: kept.size], elements[kept])
        assert identical(machine.get(on_device), values)
        for array in (indices, survivors, count, nonfinite):
            assert machine.intact(array)
        if lost is not None:
            assert identical(machine.get(lost), left)
            assert machine.intact(lost)
        return int(machine.get(nonfinite)[0])

    @pytest.mark.parametrize(
        ("size", "dtype", "ratio", "with_residual"),
        [
            (0, np.float32, 0.5, False),
            (1, np.float32, 0.01, True),
            (300, np.uint16, 0.5, True),
            (301, np.float16, 1.0, False),
            (70_001, np.float32, 0.01, True),
        ],
    )
    def test_threshold(self, machine: Machine, size: int, dtype: type, ratio: float, with_residual: bool) -> None:
        values = narrowed(gradient(size), dtype)
        residual = gradient(size, seed=1, special=False) if with_residual else None
        threshold = machine.put(np.zeros(1, np.float32))
        workspace = machine.put(np.zeros(min(size, compaction.SAMPLES), np.uint32))
        lost = None if residual is None else machine.put(residual)
        cuda.select_threshold(machine.put(values), ratio, 7, threshold, workspace, residual=lost, stream=machine.stream)
        expected = compaction.select_threshold(values, ratio, 7, residual=residual)
        assert float(machine.get(threshold)[0]) == expected
        assert machine.intact(workspace)

    # survivors

    def test_every_half_comes_back(self, machine: Machine) -> None:
        every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
        for exponent in (0, 15, -113, 98, 164, -164):
            values = machine.put(np.zeros(every.size, np.float32))
            cuda.from_half(
                machine.put(every), machine.put(np.array([exponent], np.int32)), values, stream=machine.stream
            )
            expected = fp16.from_half(every, exponent)
            assert same(machine.get(values), expected), exponent

    def test_values_become_halves(self, machine: Machine) -> None:
        generator = np.random.default_rng(3)
        anything = generator.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
        tiny = (generator.integers(0, 2**23, 999, dtype=np.uint32)).view(np.float32)
        near_ties = (generator.integers(0, 2**11, 3000) * 4096 + generator.integers(-1, 2, 3000)).astype(np.float32)
        for values in (anything, tiny, near_ties, gradient(999), np.zeros(5, np.float32), np.zeros(0, np.float32)):
            out, exponent = machine.put(np.zeros(values.size, np.float16)), machine.put(np.zeros(1, np.int32))
            cuda.to_half(
                machine.put(values), out, exponent, machine.put(np.full(1, 9, np.uint32)), stream=machine.stream
            )
            expected = np.zeros(values.size, np.float16)
            assert machine.get(exponent)[0] == fp16.to_half(values, expected)
            assert same(machine.get(out), expected)
            assert machine.intact(out)

    def test_a_count_on_the_device_bounds_the_work(self, machine: Machine) -> None:
        values = np.arange(1, 101, dtype=np.float32)
        for counted in (0, 7, 100, 4_000_000_000):
            held = min(counted, 100)
            count = machine.put(np.array([counted], np.uint32))
            out, exponent = machine.put(np.zeros(100, np.float16)), machine.put(np.zeros(1, np.int32))
            workspace = machine.put(np.zeros(1, np.uint32))
            cuda.to_half(machine.put(values), out, exponent, workspace, count=count, stream=machine.stream)
            expected = np.zeros(100, np.float16)
            assert machine.get(exponent)[0] == fp16.to_half(values[:held], expected[:held])
            assert identical(machine.get(out), expected)
            assert machine.intact(out)

    def test_survivors_go_home(self, machine: Machine) -> None:
        size = 5003
        generator = np.random.default_rng(4)
        indices = np.sort(generator.choice(size, 700, replace=False)).astype(np.uint32)
        survivors, decoded = gradient(700), gradient(700, seed=1)
        start = gradient(size, special=False)
        on_device = [machine.put(array) for array in (indices, survivors, decoded)]
        for name in ("scatter", "scatter_add", "settle"):
            expected, out = start.copy(), machine.put(start)
            if name == "settle":
                settle(expected, indices, survivors, decoded)
                cuda.settle(out, *on_device, stream=machine.stream)
            else:
                {"scatter": scatter, "scatter_add": scatter_add}[name](indices, survivors, expected)
                getattr(cuda, name)(*on_device[:2], out, stream=machine.stream)
            assert same(machine.get(out), expected), name
            assert machine.intact(out)

    def test_an_index_beyond_the_array_writes_nothing(self, machine: Machine) -> None:
        indices = machine.put(np.array([1, 10, 11, 2**32 - 1], np.uint32))
        values = machine.put(np.ones(4, np.float32))
        for name in ("scatter", "scatter_add", "settle"):
            out = machine.put(np.zeros(10, np.float32))
            if name == "settle":
                cuda.settle(out, indices, values, machine.put(np.zeros(4, np.float32)), stream=machine.stream)
            else:
                getattr(cuda, name)(indices, values, out, stream=machine.stream)
            assert machine.get(out).tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
            assert machine.intact(out)

    # blocks

    @pytest.mark.parametrize("codec", ["int8", "nf4", "onebit"])
    def test_block_codes(self, machine: Machine, codec: str) -> None:
        for size in machine.sizes:
            self.encode_and_compare(machine, codec, gradient(size), None)
            residual = np.zeros(size, np.float32)
            for iteration in range(3):
                residual = self.encode_and_compare(machine, codec, gradient(size, iteration), residual)

    @pytest.mark.parametrize("codec", ["int8", "nf4", "onebit"])
    def test_block_codes_of_extremes(self, machine: Machine, codec: str) -> None:
        largest, smallest = np.finfo(np.float32).max, np.float32(1e-45)
        tiny = np.arange(-128, 172).astype(np.float32) * smallest
        halfway = np.full(300, 2.0**126, np.float32)
        halfway[::2] = 2.0**-126
        cases = [
            np.full(300, largest, np.float32),
            np.full(257, -largest, np.float32),
            tiny,
            halfway,
            np.full(129, smallest, np.float32),
            np.full(640, 127 * 2.0**-126, np.float32),
            np.where(np.arange(512) < 256, np.float32(np.nan), np.float32(1)),
            np.linspace(-1, 1, 4 * 256 + 1, dtype=np.float32),
            np.linspace(-1, 1, 513).astype(np.float32) * largest,
            sums_that_depend_on_their_order(),
        ]
        cases += [(nf4.BOUNDARIES[at % 15] * np.ones(256, np.float32)) for at in range(15)]
        for case in cases[-15:]:
            case[0] = 1
        for values in cases:
            self.encode_and_compare(machine, codec, values, None)
            self.encode_and_compare(machine, codec, values, np.full(values.size, largest / 2, np.float32))

    @pytest.mark.parametrize("codec", ["int8", "nf4", "onebit"])
    @pytest.mark.parametrize("dtype", ["F16", "BF16"])
    def test_block_codes_of_half_precision(self, machine: Machine, codec: str, dtype: str) -> None:
        """What the codec makes of them on the host, which widens them first, and rounds what it decodes."""
        spoilt = np.array([np.nan, np.inf, -np.inf, 65504, 1e-7, 3e38, -0.0], np.float32)
        for size in machine.sizes:
            residual = np.zeros(size, np.float32)
            for iteration in range(3):
                values = gradient(size, iteration, special=iteration == 2)
                values[: min(size, 7)] = spoilt[: min(size, 7)] if iteration == 1 else values[: min(size, 7)]
                array = from_float32(values, dtype)
                self.encode_half_and_compare(machine, codec, array, dtype, None)
                residual = self.encode_half_and_compare(machine, codec, array, dtype, residual)

    def encode_half_and_compare(
        self, machine: Machine, codec: str, array: NDArray[Any], dtype: str, residual: Floats | None
    ) -> Floats:
        lost = np.zeros(0, np.float32) if residual is None else residual.copy()
        parts: dict[str, NDArray[np.uint8]] = {}

        def slot(suffix: str, kind: str, shape: tuple[int, ...]) -> memoryview:
            parts[suffix] = np.zeros(int(np.prod(shape)) * DTYPES[kind].itemsize, np.uint8)
            return parts[suffix].data

        made: Any = codec_of(codec)
        made.encode(array, dtype, seed=0, slot=slot, residual=None if residual is None else lost)
        planned = made.parts(array.size)
        there = [machine.put(np.zeros(part.nbytes, np.uint8).view(DTYPES[part.dtype])) for part in planned]
        values, lost_there = machine.put(array), None if residual is None else machine.put(residual)
        name = {"int8": "quantise", "nf4": "quantise_nf4", "onebit": "quantise_onebit"}[codec]
        getattr(cuda, f"{name}_into")(values, *there, residual=lost_there, stream=machine.stream)
        for part, held in zip(planned, there, strict=True):
            assert identical(machine.get(held).view(np.uint8), parts[part.suffix]), part.suffix
            assert machine.intact(held)
        if lost_there is not None:
            assert identical(machine.get(lost_there), lost)
            assert machine.intact(lost_there)
        return lost

    def encode_and_compare(self, machine: Machine, codec: str, values: Floats, residual: Floats | None) -> Floats:
        size = values.size
        count = -(-size // (onebit.ONEBIT_BLOCK if codec == "onebit" else blocks.BLOCK))
        codes: NDArray[Any] = {
            "int8": np.zeros(size, np.int8),
            "nf4": np.zeros(count * nf4.HALF, np.uint8),
            "onebit": np.zeros(count * onebit.SIGN_BYTES, np.uint8),
        }[codec]
        scales = np.zeros(count, np.uint16 if codec == "onebit" else np.float32)
        lost = np.zeros(0, np.float32) if residual is None else residual.copy()
        on_device, codes_there, scales_there = (machine.put(array) for array in (values, codes, scales))
        lost_there = None if residual is None else machine.put(residual)
        name = {"int8": "quantise", "nf4": "quantise_nf4", "onebit": "quantise_onebit"}[codec]
        module_of: Any = {"int8": blocks, "nf4": nf4, "onebit": onebit}[codec]
        getattr(module_of, f"{name}_into")(values, codes, scales, residual=None if residual is None else lost)
        getattr(cuda, f"{name}_into")(on_device, codes_there, scales_there, residual=lost_there, stream=machine.stream)
        assert identical(machine.get(codes_there), codes)
        assert identical(machine.get(scales_there), scales)
        assert machine.intact(codes_there) and machine.intact(scales_there)
        if lost_there is not None:
            assert identical(machine.get(lost_there), lost)
            assert machine.intact(lost_there)
        decoded = machine.put(np.zeros(size, np.float32))
        getattr(cuda, f"de{name}_into")(codes_there, scales_there, decoded, stream=machine.stream)
        assert same(machine.get(decoded), self.decoded(codec, codes, scales, size))
        assert machine.intact(decoded)
        return lost

    def decoded(self, codec: str, codes: NDArray[Any], scales: NDArray[Any], size: int) -> Floats:
        if codec == "int8":
            return blocks.dequantise(codes, scales)
        return (nf4.dequantise_nf4 if codec == "nf4" else onebit.dequantise_onebit)(codes, scales, size)

    @pytest.mark.parametrize("codec", ["int8", "nf4", "onebit"])
    def test_any_bytes_decode(self, machine: Machine, codec: str) -> None:
        generator = np.random.default_rng(5)
        for size in (1, 255, 2049):
            count = -(-size // (onebit.ONEBIT_BLOCK if codec == "onebit" else blocks.BLOCK))
            length = {"int8": size, "nf4": count * nf4.HALF, "onebit": count * onebit.SIGN_BYTES}[codec]
            codes = generator.integers(0, 256, length, dtype=np.uint8).view(np.int8 if codec == "int8" else np.uint8)
            raw = generator.integers(0, 2**32, count, dtype=np.uint32)
            raw[::3] = 0x7F800000
            scales = (raw >> 16).astype(np.uint16) if codec == "onebit" else raw.view(np.float32)
            out = machine.put(np.zeros(size, np.float32))
            name = {"int8": "dequantise_into", "nf4": "dequantise_nf4_into", "onebit": "dequantise_onebit_into"}[codec]
            getattr(cuda, name)(machine.put(codes), machine.put(scales), out, stream=machine.stream)
            assert same(machine.get(out), self.decoded(codec, codes, scales, size))
            assert machine.intact(out)

    # patterns

    def test_bfloat16(self, machine: Machine) -> None:
        for size in machine.sizes:
            values = gradient(size)
            exact = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            expected = np.zeros(size, np.uint16)
            bfloat16.narrow_into(exact, expected)
            low, narrowed = machine.put(np.full(1, 7, np.uint32)), machine.put(np.zeros(size, np.uint16))
            widened = machine.put(np.zeros(size, np.float32))
            cuda.find_low_halves(machine.put(exact), low, stream=machine.stream)
            cuda.narrow_into(machine.put(exact), narrowed, stream=machine.stream)
            cuda.widen_into(narrowed, widened, stream=machine.stream)
            assert machine.get(low)[0] == 0
            assert identical(machine.get(narrowed), expected)
            assert identical(machine.get(widened), exact)
            assert machine.intact(narrowed) and machine.intact(widened)
            if size:
                exact.view(np.uint32)[size // 2] |= 1
                cuda.find_low_halves(machine.put(exact), low, stream=machine.stream)
                assert machine.get(low)[0] != 0

    @pytest.mark.parametrize("dtype", [np.uint16, np.float16])
    @pytest.mark.parametrize("scale", [0.5, float(np.float32(0.7)), float(np.float32(1 / 3)) * 2.0**-20])
    def test_scaled(self, machine: Machine, dtype: type, scale: float) -> None:
        for size in machine.sizes:
            halves = np.random.default_rng(size).integers(0, 2**16, size, dtype=np.uint16).view(dtype)
            products = scaled.widen_scaled(halves, scale)
            widened = machine.put(np.zeros(size, np.float32))
            cuda.widen_scaled_into(machine.put(halves), scale, widened, stream=machine.stream)
            assert same(machine.get(widened), products)
            assert machine.intact(widened)
            regular = scaled.are_regular(products) & scaled.are_regular(scaled.numbers_of(halves))
            for values in (products, products[regular], gradient(size)):
                expected = np.zeros(values.size, dtype)
                exact = scaled.narrow_scaled_into(values, scale, expected)
                out, lost = machine.put(np.ones(values.size, dtype)), machine.put(np.full(1, 7, np.uint32))
                cuda.narrow_scaled_into(machine.put(values), scale, out, lost, stream=machine.stream)
                assert identical(machine.get(out).view(np.uint16), expected.view(np.uint16))
                assert (machine.get(lost)[0] == 0) == exact
                assert machine.intact(out) and machine.intact(lost)

    @pytest.mark.parametrize("scale", [1.0, 0.5, 0.7, 1 / 3, 2.0**-23 * 12345677, None])
    def test_scales_that_are_found(self, machine: Machine, scale: float | None) -> None:
        """``None``: values that have no scale."""
        generator = np.random.default_rng(3)
        for sizes in ((), (0,), (1,), (5, 300), (4097, 0, 31, 129)):
            tensors = []
            for size in sizes:
                halves = generator.integers(0, 2**16, size, dtype=np.uint16)
                halves[::3] = 0
                values = gradient(size) if scale is None else scaled.widen_scaled(halves, float(np.float32(scale)))
                values[~scaled.are_regular(values)] = 0
                tensors.append(values)
            expected = scale_search.find_scale(tensors)
            found = machine.put(np.full(scale_search.FOUND_NBYTES, 0xFF, np.uint8))
            cuda.find_scale([machine.put(each) for each in tensors], found, stream=machine.stream)
            assert machine.get(found).view(np.float32)[0] == expected
            assert machine.get(found).view(np.uint32)[1] == 0
            for values in tensors:
                numbers = np.zeros(values.size, np.uint16)
                exact = scaled.narrow_scaled_into(values, expected, numbers)
                assert exact or scale is None or sum(sizes) < 10, "the scale of many products is the right one"
                out = machine.put(np.ones(values.size, np.uint16))
                cuda.narrow_found_into(machine.put(values), found, out, stream=machine.stream)
                assert identical(machine.get(out), numbers)
                assert (machine.get(found).view(np.uint32)[1] == 0) == exact
                found = machine.put(np.array([expected, 0], np.float32).view(np.uint8))

    @pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
    def test_planes(self, machine: Machine, dtype: type) -> None:
        for size in machine.sizes:
            generator = np.random.default_rng(size)
            patterns = generator.integers(0, 2 ** (8 * np.dtype(dtype).itemsize), size, dtype=np.uint64).astype(dtype)
            exponents = np.zeros(size, np.uint8)
            rest = np.zeros(size * (patterns.itemsize - 1), np.uint8)
            there = [machine.put(array) for array in (exponents, rest, np.zeros(size, dtype))]
            planes.split_exponents(patterns, exponents, rest)
            cuda.split_exponents(machine.put(patterns), there[0], there[1], stream=machine.stream)
            cuda.join_exponents(there[0], there[1], there[2], stream=machine.stream)
            for actual, expected in zip(there, (exponents, rest, patterns), strict=True):
                assert identical(machine.get(actual), expected)
                assert machine.intact(actual)

    # averages

    @pytest.mark.parametrize("dtype", [np.float32, np.uint16])
    @pytest.mark.parametrize("weight", [1.0, 0.3, -1e30, 0.0])
    def test_accumulation(self, machine: Machine, dtype: type, weight: float) -> None:
        for size in machine.sizes:
            values, expected = narrowed(gradient(size), dtype), gradient(size, seed=1)
            total = machine.put(expected)
            cuda.accumulate(machine.put(values), weight, total, stream=machine.stream)
            averages.accumulate(values, weight, expected)
            assert same(machine.get(total), expected)
            assert machine.intact(total)

    # what is refused

    def test_arrays_that_do_not_fit_are_refused(self, machine: Machine) -> None:
        floats, words = machine.put(np.zeros(300, np.float32)), machine.put(np.zeros(300, np.uint32))
        one, count = machine.put(np.zeros(1, np.float32)), machine.put(np.zeros(1, np.uint32))
        room = machine.put(np.zeros(2, np.uint64))
        codes, scales = machine.put(np.zeros(300, np.int8)), machine.put(np.zeros(2, np.float32))
        to: dict[str, Any] = {"stream": machine.stream}
        with pytest.raises(ValueError, match="survivors must have 300 elements"):
            cuda.compact_into(floats, one, words, one, count, room, **to)
        with pytest.raises(ValueError, match="at least 2"):
            cuda.compact_into(floats, one, words, floats, count, room[:1], **to)
        with pytest.raises(ValueError, match="1-D contiguous"):
            cuda.compact_into(floats[::2], one, words, floats, count, room, **to)
        with pytest.raises(ValueError, match="float32, float16 or bf16"):
            cuda.compact_into(words, one, words, floats, count, room, **to)
        with pytest.raises(ValueError, match="CuPy array"):
            cuda.compact_into(np.zeros(300, np.float32), one, words, floats, count, room, **to)
        with pytest.raises(ValueError, match="scales must have 2"):
            cuda.quantise_into(floats, codes, one, **to)
        with pytest.raises(ValueError, match="residual must have 300"):
            cuda.quantise_into(floats, codes, scales, residual=one, **to)
        with pytest.raises(ValueError, match="ratio"):
            cuda.select_threshold(floats, 0.0, 1, one, words, **to)
        with pytest.raises(ValueError, match="uint16 or uint32"):
            cuda.split_exponents(floats, codes, codes, **to)
        plane, packed = machine.put(np.zeros(300, np.uint8)), machine.put(np.zeros(706, np.uint8))
        length = machine.put(np.zeros(1, np.uint64))
        with pytest.raises(ValueError, match="there is room for 705"):
            cuda.pack_exponents(plane, packed[:705], length, room, **to)
        with pytest.raises(ValueError, match="at least 2"):
            cuda.pack_exponents(plane, packed, length, room[:1], **to)
        with pytest.raises(ValueError, match="of uint64"):
            cuda.pack_exponents(plane, packed, count, room, **to)
        with pytest.raises(ValueError, match="take 194 bytes, not 193"):
            cuda.unpack_exponents(packed[:193], plane, count, room, **to)
        assert not np.any(machine.get(packed))

    def test_replays_that_do_not_fit_are_refused(self, machine: Machine) -> None:
        p, m, v, g = (machine.put(np.zeros(40, np.float32)) for _ in range(4))
        to: dict[str, Any] = {"stream": machine.stream, "contracted": True}
        with pytest.raises(ConfigurationError, match="overlaps gradients"):
            cuda.replay_fused_adam(p, m, v, [p], adam_steps(1), **to)
        with pytest.raises(ConfigurationError, match="param overlaps exp_avg"):
            cuda.replay_fused_adam(p, p, v, [g], adam_steps(1), **to)
        with pytest.raises(ConfigurationError, match="a gradient a step"):
            cuda.replay_fused_adam(p, m, v, [], adam_steps(1), **to)
        with pytest.raises(ConfigurationError, match="amsgrad"):
            cuda.replay_fused_adam(p, m, v, [g], adam_steps(1, amsgrad=True), **to)
        with pytest.raises(ConfigurationError, match="40 elements"):
            cuda.replay_fused_adam(p, m, v, [g[:39]], adam_steps(1), **to)
        as_a_gpu: dict[str, Any] = {"stream": machine.stream, "rounding": ROUNDINGS["fused32"], "powers": Powers()}
        with pytest.raises(ConfigurationError, match=r"powers of the beta 0\.9 on the device are not known"):
            cuda.replay_gpu_adam(p, m, v, [g], adam_steps(1), **as_a_gpu)
        with pytest.raises(ConfigurationError, match="takes dense gradients"):
            some = cuda.SparseOnDevice(machine.put(np.zeros(1, np.uint32)), machine.put(np.zeros(1, np.float32)))
            cuda.replay_gpu_adam(p, m, v, [some], adam_steps(1), **as_a_gpu)
        with pytest.raises(ConfigurationError, match="amsgrad"):
            cuda.replay_gpu_adam(p, m, v, [g], adam_steps(1, amsgrad=True), **as_a_gpu)
        with pytest.raises(ConfigurationError, match="FusedAdam has no amsgrad"):
            fast = {**as_a_gpu, "rounding": FAST[0], "max_exp_avg_sq": machine.put(np.zeros(40, np.float32))}
            cuda.replay_gpu_adam(p, m, v, [g], adam_steps(1, amsgrad=True), **fast)
        assert not np.any(machine.get(p))

    # together

    def test_a_sparse_encoding_never_leaves_the_device(self, machine: Machine) -> None:
        """Threshold, survivors, fp16, residual: each fed by the one before through device memory alone."""
        size = machine.sizes[-1]
        values, residual = gradient(size, special=False), gradient(size, 1, special=False)
        expected_residual = residual.copy()
        threshold = compaction.select_threshold(values, 0.01, 3, residual=residual)
        found, survived = compaction.compact(values, threshold, residual=expected_residual)
        expected_halves = np.zeros(found.size, np.float16)
        exponent = fp16.to_half(survived, expected_halves)
        settle(expected_residual, found, survived, fp16.from_half(expected_halves, exponent))

        put, to = machine.put, {"stream": machine.stream}
        capacity = found.size + 10
        there, lost = put(values), put(residual)
        least, count, scale = put(np.zeros(1, np.float32)), put(np.zeros(1, np.uint32)), put(np.zeros(1, np.int32))
        indices, survivors = put(np.zeros(capacity, np.uint32)), put(np.zeros(capacity, np.float32))
        out, decoded = put(np.zeros(capacity, np.float16)), put(np.zeros(capacity, np.float32))
        samples = put(np.zeros(compaction.SAMPLES, np.uint32))
        room = put(np.zeros(cuda.compact_workspace(size), np.uint64))
        cuda.select_threshold(there, 0.01, 3, least, samples, residual=lost, **to)
        cuda.compact_into(there, least, indices, survivors, count, room, residual=lost, **to)
        cuda.keep_largest(there, indices, survivors, count, put(np.zeros(1, np.uint32)), residual=lost, **to)
        cuda.to_half(survivors, out, scale, samples, count=count, **to)
        cuda.from_half(out, scale, decoded, count=count, **to)
        cuda.settle(lost, indices, survivors, decoded, count=count, **to)
        assert machine.get(scale)[0] == exponent
        assert machine.get(count)[0] == found.size
        assert identical(machine.get(out)[: found.size], expected_halves)
        assert identical(machine.get(indices)[: found.size], found)
        assert identical(machine.get(lost), expected_residual)

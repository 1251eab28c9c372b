"""Block codes: the NumPy kernels keep to the rules they state; the Numba kernels give the same bits."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tests.gpu.inputs import sums_that_depend_on_their_order
from tiercheck import kernels
from tiercheck.kernels.reference.nf4 import BOUNDARIES, LEVELS

BACKENDS = ("reference", "numba")
SETTINGS = settings(max_examples=80)
FEWER = settings(max_examples=40)
LARGEST = np.finfo(np.float32).max
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Scheme:
    """A block code: how it encodes and decodes, and what its arrays measure."""

    block: int
    code_dtype: type[np.generic]
    scale_dtype: type[np.generic]
    codes_of: Callable[[int, int], int]
    """The codes' size, of the values' and the blocks' number."""
    encode_into: kernels.Kernel[..., Any]
    decode_parts: kernels.Kernel[..., Floats]

    def empty_parts(self, size: int) -> tuple[NDArray[Any], NDArray[Any]]:
        blocks = -(-size // self.block)
        return np.empty(self.codes_of(size, blocks), self.code_dtype), np.empty(blocks, self.scale_dtype)

    def encode(
        self,
        values: Floats,
        *,
        by: str,
        before: Floats | None = None,
        rooted: bool = False,
        residual: Floats | None = None,
        threads: int = 1,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        parts = self.empty_parts(values.size)
        self.encode_into.by(by)(values, *parts, before=before, rooted=rooted, residual=residual, threads=threads)
        return parts

    def decode(self, parts: tuple[NDArray[Any], NDArray[Any]], size: int, *, by: str, threads: int = 1) -> Floats:
        return self.decode_parts.by(by)(*parts, *([] if self is INT8 else [size]), threads=threads)


INT8 = Scheme(kernels.BLOCK, np.int8, np.float32, lambda size, blocks: size, kernels.quantise_into, kernels.dequantise)
NF4 = Scheme(
    kernels.BLOCK,
    np.uint8,
    np.float32,
    lambda size, blocks: 128 * blocks,
    kernels.quantise_nf4_into,
    kernels.dequantise_nf4,
)
ONEBIT = Scheme(
    kernels.ONEBIT_BLOCK,
    np.uint8,
    np.uint16,
    lambda size, blocks: 16 * blocks,
    kernels.quantise_onebit_into,
    kernels.dequantise_onebit,
)
each_scheme = pytest.mark.parametrize("scheme", [INT8, NF4, ONEBIT], ids=["int8", "nf4", "onebit"])
each_backend = pytest.mark.parametrize("by", BACKENDS)


def same_bits(a: Floats, b: Floats) -> bool:
    """Equal but for the payloads of NaNs, which arithmetic does not keep."""
    equal = a.view(np.uint32) == b.view(np.uint32)
    return a.shape == b.shape and bool(np.all(equal | (np.isnan(a) & np.isnan(b))))


def finite_from(bits: NDArray[np.uint32]) -> Floats:
    return np.where(bits & 0x7F800000 == 0x7F800000, bits & 0xBFFFFFFF, bits).astype(np.uint32).view(np.float32)


def patterns(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[NDArray[np.uint32]]:
    """fp32 patterns with all their lows and highs, drawn from a seed: Hypothesis need not shrink 700 elements."""
    return st.builds(
        lambda size, seed: np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32),
        sizes,
        st.integers(0, 2**32),
    )


@st.composite
def tensors(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> Floats:
    """Any patterns; finite ones; a single magnitude's; denormals; zeros; a constant; the largest numbers."""
    bits = draw(patterns(sizes))
    kind = draw(st.sampled_from(["any", "finite", "binade", "denormal", "zero", "constant", "largest", "one special"]))
    if kind == "binade":
        exponent = draw(st.integers(0, 254))
        bits = (bits & 0x807FFFFF | exponent << 23).astype(np.uint32)
    elif kind == "denormal":
        bits &= np.uint32(0x80000000 | draw(st.sampled_from([1, 3, 0xFF, 0x7FFFFF])))
    elif kind == "zero":
        bits &= np.uint32(0x80000000)
    elif kind == "constant":
        bits[:] = draw(st.integers(0, 2**32 - 1))
    elif kind == "largest":
        bits = (bits & 0x80000003 | 0x7F7FFFFC).astype(np.uint32)
    values = bits.view(np.float32) if kind in ("any", "constant") else finite_from(bits)
    if kind == "one special" and values.size:
        values[draw(st.integers(0, values.size - 1))] = draw(st.sampled_from([np.inf, -np.inf, np.nan]))
    return values


SIZES = st.sampled_from([0, 1, 2, 7, 127, 128, 129, 255, 256, 257, 511, 512, 513, 700]) | st.integers(0, 700)


@each_scheme
class TestEveryScheme:
    """Hypothesis shows that both give the same bits, whatever they are given; what those must be, of the reference."""

    @given(data=st.data())
    @SETTINGS
    def test_numba_equals_the_reference(self, scheme: Scheme, data: st.DataObject) -> None:
        values = data.draw(tensors(SIZES))
        before = data.draw(st.none() | st.just(values) | tensors(st.just(values.size)))
        rooted = data.draw(st.booleans())
        residual = data.draw(st.none() | tensors(st.just(values.size)))
        lost = {by: None if residual is None else residual.copy() for by in BACKENDS}
        parts = {by: scheme.encode(values, before=before, rooted=rooted, residual=lost[by], by=by) for by in BACKENDS}
        for ours, theirs in zip(parts["numba"], parts["reference"], strict=True):
            assert ours.tobytes() == theirs.tobytes()
        if residual is not None:
            assert lost["numba"].tobytes() == lost["reference"].tobytes()
        decoded = [scheme.decode(parts["reference"], values.size, by=by) for by in BACKENDS]
        assert same_bits(*decoded)

    @given(data=st.data())
    @FEWER
    def test_it_says_whether_anything_is_not_finite(self, scheme: Scheme, data: st.DataObject) -> None:
        values = data.draw(tensors(SIZES))
        residual = data.draw(st.none() | tensors(st.just(values.size)))
        with np.errstate(all="ignore"):
            x = values if residual is None else values + residual
        for by in BACKENDS:
            lost = None if residual is None else residual.copy()
            found = scheme.encode_into.by(by)(values, *scheme.empty_parts(values.size), residual=lost)
            assert found == (not np.isfinite(x).all())

    @given(data=st.data())
    @FEWER
    def test_a_change_and_a_root_are_what_numpy_makes_of_them(self, scheme: Scheme, data: st.DataObject) -> None:
        values = data.draw(tensors(SIZES))
        before = data.draw(tensors(st.just(values.size)))
        kept = values.tobytes(), before.tobytes()
        with np.errstate(all="ignore"):
            change, root = values - before, np.sqrt(values)
        for x, options in ((change, {"before": before}), (root, {"rooted": True})):
            fused = scheme.encode(values, by="reference", **options)
            expected = scheme.encode(x, by="reference")
            assert [part.tobytes() for part in fused] == [part.tobytes() for part in expected]
        assert (values.tobytes(), before.tobytes()) == kept

    @given(data=st.data())
    @FEWER
    def test_the_residual_is_what_the_codes_lose_step_by_step(self, scheme: Scheme, data: st.DataObject) -> None:
        size = data.draw(SIZES)
        residual = np.zeros(size, np.float32)
        for _ in range(data.draw(st.integers(1, 4))):
            values = data.draw(tensors(st.just(size)))
            with np.errstate(all="ignore"):
                x = values + residual
            without = scheme.encode(x, by="reference")
            fused = scheme.encode(values, residual=residual, by="reference")
            assert [part.tobytes() for part in fused] == [part.tobytes() for part in without]
            with np.errstate(all="ignore"):
                lost = x - scheme.decode(without, size, by="reference")
            assert residual.tobytes() == np.where(np.isfinite(lost), lost, np.float32(0)).tobytes()

    def test_feedback_loses_nothing_over_time(self, scheme: Scheme) -> None:
        generator = np.random.default_rng(4)
        residual, sent, wanted = np.zeros(1000, np.float32), np.zeros(1000), np.zeros(1000)
        for _ in range(50):
            values = generator.standard_normal(1000, dtype=np.float32) + np.float32(0.1)
            sent += scheme.decode(scheme.encode(values, residual=residual, by="numba"), 1000, by="numba")
            wanted += values
        assert np.abs(sent + residual - wanted).max() < 1e-4

    def test_threads_change_no_bit(self, scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every number of them, each with a piece of its own, of which the last ends within a block."""
        monkeypatch.setattr("tiercheck.kernels.threads.PIECE_MIN", 1 << 12)
        values = np.random.default_rng(5).standard_normal((4 << 12) + 77, dtype=np.float32)
        values[[5_000, 12_501]] = np.inf, np.nan
        owed = np.full(values.size, 0.01, np.float32)
        for before, fed_back in itertools.product((None, values[::-1].copy()), (False, True)):
            lost = owed.copy() if fed_back else None
            expected = scheme.encode(values, before=before, residual=lost, by="reference")
            decoded = scheme.decode(expected, values.size, by="reference")
            for threads in (1, 2, 3, 4):
                ours = owed.copy() if fed_back else None
                parts = scheme.encode(values, before=before, residual=ours, by="numba", threads=threads)
                assert [part.tobytes() for part in parts] == [part.tobytes() for part in expected], threads
                assert lost is None or ours is None or ours.tobytes() == lost.tobytes(), threads
                assert same_bits(scheme.decode(parts, values.size, by="numba", threads=threads), decoded), threads

    @given(data=st.data())
    @FEWER
    def test_any_bytes_decode_alike_to_the_size_that_was_asked_for(self, scheme: Scheme, data: st.DataObject) -> None:
        size = data.draw(SIZES)
        seed = data.draw(st.integers(0, 2**32))
        parts = tuple(np.frombuffer(damaged(part.nbytes, seed), part.dtype) for part in scheme.empty_parts(size))
        assert not any(part.flags.writeable for part in parts if part.size)
        decoded = [scheme.decode(parts, size, by=by) for by in BACKENDS]
        assert decoded[0].size == decoded[1].size == size
        assert same_bits(*decoded)

    @each_backend
    def test_encoders_write_nothing_but_their_outputs(self, scheme: Scheme, by: str) -> None:
        for size in (0, 1, 255, 256, 257, 1000):
            values = np.random.default_rng(size).standard_normal(size, dtype=np.float32)
            guarded = [Guarded(part) for part in (*scheme.empty_parts(size), np.zeros(size, np.float32))]
            codes, scales, residual = (each.array for each in guarded)
            scheme.encode_into.by(by)(values.copy(), codes, scales, residual=residual)
            assert all(each.intact() for each in guarded), size

    @each_backend
    @pytest.mark.parametrize("wrong", ["codes", "scales", "before", "residual"])
    def test_outputs_of_another_size_are_refused(self, scheme: Scheme, by: str, wrong: str) -> None:
        for change in (-1, 1):
            codes, scales = scheme.empty_parts(300)
            sizes = {"codes": codes.size, "scales": scales.size, "before": 300, "residual": 300}
            sizes[wrong] += change
            codes, scales = np.empty(sizes["codes"], codes.dtype), np.empty(sizes["scales"], scales.dtype)
            before, residual = (np.zeros(sizes[name], np.float32) for name in ("before", "residual"))
            with pytest.raises(ValueError, match="300 values need"):
                scheme.encode_into.by(by)(np.ones(300, np.float32), codes, scales, before=before, residual=residual)
            if wrong == "scales" or (wrong == "codes" and scheme is not INT8):  # one code a value
                with pytest.raises(ValueError, match="need"):
                    scheme.decode((codes, scales), 300, by=by)

    def test_what_has_gaps_is_refused(self, scheme: Scheme) -> None:
        """Vectors of it would be read across the gaps."""
        for apart in ("values", "codes", "scales", "before", "residual"):
            codes, scales = scheme.empty_parts(600)
            arrays = {name: np.zeros(600, np.float32) for name in ("values", "before", "residual")}
            arrays |= {"codes": codes, "scales": scales}
            arrays[apart] = np.repeat(arrays[apart], 2)[::2]
            values, codes, scales = (arrays.pop(name) for name in ("values", "codes", "scales"))
            with pytest.raises(ValueError, match=rf"(?s){apart}.*contiguous"):
                scheme.encode_into.by("numba")(values, codes, scales, **arrays)
            if apart in ("codes", "scales"):
                with pytest.raises(ValueError, match="contiguous"):
                    scheme.decode((codes, scales), 600, by="numba")

    @each_backend
    def test_values_that_may_not_be_written_are_encoded(self, scheme: Scheme, by: str) -> None:
        values = np.random.default_rng(1).standard_normal(513, dtype=np.float32)
        locked = np.frombuffer(values.tobytes(), np.float32)
        assert [part.tobytes() for part in scheme.encode(locked, by=by)] == [
            part.tobytes() for part in scheme.encode(values, by=by)
        ]


class Guarded:
    """An array between two others that nobody may write to."""

    MARGIN = 512

    def __init__(self, array: NDArray[Any]) -> None:
        self.whole = np.full(array.nbytes + 2 * self.MARGIN, 0xA5, np.uint8)
        self.array = self.whole[self.MARGIN : self.MARGIN + array.nbytes].view(array.dtype)
        self.array[:] = 0

    def intact(self) -> bool:
        return bool(np.all(self.whole[: self.MARGIN] == 0xA5) and np.all(self.whole[-self.MARGIN :] == 0xA5))


def damaged(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


def test_a_kernel_is_compiled_once_whatever_it_is_called_with() -> None:
    from tiercheck.kernels.cpu.blocks import int8, nf4, onebit

    values = np.ones(300, np.float32)
    locked = np.frombuffer(values.tobytes(), np.float32)
    for scheme in (INT8, NF4, ONEBIT):
        for array in (values, locked):
            for residual in (None, np.zeros(300, np.float32)):
                parts = scheme.encode(array, residual=residual, by="numba")
                scheme.encode(array, before=array, residual=residual, by="numba")
                scheme.encode(array, rooted=True, residual=residual, by="numba")
                scheme.decode(parts, 300, by="numba")
                scheme.decode(tuple(np.frombuffer(part.tobytes(), part.dtype) for part in parts), 300, by="numba")
    for module in (int8, nf4, onebit):
        compiled: Any = module
        assert len(compiled.quantise_blocks.signatures) == 1
        assert len(compiled.dequantise_blocks.signatures) == 1


@pytest.mark.parametrize(("name", "scheme"), [("int8", INT8), ("nf4", NF4), ("onebit", ONEBIT)])
def test_compiled_decoders_write_nothing_but_their_output(name: str, scheme: Scheme) -> None:
    """Whole blocks of any bytes: the rest of a tensor never reaches compiled code."""
    decode: Any = importlib.import_module(f"tiercheck.kernels.cpu.blocks.{name}")
    size = 3 * scheme.block
    parts = [np.frombuffer(damaged(part.nbytes, 9), part.dtype) for part in scheme.empty_parts(size)]
    out = Guarded(np.zeros(size, np.float32))
    decode.dequantise_blocks(*parts, out.array)
    assert out.intact()
    assert same_bits(out.array, scheme.decode((parts[0], parts[1]), size, by="reference"))


@pytest.mark.parametrize("scheme", [NF4, ONEBIT], ids=["nf4", "onebit"])
@each_backend
class TestPoisonedBlocks:
    def test_one_bad_value_poisons_its_block_and_no_other(self, scheme: Scheme, by: str) -> None:
        values = np.random.default_rng(2).standard_normal(4 * scheme.block, dtype=np.float32)
        clean = scheme.decode(scheme.encode(values, by=by), values.size, by=by)
        poisoned = np.arange(values.size) // scheme.block == 1
        for special in (np.inf, -np.inf, np.nan):
            values[scheme.block + 3] = special
            residual = np.zeros(values.size, np.float32)
            codes, scales = scheme.encode(values, residual=residual, by=by)
            decoded = scheme.decode((codes, scales), values.size, by=by)
            assert np.array_equal(np.isnan(decoded), poisoned), special
            assert same_bits(decoded[~poisoned], clean[~poisoned]), special
            assert not np.any(residual[poisoned]), special
            assert np.all(residual[~poisoned] == values[~poisoned] - clean[~poisoned]), special

    def test_its_codes_are_those_of_zeros_and_its_scale_is_one_pattern(self, scheme: Scheme, by: str) -> None:
        codes, scales = scheme.encode(np.full(scheme.block, -np.nan, np.float32), by=by)
        assert set(codes.tolist()) == ({0x77} if scheme is NF4 else {0})
        assert scales.tobytes() == (np.uint32(0x7FC00000) if scheme is NF4 else np.uint16(0x7FC0)).tobytes()

    def test_values_that_overflow_with_their_residual_poison_too(self, scheme: Scheme, by: str) -> None:
        residual = np.full(10, LARGEST, np.float32)
        parts = scheme.encode(np.full(10, LARGEST, np.float32), residual=residual, by=by)
        assert np.all(np.isnan(scheme.decode(parts, 10, by=by)))
        assert not np.any(residual)


def quantise(values: Floats, by: str) -> tuple[NDArray[np.int8], Floats]:
    return INT8.encode(values, by=by)


class TestInt8:
    @given(tensors(SIZES))
    @SETTINGS
    def test_the_error_is_bounded_and_what_is_not_finite_is_marked(self, values: Floats) -> None:
        codes, scales = INT8.encode(values, by="reference")
        decoded = INT8.decode((codes, scales), values.size, by="reference")
        finite = np.isfinite(values)
        assert np.array_equal(np.isnan(decoded), ~finite)
        assert np.array_equal(codes == kernels.NONFINITE_CODE, ~finite)
        spread = np.repeat(scales, kernels.BLOCK)[: values.size].astype(np.float64)
        errors = np.abs(decoded[finite].astype(np.float64) - values[finite])
        assert np.all(errors <= spread[finite] * (0.5 + 127 * 2.0**-22))

    @each_backend
    def test_one_bad_value_spoils_no_other(self, by: str) -> None:
        values = np.linspace(-1, 1, 256, dtype=np.float32)
        clean = kernels.dequantise.by(by)(*quantise(values, by))
        values[[3, 77]] = np.nan, np.inf
        decoded = kernels.dequantise.by(by)(*quantise(values, by))
        assert np.flatnonzero(np.isnan(decoded)).tolist() == [3, 77]
        others = np.isfinite(decoded)
        assert same_bits(decoded[others], clean[others])

    @each_backend
    def test_a_value_that_is_not_finite_leaves_no_residual(self, by: str) -> None:
        values = np.linspace(-1, 1, 256, dtype=np.float32)
        values[[3, 77]] = np.nan, np.inf
        residual = np.full(256, 0.25, np.float32)
        INT8.encode(values, residual=residual, by=by)
        assert residual[[3, 77]].tolist() == [0.0, 0.0]
        assert np.count_nonzero(residual) > 200

    @each_backend
    def test_rounds_half_to_even(self, by: str) -> None:
        values = np.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5], np.float32)
        codes, scales = quantise(values, by)
        assert scales.tolist() == [1.0]
        assert codes.tolist() == [127, 0, 2, 2, 0, -2]

    @each_backend
    def test_keeps_the_sign_and_bound_of_denormals(self, by: str) -> None:
        values = (np.arange(-150, 151) * np.float64(2.0**-149)).astype(np.float32)
        codes, scales = quantise(values, by)
        decoded = kernels.dequantise.by(by)(codes, scales).astype(np.float64)
        spread = np.repeat(scales, kernels.BLOCK)[: values.size]
        assert np.all(np.abs(decoded - values) <= spread / 2)

    @each_backend
    def test_the_largest_numbers_stay_finite(self, by: str) -> None:
        values = np.full(300, LARGEST, np.float32)
        assert np.all(np.isfinite(kernels.dequantise.by(by)(*quantise(values, by))))

    @each_backend
    def test_around_the_smallest_scale_that_has_a_reciprocal(self, by: str) -> None:
        for largest in (2.0**-126, 127 * 2.0**-126, 127 * float(np.nextafter(np.float32(2.0**-126), 0))):
            values = np.linspace(-largest, largest, 256, dtype=np.float64).astype(np.float32)
            codes, scales = quantise(values, by)
            decoded = kernels.dequantise.by(by)(codes, scales).astype(np.float64)
            assert np.abs(decoded - values).max() <= float(scales[0]) * (0.5 + 127 * 2.0**-22), largest
            assert (codes.min(), codes.max()) == (-127, 127), largest

    def test_dequantise_refuses_a_wrong_number_of_scales(self) -> None:
        with pytest.raises(ValueError, match="scales"):
            kernels.dequantise(np.zeros(257, np.int8), np.ones(1, np.float32))


def nibbles(codes: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Of a byte, the low nibble is element j's, the high one's element is 128 further: said here once more."""
    elements = np.arange(size)
    byte = codes[elements // 256 * 128 + elements % 128]
    return np.where(elements % 256 < 128, byte % 16, byte // 16)


class TestNf4:
    @each_backend
    def test_the_levels_are_the_paper_s(self, by: str) -> None:
        """16 levels, 0 and both ends exact, each the middle of quantiles of the normal distribution (QLoRA, 3)."""
        from statistics import NormalDist

        offset = 0.9677083
        quantile = NormalDist().inv_cdf
        above = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
        below = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
        levels = np.sort(np.array([*above, 0.0, *below])) / above[0]
        assert np.abs(levels - LEVELS).max() < 1e-6
        decoded = kernels.dequantise_nf4.by(by)(np.arange(128, dtype=np.uint8) % 16, np.ones(1, np.float32), 16)
        assert same_bits(decoded, LEVELS)

    @given(tensors(SIZES))
    @SETTINGS
    def test_codes_are_of_the_nearest_level_and_the_error_is_bounded(self, values: Floats) -> None:
        codes, scales = NF4.encode(values, by="reference")
        spread = np.repeat(scales, 256)[: values.size].astype(np.float64)
        good = ~np.isnan(spread)
        blocks_finite = np.array([np.all(np.isfinite(row)) for row in rows_of(values, 256)], bool)
        assert np.array_equal(~np.isnan(scales), blocks_finite)
        exact = values[good].astype(np.float64)
        chosen = LEVELS[nibbles(codes, values.size)[good]] * spread[good]
        distances = np.abs(exact[:, None] - LEVELS.astype(np.float64) * spread[good][:, None])
        assert np.all(np.abs(exact - chosen) <= distances.min(axis=1) + spread[good] * 2.0**-22)
        decoded = NF4.decode((codes, scales), values.size, by="reference")[good].astype(np.float64)
        assert np.all(np.abs(decoded - exact) <= spread[good] * (0.1519037 + 2.0**-22) + 2.0**-150)

    @each_backend
    def test_a_tie_goes_to_the_lower_level(self, by: str) -> None:
        for scale in (2.0**-90, 1.0, 2.0**126, 2.0**127):
            values = np.zeros(256, np.float32)
            values[200] = scale
            values[:15], values[15:30] = BOUNDARIES * np.float32(scale), above(BOUNDARIES) * np.float32(scale)
            codes, scales = NF4.encode(values, by=by)
            assert scales.tolist() == [scale]
            assert nibbles(codes, 30).tolist() == [*range(15), *range(1, 16)], scale

    @each_backend
    def test_both_ends_and_zero_are_exact(self, by: str) -> None:
        values = np.array([-3.0, 3.0, 0.0, -0.0, 1e-9], np.float32)
        assert NF4.decode(NF4.encode(values, by=by), 5, by=by).tolist() == [-3.0, 3.0, 0.0, 0.0, 0.0]

    @each_backend
    def test_elements_past_the_end_are_zeros(self, by: str) -> None:
        codes, _ = NF4.encode(np.full(130, 2.0, np.float32), by=by)
        assert nibbles(codes, 256).tolist() == [15] * 130 + [7] * 126


def above(values: Floats) -> Floats:
    return np.nextafter(values, np.float32(np.inf))


def rows_of(values: Floats, block: int) -> list[Floats]:
    return [values[start : start + block] for start in range(0, values.size, block)]


def to_float(patterns_of: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (patterns_of.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class TestOnebit:
    @given(tensors(SIZES))
    @SETTINGS
    def test_the_scale_is_the_mean_magnitude_and_signs_are_kept(self, values: Floats) -> None:
        bits, scales = ONEBIT.encode(values, by="reference")
        decoded = ONEBIT.decode((bits, scales), values.size, by="reference")
        for scale, row, back in zip(to_float(scales), rows_of(values, 128), rows_of(decoded, 128), strict=True):
            if not np.all(np.isfinite(row)):
                assert np.all(np.isnan(back))
                continue
            mean = np.abs(row.astype(np.float64)).mean()
            assert abs(scale - mean) <= max(mean * (2.0**-8 + 2.0**-20), 2.0**-133)
            assert np.array_equal(np.signbit(back), np.signbit(row))
            assert np.all(np.abs(back) == scale)

    @each_backend
    @given(patterns(st.just(40)))
    @settings(max_examples=20)
    def test_the_scale_is_rounded_half_to_even(self, by: str, drawn: NDArray[np.uint32]) -> None:
        bits = (drawn & 0x7FFFFFFF) % 0x7F800000
        bits[::3] = bits[::3] & 0xFFFF0000 | 0x8000  # ties
        bits[::7] = np.maximum(bits[::7], 0x01000000)
        bits = np.maximum(bits, 0x04000000).astype(np.uint32)  # 2**-119: a 128th is a normal number
        _, scales = ONEBIT.encode(np.repeat(bits.view(np.float32), 128), by=by)
        lower = bits >> 16
        odd, rest = lower & 1, bits & 0xFFFF
        expected = lower + ((rest > 0x8000) | ((rest == 0x8000) & (odd == 1)))
        assert scales.tolist() == np.minimum(expected, 0x7F7F).tolist()

    @each_backend
    def test_the_largest_numbers_neither_overflow_nor_poison(self, by: str) -> None:
        for size in (1, 3, 100, 128, 129, 255):
            parts = ONEBIT.encode(np.full(size, -LARGEST, np.float32), by=by)
            assert set(parts[1].tolist()) == {0x7F7F}, size
            assert np.all(np.isfinite(ONEBIT.decode(parts, size, by=by))), size

    @each_backend
    def test_bits_are_in_little_order_and_none_is_set_past_the_end(self, by: str) -> None:
        values = np.ones(11, np.float32)
        values[[0, 2, 9, 10]] = -1.0, -0.0, -3.0, np.float32(-1e-45)
        bits, _ = ONEBIT.encode(values, by=by)
        assert bits.tolist() == [0b101, 0b110] + [0] * 14

    @each_backend
    def test_a_short_block_has_the_mean_of_its_own_elements(self, by: str) -> None:
        _, scales = ONEBIT.encode(np.full(129, 1.5, np.float32), by=by)
        assert to_float(scales).tolist() == [1.5, 1.5]

    @each_backend
    def test_sums_are_taken_by_halves(self, by: str) -> None:
        """The first element's share lies in the middle of two bf16 numbers, and half a unit of fp32 is lost on it.

        Where halves are added, it meets 64, then 32 + 96, then 16 + ..., so that units come to it one by one in the
        first block, and two at once in the second, which decides how the mean is rounded. In any other usual order
        (one after the other, neighbours, lanes one after the other) the second is as the first.
        """
        values = np.zeros((2, 128), np.float32)
        values[:, 0] = 128 * (1 + 2.0**-8)
        values[0, [1, 2, 4, 8, 16, 32, 64]] = values[1, [32, 96]] = 128 * 2.0**-24
        assert ONEBIT.encode(values.reshape(-1), by=by)[1].tolist() == [0x3F80, 0x3F81]
        every_pair = sums_that_depend_on_their_order()
        assert ONEBIT.encode(every_pair, by=by)[1].tolist() == ONEBIT.encode(every_pair, by="reference")[1].tolist()


def split(array: NDArray[Any], by: str, threads: int = 1) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    planes = np.empty(array.size, np.uint8), np.empty(array.size * (array.itemsize - 1), np.uint8)
    kernels.split_exponents.by(by)(array, *planes, threads=threads)
    return planes


def join(planes: tuple[NDArray[np.uint8], NDArray[np.uint8]], dtype: Any, by: str, threads: int = 1) -> NDArray[Any]:
    out = np.empty(planes[0].size, dtype)
    kernels.join_exponents.by(by)(*planes, out, threads=threads)
    return out


@each_backend
class TestPlanes:
    def test_every_pattern_of_16_bits_survives(self, by: str) -> None:
        every = np.arange(2**16, dtype=np.uint16)
        exponents, rest = split(every, by)
        assert np.array_equal(exponents, every >> 7 & 0xFF)
        assert np.array_equal(rest, (every >> 15) * 128 + every % 128)
        assert np.array_equal(join((exponents, rest), np.uint16, by), every)

    @given(patterns(SIZES))
    @SETTINGS
    def test_patterns_of_32_bits_survive(self, by: str, bits: NDArray[np.uint32]) -> None:
        exponents, rest = split(bits, by)
        assert np.array_equal(exponents, bits >> 23 & 0xFF)
        low, middle, high = rest.reshape(3, bits.size).astype(np.uint32)
        assert np.array_equal(low | middle << 8 | (high & 127) << 16, bits & 0x7FFFFF)
        assert np.array_equal(high >> 7, bits >> 31)
        assert np.array_equal(join((exponents, rest), np.uint32, by), bits)

    def test_threads_change_no_bit(self, by: str) -> None:
        for dtype, threads in itertools.product((np.uint16, np.uint32), (1, 2, 3, 4)):
            bits = np.random.default_rng(1).integers(0, np.iinfo(dtype).max, 4 * 65536 + 3, dtype=dtype)
            planes = split(bits, by, threads)
            assert [plane.tobytes() for plane in planes] == [plane.tobytes() for plane in split(bits, "reference")]
            assert np.array_equal(join(planes, dtype, by, threads), bits), (dtype, threads)

    @given(dtype=st.sampled_from([np.uint16, np.uint32]), seed=st.integers(0, 2**32), size=SIZES)
    @SETTINGS
    def test_any_bytes_make_patterns_that_split_into_them(self, by: str, dtype: Any, seed: int, size: int) -> None:
        width = np.dtype(dtype).itemsize - 1
        planes = (
            np.frombuffer(damaged(size, seed), np.uint8),
            np.frombuffer(damaged(size * width, seed + 1), np.uint8),
        )
        again = split(join(planes, dtype, by), by)
        assert [plane.tobytes() for plane in again] == [plane.tobytes() for plane in planes]

    def test_planes_of_another_size_are_refused(self, by: str) -> None:
        for sizes in ((9, 30), (11, 30), (10, 29), (10, 31), (10, 10)):
            planes = np.zeros(sizes[0], np.uint8), np.zeros(sizes[1], np.uint8)
            with pytest.raises(ValueError, match="10 values need"):
                kernels.split_exponents.by(by)(np.zeros(10, np.uint32), *planes)
            with pytest.raises(ValueError, match="10 values need"):
                kernels.join_exponents.by(by)(*planes, np.zeros(10, np.uint32))

    @pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
    def test_planes_may_lie_apart(self, by: str, dtype: Any) -> None:
        bits = np.random.default_rng(2).integers(0, np.iinfo(dtype).max, 1000, dtype=dtype)
        exponents, rest = split(bits, "reference")
        wide = np.full((rest.size // 1000, 3000), 7, np.uint8)
        kernels.split_exponents.by(by)(bits, np.empty(1000, np.uint8), wide[:, 1000:2000])
        assert np.array_equal(wide[:, 1000:2000].reshape(-1), rest)
        assert np.all(wide[:, :1000] == 7)
        assert np.all(wide[:, 2000:] == 7)
        joined = np.empty(1000, dtype)
        kernels.join_exponents.by(by)(exponents, wide[:, 1000:2000], joined)
        assert np.array_equal(joined, bits)

    def test_planes_of_another_shape_are_refused(self, by: str) -> None:
        planes = np.zeros(10, np.uint8), np.zeros((10, 3), np.uint8)
        for call in (
            lambda: kernels.split_exponents.by(by)(np.zeros(10, np.uint32), *planes),
            lambda: kernels.join_exponents.by(by)(*planes, np.zeros(10, np.uint32)),
        ):
            with pytest.raises(ValueError, match=r"3 planes of as many bytes, not \(10, 3\)"):
                call()

    def test_patterns_of_another_dtype_are_refused(self, by: str) -> None:
        with pytest.raises(TypeError, match="uint16 or uint32, not float32"):
            kernels.split_exponents.by(by)(np.zeros(4, np.float32), np.zeros(4, np.uint8), np.zeros(12, np.uint8))

    def test_planes_are_written_within_their_bounds(self, by: str) -> None:
        guarded = [Guarded(np.zeros(size, np.uint8)) for size in (77, 3 * 77)]
        kernels.split_exponents.by(by)(np.arange(77, dtype=np.uint32), guarded[0].array, guarded[1].array)
        out = Guarded(np.zeros(77, np.uint32))
        kernels.join_exponents.by(by)(guarded[0].array, guarded[1].array, out.array)
        assert all(each.intact() for each in (*guarded, out))
        assert np.array_equal(out.array, np.arange(77))


@given(hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
@SETTINGS
def test_hypothesis_finds_no_small_array_on_which_the_schemes_differ(values: Floats) -> None:
    for scheme in (INT8, NF4, ONEBIT):
        lost = {by: np.zeros(values.size, np.float32) for by in BACKENDS}
        parts = [scheme.encode(values, residual=lost[by], by=by) for by in BACKENDS]
        assert [part.tobytes() for part in parts[0]] == [part.tobytes() for part in parts[1]]
        assert lost["numba"].tobytes() == lost["reference"].tobytes()

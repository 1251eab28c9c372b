"""The NumPy kernels say what is right; the Numba kernels give the same bits."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import ConfigurationError
from tiercheck.kernels import registry
from tiercheck.kernels.reference.adam import fma

BACKENDS = ("reference", "numba")
patterns = hnp.arrays(np.uint32, st.integers(0, 700), elements=st.integers(0, 2**32 - 1))
SPECIAL = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.0, -1.0, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan],
    np.float32,
)


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """Equal but for the payloads of NaNs, which arithmetic does not keep."""
    equal = a.view(np.uint32) == b.view(np.uint32)
    return a.shape == b.shape and bool(np.all(equal | (np.isnan(a) & np.isnan(b))))


class TestNarrowing:
    @given(hnp.arrays(np.uint16, st.integers(0, 300), elements=st.integers(0, 2**16 - 1)))
    @settings(max_examples=40)
    def test_every_bfloat16_survives(self, bits: NDArray[np.uint16]) -> None:
        for by in BACKENDS:
            widened = kernels.widen.by(by)(bits)
            assert widened.view(np.uint32).tolist() == (bits.astype(np.uint32) << 16).tolist()
            assert kernels.is_bfloat16.by(by)(widened)
            narrowed = np.empty_like(bits)
            kernels.narrow_into.by(by)(widened, narrowed)
            assert np.array_equal(narrowed, bits)

    @pytest.mark.parametrize("by", BACKENDS)
    def test_one_value_with_low_bits_is_seen_wherever_it_is(self, by: str) -> None:
        for position in (0, 4095, 4096, 9999):
            values = np.ones(10_000, np.float32)
            values.view(np.uint32)[position] |= 1
            assert not kernels.is_bfloat16.by(by)(values), position

    def test_refuses_an_output_of_another_size(self) -> None:
        with pytest.raises(ValueError, match="4 values"):
            kernels.narrow_into(np.ones(4, np.float32), np.zeros(3, np.uint16))


class TestFma:
    @given(*(st.floats(width=32, allow_nan=False, allow_infinity=False) for _ in range(3)))
    @settings(max_examples=300)
    def test_rounds_once(self, a: float, b: float, c: float) -> None:
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        result = fma(*(np.array([each], np.float32) for each in (a, b, c)))[0]
        assert is_nearest(exact, result)

    def test_rounds_once_where_two_roundings_differ(self) -> None:
        """The sum lies under the middle of two fp32 numbers by less than fp64 sees, and rounds up if rounded twice."""
        a, b = np.float32(2.0**-12 * (1 + 2.0**-23)), np.float32(2.0**-12 * (1 - 2.0**-23))
        c = np.float32(1 + 2.0**-23)
        rounded_twice = np.float32(np.float64(a) * np.float64(b) + np.float64(c))
        rounded_once = fma(np.array([a]), np.array([b]), np.array([c]))[0]
        assert rounded_once == c
        assert rounded_twice > c

    def test_numba_rounds_once_too(self) -> None:
        from tiercheck.kernels.cpu.replay.sgd import add_scaled

        generator = np.random.default_rng(3)
        p, g = (generator.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32) for _ in range(2))
        out = np.empty_like(p)
        for decay in (np.float32(0.1), np.float32(1 + 2**-23), np.float32(-3e-20)):
            add_scaled(g, p, decay, out, True)
            assert same_bits(out, fma(p, decay, g))


def is_nearest(exact: Fraction, result: np.float32) -> bool:
    if np.isinf(result):
        return abs(exact) >= Fraction(float(np.finfo(np.float32).max)) + Fraction(2) ** 103
    with np.errstate(over="ignore"):
        below, above = (np.nextafter(result, np.float32(side)) for side in (-np.inf, np.inf))
    error = abs(exact - Fraction(float(result)))
    for neighbour in (below, above):
        if np.isfinite(neighbour):
            other = abs(exact - Fraction(float(neighbour)))
            if other < error or (other == error and int(np.float32(result).view(np.uint32)) & 1):
                return False
    return True


def choose_again() -> None:
    registry.automatic.cache_clear()
    for kernel in kernels.KERNELS.values():
        kernel.forget()


class TestDispatch:
    def test_an_unknown_backend_is_refused_with_the_names(self) -> None:
        with pytest.raises(ConfigurationError, match="numba, reference or cuda"):
            kernels.widen.by("opencl")(np.zeros(1, np.uint16))

    def test_numba_that_is_not_there_is_refused_by_name_and_replaced_otherwise(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        choose_again()
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        try:
            with pytest.raises(ConfigurationError, match="pip install numba"):
                kernels.widen.by("numba")(np.zeros(1, np.uint16))
            assert kernels.widen(np.array([0x3F80], np.uint16)).tolist() == [1.0]
            assert "run in NumPy" in caplog.text
        finally:
            choose_again()

    def test_without_a_cache_directory_kernels_are_compiled_all_the_same(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from tiercheck.kernels.cpu.compiled import compiled

        monkeypatch.setattr(sys.modules["numba.core.caching"].CacheImpl, "_locator_classes", [])
        twice = compiled(lambda number: 2 * number)
        assert twice(21) == 42
        assert "NUMBA_CACHE_DIR" in caplog.text

    def test_importing_the_kernels_imports_neither_torch_nor_numba(self) -> None:
        script = (
            "import sys; import tiercheck.kernels, tiercheck.streams.codecs; "
            "sys.exit(any(name in sys.modules for name in ('torch', 'numba')))"
        )
        assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0

    def test_special_values_pass_through_every_kernel(self) -> None:
        kernels.warm_up()
        for by in BACKENDS:
            assert kernels.compact.by(by)(SPECIAL, 0.0)[0].size == SPECIAL.size
            assert not kernels.is_bfloat16.by(by)(SPECIAL)
            codes = np.empty(SPECIAL.size, np.int8)
            kernels.quantise_into.by(by)(SPECIAL, codes, np.empty(1, np.float32))
            assert codes.tolist()[-3:] == [-128] * 3

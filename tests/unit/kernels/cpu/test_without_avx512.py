"""What the kernels do with AVX-512 they do without it, to the same bits."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import numba
import numpy as np
from tiercheck import kernels
from tiercheck.kernels.cpu import simd as lanes

assert not numba.njit(lambda: lanes.avx512())()
generator = np.random.default_rng(0)


def compacted(values, by):
    return [part for threshold in (0.0, 0.8, 2.0) for part in kernels.compact.by(by)(values, threshold)]


def quantised(values, by):
    codes, scales = np.empty(values.size // 2, np.uint8), np.empty(values.size // 256, np.float32)
    residual = np.zeros(values.size, np.float32)
    kernels.quantise_nf4_into.by(by)(values, codes, scales, residual=residual)
    return codes, scales, residual, kernels.dequantise_nf4.by(by)(codes, scales, values.size)


def packed(values, by):
    exponents = (values.view(np.uint32) >> 23).astype(np.uint8)
    buffer = np.empty(kernels.packed_bytes_max(values.size), np.uint8)
    used = buffer[: kernels.pack_exponents.by(by)(exponents, buffer)]
    kernels.unpack_exponents.by(by)(used, exponents)
    return used, exponents


for size in (0, 256, 1024, 70_144):
    floats = generator.standard_normal(size, dtype=np.float32)
    patterns = generator.integers(0, 2**15, size, np.uint16)
    for kernel, values in ((compacted, floats), (compacted, patterns), (quantised, floats), (packed, floats)):
        for ours, theirs in zip(kernel(values, "numba"), kernel(values, "reference"), strict=True):
            assert ours.tobytes() == theirs.tobytes(), (kernel, size)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the CPU's name is one of x86-64")
def test_the_results_are_the_same(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "x86-64-v3",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=False, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

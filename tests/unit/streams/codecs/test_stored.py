"""Bytes that lie in shards: what earlier versions have written is read, bit for bit, for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.encoding import Stored
from tiercheck.streams.codecs import decode

WRITTEN: dict[str, tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], str]], str]] = {
    "exact": (
        {"codec": "exact", "dtype": "F32", "shape": [2, 3], "parts": [""], "scalars": {}},
        {"": ("F32", (2, 3), "cdcc0c3f0000b0bf7b690a380000c07f000000006766f640")},
        "cdcc0c3f0000b0bf7b690a380000c07f000000006766f640",
    ),
    "exact, narrowed": (
        {"codec": "exact", "dtype": "F32", "shape": [3], "parts": [""], "scalars": {}},
        {"": ("BF16", (3,), "003fa0bf807f")},
        "0000003f0000a0bf0000807f",
    ),
    "exact, integers": (
        {"codec": "exact", "dtype": "I64", "shape": [3], "parts": [""], "scalars": {}},
        {"": ("I64", (3,), "000000000000000001000000000000000200000000000000")},
        "000000000000000001000000000000000200000000000000",
    ),
    "int8": (
        {
            "codec": "int8",
            "dtype": "F32",
            "shape": [2, 3],
            "parts": ["codes", "scales"],
            "scalars": {"nonfinite": 1},
        },
        {"codes": ("I8", (6,), "09e90080007f"), "scales": ("F32", (1,), "87c3613d")},
        "f8fbfd3e8944a2bf000000000000c07f000000000000e040",
    ),
    "int8 of bf16": (
        {"codec": "int8", "dtype": "BF16", "shape": [3], "parts": ["codes", "scales"], "scalars": {"nonfinite": 1}},
        {"codes": ("I8", (3,), "408180"), "scales": ("F32", (1,), "0402813c")},
        "813f00c0c07f",
    ),
    "sparse": (
        {
            "codec": "sparse",
            "dtype": "F32",
            "shape": [200],
            "parts": ["indices", "values"],
            "scalars": {"exponent": 12, "nonfinite": 0},
        },
        {"indices": ("U32", (2,), "03000000c7000000"), "values": ("F16", (2,), "cde40075")},
        "00" * 4 * 3 + "00a099be" + "00" * 4 * 195 + "0000a040",
    ),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_it_is_read_bit_for_bit(kind: str) -> None:
    description, written, expected = WRITTEN[kind]
    parts = {
        suffix: Stored(dtype, shape, memoryview(bytes.fromhex(content)))
        for suffix, (dtype, shape, content) in written.items()
    }
    decoded = decode(description, parts)
    assert list(decoded.shape) == description["shape"]
    assert decoded.tobytes().hex() == expected


def test_a_sparse_tensor_between_31_and_32_bits_in_one_chunk_is_read() -> None:
    """Written before tensors were cut at 2**31."""
    description = {**WRITTEN["sparse"][0], "dtype": "BF16", "shape": [2**31 + 5]}
    parts = {
        "indices": Stored("U32", (1,), memoryview(np.array([2**31 + 3], np.uint32).tobytes())),
        "values": Stored("F16", (1,), memoryview(bytes.fromhex("0075"))),
    }
    decoded = decode(description, parts)
    assert decoded[2**31 + 2 :].tolist() == [0, 0x40A0, 0]

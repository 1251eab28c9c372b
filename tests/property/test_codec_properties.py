"""Properties of the codecs over arbitrary bit patterns, and over arbitrary damage.

The kit holds each codec to its bound, and the block codes are in ``tests/unit/kernels/test_blocks.py``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tests.encoding import APPROXIMATE, EXACT, FEEDBACK, encode
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.streams.codecs import codec_names, decode, decode_sparse

SETTINGS = settings(max_examples=150)


def bit_patterns(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[NDArray[np.uint32]]:
    """Any fp32: every NaN, infinity and denormal; and those that are exactly bf16."""
    full = hnp.arrays(np.uint32, sizes, elements=st.integers(0, 2**32 - 1))
    return full | full.map(lambda bits: bits & np.uint32(0xFFFF0000))


@SETTINGS
@given(bit_patterns(st.integers(0, 2000)), st.integers(0, 2**32))
def test_sparse_keeps_the_largest_and_says_so(bits: NDArray[np.uint32], seed: int) -> None:
    values = bits.view(np.float32)
    encoding, parts = encode("sparse", values, "F32", seed)
    indices = np.frombuffer(parts["indices"].data, np.uint32)
    decoded = decode(encoding.to_object(), parts)
    assert indices.size <= math.ceil(0.0125 * values.size)
    assert np.all(np.delete(decoded, indices) == 0)
    magnitudes = bits & 0x7FFFFFFF
    if indices.size:
        assert magnitudes[indices].min() >= np.delete(magnitudes, indices).max(initial=0)
    kept, truth = decoded[indices], values[indices]
    finite = np.isfinite(truth)
    assert np.array_equal(np.isnan(kept), np.isnan(truth))
    assert np.array_equal(kept[np.isinf(truth)], truth[np.isinf(truth)])
    largest = np.abs(truth[finite]).max(initial=0).astype(np.float64)
    allowed = np.maximum(np.abs(truth[finite]).astype(np.float64) * 2.0**-11, largest * 2.0**-39)
    error = np.abs(kept[finite].astype(np.float64) - truth[finite].astype(np.float64))
    assert np.all(error <= np.maximum(allowed, 2.0**-150))


@SETTINGS
@given(st.sampled_from(EXACT), bit_patterns(st.integers(0, 600)), st.integers(0, 100))
def test_what_is_called_exact_returns_every_bit(name: str, bits: NDArray[np.uint32], zeros: int) -> None:
    bits[: bits.size * zeros // 100] = 0
    for array, dtype in (
        (bits.view(np.float32), "F32"),
        (bits.view(np.uint16), "BF16"),
        (bits.view(np.float16), "F16"),
    ):
        encoding, parts = encode(name, array, dtype)
        assert decode(encoding.to_object(), parts).tobytes() == array.tobytes()
        assert sum(len(part.data) for part in parts.values()) <= array.nbytes


@SETTINGS
@given(
    st.sampled_from(EXACT + APPROXIMATE),
    hnp.arrays(np.float32, st.integers(0, 400), elements=st.floats(width=32)),
    st.data(),
)
def test_damage_is_refused_or_decodes_to_the_right_shape(
    name: str, values: NDArray[np.float32], data: st.DataObject
) -> None:
    """Bytes flipped at will in a part: never another shape, never an error but ``Corruption``."""
    encoding, parts = encode(name, values, "F32")
    suffix = data.draw(st.sampled_from(sorted(parts)))
    memory = parts[suffix].data
    for position in data.draw(st.lists(st.integers(0, max(0, len(memory) - 1)), max_size=4)):
        if len(memory):
            memory[position] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode(encoding.to_object(), parts)
    except Corruption:
        return
    assert decoded.shape == values.shape
    assert decoded.dtype == np.float32


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary()
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)

integers = st.sampled_from([0, 1, -1, 2, 299, 300, 2**31, 2**32, 2**33, 2**48, 2**63])
plausible: dict[str, st.SearchStrategy[Any]] = {
    "codec": st.sampled_from(codec_names()),
    "dtype": st.sampled_from(["F32", "BF16", "F16", "I32", "F8_E4M3"]),
    "shape": st.lists(integers, max_size=3),
    "parts": st.lists(
        st.sampled_from(["", "indices", "values", "counts", "codes", "scales", "fractions", "exponents"])
    ),
    "scalars": st.dictionaries(st.sampled_from(["exponent", "nonfinite", "chunk_elements"]), integers),
    "trained_on": st.booleans(),
}
"""Fields that a description could have, if of another tensor."""


@SETTINGS
@given(st.sampled_from(EXACT + APPROXIMATE + FEEDBACK), st.data())
def test_any_description_is_refused_or_right(name: str, data: st.DataObject) -> None:
    values = np.where(np.arange(300) % 20 == 0, np.arange(300, dtype=np.float32), np.float32(0))
    encoding, parts = encode(name, values, "F32")
    description = encoding.to_object()
    field = data.draw(st.sampled_from([*sorted(description), "trained_on"]))
    description[field] = data.draw(anything | plausible[field] if field in plausible else anything)
    try:
        decoded = decode(description, parts)
        decode_sparse(description, parts)
    except Corruption:
        return
    except ConfigurationError:
        assert field == "codec"
        return
    assert decoded.size == math.prod(description["shape"])


@SETTINGS
@given(anything)
def test_anything_as_a_description_is_corruption(value: object) -> None:
    try:
        decode(value, {})
    except Corruption:
        return
    raise AssertionError("a description was made up and believed")

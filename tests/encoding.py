"""Tensors encoded into memory, as a shard would hold them, and values to encode."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.streams.codecs import Encoding, codec, codec_names, decode
from tiercheck.testing.codecs import Memory, Stored, as_stored, encoded, gradient, hold, raw, read
from tiercheck.types import Fidelity

__all__ = [
    "APPROXIMATE",
    "EXACT",
    "FEEDBACK",
    "Memory",
    "Stored",
    "as_stored",
    "encode",
    "gradient",
    "hold",
    "raw",
    "read",
    "round_trip",
]

EXACT = codec_names(Fidelity.EXACT)
FEEDBACK = [name for name in codec_names() if name.endswith("+feedback")]
APPROXIMATE = [name for name in codec_names(Fidelity.APPROXIMATE) if name not in FEEDBACK]


def encode(
    name: str,
    array: NDArray[Any],
    dtype: str,
    seed: int = 1,
    *,
    residual: NDArray[np.float32] | None = None,
    threads: int = 1,
) -> tuple[Encoding, dict[str, Stored]]:
    """``residual``: zeros where it is not given and the codec keeps one."""
    return encoded(codec(name), array, dtype, seed=seed, residual=residual, threads=threads)


def round_trip(name: str, array: NDArray[Any], dtype: str) -> NDArray[Any]:
    encoding, parts = encode(name, array, dtype)
    return decode(as_stored(encoding), parts)

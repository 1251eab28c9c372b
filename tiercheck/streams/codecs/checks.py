"""Arrays and parts, checked before they are believed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.streams.codecs.encoding import DTYPES, Encoding, Part, Slot, StoredPart

__all__ = [
    "check_array",
    "check_description",
    "check_dtype",
    "check_parts",
    "check_residual",
    "flat_array",
    "part_array",
    "refuse_residual",
    "slot_array",
]


def check_dtype(dtype: str, supported: Mapping[str, Any], name: str) -> None:
    if dtype not in supported:
        raise ConfigurationError(f"the codec {name!r} encodes {', '.join(supported)}, not {dtype!r}")


def check_array(array: NDArray[Any], dtype: str) -> None:
    if array.dtype != DTYPES[dtype]:
        raise ValueError(f"a {dtype} tensor is held by an array of {DTYPES[dtype]}, not {array.dtype}")


def check_residual(residual: NDArray[np.float32] | None, size: int) -> None:
    if residual is None:
        return
    if residual.dtype != np.float32 or residual.shape != (size,):
        raise ValueError(f"the residual of {size} elements is 1-D float32, not {residual.dtype} {residual.shape}")
    if not (residual.flags.c_contiguous and residual.flags.aligned and residual.flags.writeable):
        raise ValueError("a residual is contiguous, aligned and writable")


def refuse_residual(residual: NDArray[np.float32] | None, name: str) -> None:
    if residual is not None:
        raise ValueError(f"the codec {name!r} loses nothing, and takes no residual")


def flat_array(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The elements in C order, 1-D, contiguous and aligned; a copy only if they are not so already."""
    check_array(array, dtype)
    return np.require(array, requirements=["C", "A"]).reshape(-1)


def slot_array(slot: Slot, part: Part) -> NDArray[Any]:
    """A 1-D array over the memory of a new part."""
    memory = slot(part.suffix, part.dtype, part.shape)
    if memory.readonly or memory.format != "B" or memory.nbytes != part.nbytes:
        raise ValueError(
            f"the part {part.suffix!r} needs writable memory of format 'B' and {part.nbytes} bytes, "
            f"not {memory.nbytes} of format {memory.format!r}"
        )
    array = np.frombuffer(memory, DTYPES[part.dtype])
    if not array.flags.aligned:
        raise ValueError(f"the memory of the part {part.suffix!r} is not aligned to its {part.dtype}")
    return array


def check_parts(
    encoding: Encoding, parts: Mapping[str, StoredPart], suffixes: tuple[str, ...]
) -> tuple[StoredPart, ...]:
    """The parts that the codec writes, in its order. Errors: ``Corruption`` if others are there."""
    if encoding.parts != suffixes or set(parts) != set(suffixes):
        raise Corruption(
            f"a tensor encoded by {encoding.codec!r} has the parts {list(suffixes)}; its description says "
            f"{list(encoding.parts)!r:.80} and there are {sorted(parts)!r:.80}"
        )
    return tuple(parts[suffix] for suffix in suffixes)


def part_array(part: StoredPart, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The part's content, aligned. Errors: ``Corruption`` if it is not a ``dtype`` of ``shape``."""
    kind = DTYPES[dtype]
    nbytes = math.prod(shape) * kind.itemsize
    if part.dtype != dtype or tuple(part.shape) != shape or memoryview(part.data).nbytes != nbytes:
        raise Corruption(
            f"a part should be {dtype} {list(shape)} of {nbytes} bytes, and is {part.dtype!r:.20} "
            f"{list(part.shape)!r:.80} of {memoryview(part.data).nbytes}"
        )
    array = np.frombuffer(part.data, kind).reshape(shape)
    return array if array.flags.aligned else array.copy()


def check_description(encoding: Encoding, dtypes: Mapping[str, Any], scalars: tuple[str, ...]) -> None:
    """Refuse a dtype that the codec does not encode, and scalars that it does not write."""
    if encoding.dtype not in dtypes or set(encoding.scalars) != set(scalars):
        raise Corruption(
            f"no tensor of {encoding.dtype} is encoded by {encoding.codec!r} with the scalars "
            f"{sorted(encoding.scalars)!r:.80}"
        )

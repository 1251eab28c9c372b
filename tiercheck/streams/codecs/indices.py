"""Indices of a sparse tensor: 32 bits each, counted from the start of the chunk that the element lies in.

A tensor of at most ``CHUNK_ELEMENTS`` is one chunk. A larger one has the part ``counts`` as well, how many indices each
chunk has, and the scalar ``chunk_elements``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import Corruption
from tiercheck.streams.codecs.checks import check_description, check_parts, part_array, slot_array
from tiercheck.streams.codecs.encoding import FLOATS, Encoding, Part, Slot, StoredPart

__all__ = ["CHUNK_ELEMENTS", "Indices", "chunks", "planned_parts", "read_indices"]

CHUNK_ELEMENTS = 2**31
"""Elements that one base for indices serves; what is stored says which it was written with."""

INDEXED_MAX = 2**32
"""Elements that indices of 32 bits tell apart."""


@dataclass(frozen=True)
class Indices:
    """Where the stored elements of a tensor are: ascending."""

    size: int
    """Elements of the tensor."""
    chunk_elements: int
    """Elements of each chunk but the last."""
    counts: Sequence[int]
    """Indices of each chunk."""
    within: NDArray[np.uint32]
    """All indices, each within its chunk."""

    @property
    def scalars(self) -> dict[str, int]:
        return {"chunk_elements": self.chunk_elements} if len(self.counts) > 1 else {}

    def by_chunk(self) -> list[tuple[slice, slice]]:
        """For each chunk, which of the tensor's elements it has, and which of the stored ones."""
        found: list[tuple[slice, slice]] = []
        held = 0
        for chunk, count in zip(chunks(self.size, self.chunk_elements), self.counts, strict=True):
            found.append((chunk, slice(held, held + count)))
            held += count
        return found

    def write(self, slot: Slot, values_dtype: str) -> NDArray[Any]:
        """Write the indices, and hand out the memory of the values that belong to them."""
        stored = planned_parts(self.within.size, values_dtype, self.size, self.chunk_elements)
        slot_array(slot, stored[0])[:] = self.within
        values = slot_array(slot, stored[1])
        for part in stored[2:]:
            slot_array(slot, part)[:] = self.counts
        return values

    def dense(self, values: NDArray[Any]) -> NDArray[Any]:
        """The tensor, 1-D, of the values' dtype: they where they belong, zero elsewhere. Errors: ``Corruption``."""
        try:
            tensor = np.zeros(self.size, values.dtype)
        except MemoryError as error:
            raise Corruption(f"a sparse tensor says it has {self.size} elements: no memory holds them") from error
        for chunk, stored in self.by_chunk():
            tensor[chunk][self.within[stored]] = values[stored]
        return tensor

    def flat(self) -> NDArray[np.uint32] | None:
        """The indices in the whole tensor; ``None`` if 32 bits do not hold them."""
        if len(self.counts) == 1:
            return self.within
        if self.size > INDEXED_MAX:
            return None
        return np.concatenate([self.within[stored] + np.uint32(chunk.start) for chunk, stored in self.by_chunk()])


def chunks(size: int, chunk_elements: int) -> list[slice]:
    """A tensor's elements in chunks: at least one, perhaps empty."""
    return [slice(start, min(start + chunk_elements, size)) for start in range(0, max(1, size), chunk_elements)]


def planned_parts(count: int, values_dtype: str, size: int, chunk_elements: int) -> tuple[Part, ...]:
    """The parts of ``count`` stored elements out of ``size``."""
    pairs = Part("indices", "U32", (count,)), Part("values", values_dtype, (count,))
    if size <= chunk_elements:
        return pairs
    return *pairs, Part("counts", "U32", (-(-size // chunk_elements),))


def read_indices(
    encoding: Encoding, parts: Mapping[str, StoredPart], values_dtype: str, capacity: int, scalars: tuple[str, ...] = ()
) -> tuple[Indices, NDArray[Any]]:
    """The indices and values that a codec has stored, at most ``capacity``; ``scalars`` are its own.

    Errors: ``Corruption`` if they are not of such a tensor, or do not ascend within it.
    """
    size, chunked = math.prod(encoding.shape), "counts" in encoding.parts
    check_description(encoding, FLOATS, (*scalars, *(("chunk_elements",) if chunked else ())))
    chunk_elements = encoding.scalars["chunk_elements"] if chunked else max(1, size)
    if chunked and not 0 < chunk_elements < size:
        raise Corruption(f"a tensor of {size} elements is not cut into chunks of {chunk_elements}")
    if chunk_elements > INDEXED_MAX:
        raise Corruption(f"a sparse tensor has 32-bit indices, and a chunk of this one {chunk_elements} elements")
    suffixes = ("indices", "values", *(("counts",) if chunked else ()))
    stored = check_parts(encoding, parts, suffixes)
    count = stored[0].shape[0] if len(stored[0].shape) == 1 else -1
    if not 0 <= count <= capacity:
        raise Corruption(f"{list(stored[0].shape)!r:.80} indices are not of a tensor of {size} elements")
    planned = planned_parts(count, values_dtype, size, chunk_elements)
    within, values, *counted = (
        part_array(part, plan.dtype, plan.shape) for part, plan in zip(stored, planned, strict=True)
    )
    counts = [int(each) for each in counted[0]] if counted else [count]
    if sum(counts) != count:
        raise Corruption(f"the chunks of a tensor have {sum(counts)} indices, and {count} are stored")
    indices = Indices(size, chunk_elements, counts, within)
    for chunk, each in indices.by_chunk():
        some = within[each]
        if some.size and (int(some[-1]) >= chunk.stop - chunk.start or not np.all(some[1:] > some[:-1])):
            raise Corruption(f"the indices of a tensor of {size} elements do not ascend within it")
    return indices, values

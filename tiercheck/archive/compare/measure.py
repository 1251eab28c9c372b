"""How far two tensors are from one another, a part of their elements at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.format.index.boxes import Copy, strided
from tiercheck.streams.tensors.as_bytes import array_of, tensor_of

__all__ = ["Distance", "Flat", "measure"]

ELEMENTS_AT_ONCE = 1 << 20


@dataclass
class Distance:
    """Of one tensor, summed up over its parts. Norms are of finite elements; the rest is counted."""

    elements: int = 0
    """That were compared; a complex one counts as two."""
    changed: int = 0
    """Elements of which some bit differs."""
    not_finite: int = 0
    """Elements that are NaN or infinite in one of both, and not the same bits in the other."""
    squares: float = 0.0
    """The sum of the squared differences."""
    squares_before: float = 0.0
    """The sum of the squares of the first tensor."""
    max_abs: float = 0.0

    @property
    def l2(self) -> float:
        return math.sqrt(self.squares)

    @property
    def relative(self) -> float:
        """The difference's norm by the first tensor's; infinite if that one is zero and the other one is not."""
        if self.squares == 0.0:
            return 0.0
        return math.sqrt(self.squares / self.squares_before) if self.squares_before else math.inf


@dataclass(frozen=True)
class Flat:
    """A stored tensor, flattened."""

    array: NDArray[Any]
    """In the dtype in which NumPy holds its patterns."""
    dtype: str
    """As the container calls it."""

    @classmethod
    def of(cls, tensor: torch.Tensor, dtype: str) -> Flat:
        return cls(array_of(tensor.flatten()), dtype)


def measure(copy: Copy, before: Flat, after: Flat, into: Distance) -> None:
    """Add what of ``after`` (the copy's source) lies at elements of ``before`` (its target)."""
    ours = strided(before.array[copy.target_start :], copy.lengths, copy.target_strides)
    theirs = strided(after.array[copy.source_start :], copy.lengths, copy.source_strides)
    for part in parts(copy.lengths):
        add(np.ascontiguousarray(ours[part]), np.ascontiguousarray(theirs[part]), before.dtype, after.dtype, into)


def parts(lengths: tuple[int, ...]) -> Iterator[slice]:
    """Along the first dimension, as many rows at a time as have :data:`ELEMENTS_AT_ONCE` elements."""
    rows = max(1, ELEMENTS_AT_ONCE // max(1, math.prod(lengths[1:])))
    return (slice(start, start + rows) for start in range(0, lengths[0], rows))


def add(ours: NDArray[Any], theirs: NDArray[Any], dtype: str, other_dtype: str, into: Distance) -> None:
    before, after = as_float64(ours, dtype), as_float64(theirs, other_dtype)
    if dtype == other_dtype:
        differs = torch.from_numpy(patterns(ours, len(before)) != patterns(theirs, len(after)))
    else:
        differs = (before != after) & ~(before.isnan() & after.isnan())
    finite = before.isfinite() & after.isfinite()
    # What is the same adds nothing, whatever a subtraction of infinities says.
    difference = torch.where(finite, after - before, 0.0)
    into.elements += len(before)
    into.changed += int(differs.count_nonzero())
    into.not_finite += int((~finite & differs).count_nonzero())
    into.squares += float(difference.square().sum())
    into.squares_before += float(torch.where(before.isfinite(), before, 0.0).square().sum())
    into.max_abs = max(into.max_abs, float(difference.abs().max()))


def as_float64(array: NDArray[Any], dtype: str) -> torch.Tensor:
    """Flattened; of a complex number both parts."""
    tensor = tensor_of(array, dtype).flatten()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).flatten()
    return tensor.to(torch.float64)


def patterns(array: NDArray[Any], count: int) -> NDArray[Any]:
    """The bits of so many numbers, as whole numbers."""
    return array.reshape(-1).view(np.dtype(f"u{array.nbytes // count}"))

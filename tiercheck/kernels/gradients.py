"""The gradients that a replay takes, dense, sparse or in half precision, and the checks of the arrays that it works
on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError

__all__ = ["Gradient", "HalfGradient", "SparseGradient", "check_gradients", "check_state", "dense"]


@dataclass(frozen=True, eq=False)
class SparseGradient:
    """A gradient whose elements at ``indices`` are ``values`` and whose other elements are +0.0.

    ``indices`` (uint32, strictly ascending) and ``values`` (fp32) are 1-D, contiguous, aligned, and of one length.

    Raises:
        ConfigurationError: for arrays of any other form.
    """

    indices: NDArray[np.uint32]
    values: NDArray[np.float32]

    def __post_init__(self) -> None:
        for name, array, dtype in (("indices", self.indices, np.uint32), ("values", self.values, np.float32)):
            if array.dtype != dtype or array.ndim != 1:
                raise ConfigurationError(
                    f"a sparse gradient's {name} must be 1-D {np.dtype(dtype)}, not {array.ndim}-D {array.dtype}"
                )
            if not array.flags.c_contiguous or not array.flags.aligned:
                raise ConfigurationError(f"a sparse gradient's {name} must be contiguous and aligned")
        if self.indices.size != self.values.size:
            raise ConfigurationError(f"{self.indices.size} indices do not fit {self.values.size} values")
        if not np.all(self.indices[1:] > self.indices[:-1]):
            raise ConfigurationError("a sparse gradient's indices must ascend, each once")

    def dense(self, size: int) -> NDArray[np.float32]:
        """The gradient as a new array of ``size`` elements. Errors: ``IndexError`` if an index is beyond it."""
        out = np.zeros(size, np.float32)
        out[self.indices] = self.values
        return out

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """The positions in ``indices`` of those in ``start..stop-1``, as a half-open range."""
        if start >= stop:
            return 0, 0
        # In the dtype of the indices: for any other, NumPy copies all of them at each call.
        first = np.searchsorted(self.indices, np.uint32(start))
        last = np.searchsorted(self.indices, np.uint32(stop - 1), side="right")
        return int(first), int(last)

    def piece(self, start: int, stop: int) -> SparseGradient:
        """The gradient of elements ``start..stop-1``, with indices that count from ``start``. The values are a view."""
        first, last = self.between(start, stop)
        return SparseGradient(self.indices[first:last] - np.uint32(start), self.values[first:last])


@dataclass(frozen=True, eq=False)
class HalfGradient:
    """A gradient whose elements are these half-precision numbers as fp32, multiplied by ``scale`` if there is one.

    ``halves`` (bf16 patterns as uint16, or fp16) are 1-D, contiguous and aligned.

    Raises:
        ConfigurationError: for an array of any other form.
    """

    halves: NDArray[np.uint16] | NDArray[np.float16]
    scale: float | None = None

    def __post_init__(self) -> None:
        halves = self.halves
        if halves.ndim != 1 or halves.dtype not in ((np.uint16,) if self.scale is None else (np.uint16, np.float16)):
            raise ConfigurationError(
                f"a gradient in half precision is 1-D, of bf16 patterns (with a scale also of fp16 numbers), not "
                f"{halves.ndim}-D {halves.dtype}"
            )
        if not halves.flags.c_contiguous or not halves.flags.aligned:
            raise ConfigurationError("a gradient in half precision must be contiguous and aligned")

    @property
    def size(self) -> int:
        """Elements."""
        return self.halves.size

    @property
    def nbytes(self) -> int:
        return self.halves.nbytes

    def piece(self, start: int, stop: int) -> HalfGradient:
        """The gradient of elements ``start..stop-1``, a view."""
        return HalfGradient(self.halves[start:stop], self.scale)


Gradient: TypeAlias = NDArray[np.float32] | SparseGradient
"""What a kernel takes."""


def dense(gradient: Gradient, size: int) -> NDArray[np.float32]:
    """The gradient as an array of ``size`` elements: a dense one itself, of a sparse one a new array."""
    return gradient.dense(size) if isinstance(gradient, SparseGradient) else gradient


def check_state(state: Mapping[str, NDArray[np.float32]]) -> None:
    """Check that a replay can work on the state in place: contiguous fp32 arrays, of one size, writable, disjoint.

    Errors: ``ConfigurationError`` that names the array.
    """
    size = next(iter(state.values())).size
    for name, array in state.items():
        check_array(name, array, size)
        if not array.flags.writeable:
            raise ConfigurationError(f"a replay works in place; {name} is read-only")
        for other, second in state.items():
            if other != name and np.may_share_memory(array, second):
                raise ConfigurationError(f"a replay works in place; {name} overlaps {other}")


def check_gradients(state: Mapping[str, NDArray[np.float32]], gradients: Sequence[Gradient | HalfGradient]) -> None:
    """Check that the gradients have the state's size and do not share its memory.

    Errors: ``ConfigurationError`` that names the gradient.
    """
    size = next(iter(state.values())).size
    for index, gradient in enumerate(gradients):
        name = f"gradients[{index}]"
        if isinstance(gradient, SparseGradient):
            if gradient.indices.size and gradient.indices[-1] >= size:
                raise ConfigurationError(f"{name} has the index {gradient.indices[-1]}, and param {size} elements")
            arrays: tuple[NDArray[Any], ...] = (gradient.values, gradient.indices)
        elif isinstance(gradient, HalfGradient):
            if gradient.size != size:
                raise ConfigurationError(f"{name} has {gradient.size} elements, and param {size}")
            arrays = (gradient.halves,)
        else:
            check_array(name, gradient, size)
            arrays = (gradient,)
        for held, array in state.items():
            if any(np.may_share_memory(array, each) for each in arrays):
                raise ConfigurationError(f"a replay works in place; {held} overlaps {name}")


def check_array(name: str, array: NDArray[np.float32], size: int) -> None:
    if array.dtype != np.float32:
        raise ConfigurationError(f"a replay works on float32 alone; {name} is {array.dtype}")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ConfigurationError(f"a replay needs contiguous, aligned arrays, and {name} is not so")
    if array.size != size:
        raise ConfigurationError(f"{name} has {array.size} elements, and param {size}")

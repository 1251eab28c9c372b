"""How the kernels are compiled, and what Numba lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray

__all__ = [
    "LINE",
    "TILE",
    "aligned",
    "borrowed",
    "compiled",
    "elements_to_line",
    "frozen",
    "inlined",
    "keep_alive",
    "multiply_add",
    "pointer",
]

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

LINE = 16
"""fp32 elements in a cache line."""

TILE = 4096
"""Elements a replay keeps in the first two caches while it applies all steps to them."""


def compiled(function: Function, *, inline: str = "never") -> Function:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "inline": inline}
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError as error:  # Numba finds no directory that it may write to
        logger.warning("%s is compiled anew in every process; set NUMBA_CACHE_DIR (%s)", function.__name__, error)
        return cast(Function, numba.njit(**options)(function))


def inlined(function: Function) -> Function:
    """For what is called with arrays, for each element or each small block: a call counts their references, in atomic
    operations."""
    return compiled(function, inline="always")


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view: Numba compiles a kernel anew for an argument that can be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` in fp32, rounded once."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer, so that a kernel takes any number of arrays without being compiled for each."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.uintp), generate


@compiled
def borrowed(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory, of one dimension, as an array that does not count its references: to slice it, or to call with
    it, costs no atomic operation.

    Numba counts a reference for every slice and every argument. What is borrowed must outlive the loop: an argument
    does, and an array made by compiled code where :func:`keep_alive` comes after the loop.
    """
    return carray(pointer(np.uintp(array.ctypes.data)), (array.size,), array.dtype)


@compiled
def keep_alive(array: NDArray[Any]) -> None:
    """Until here: Numba frees an array after the last line that names it."""


@compiled
def elements_to_line(array: NDArray[np.float32]) -> int:
    """How many elements lie before the first one, not itself, that begins a cache line: 1 to 16.

    Vectors that cross from one line into the next cost twice.
    """
    return LINE - (array.ctypes.data % 64) // 4


@compiled
def aligned(room: NDArray[np.float32]) -> NDArray[np.float32]:
    """All but ``LINE`` elements of it, borrowed, the first of which begins a cache line."""
    start = elements_to_line(room)
    return borrowed(room)[start : start + room.size - LINE]

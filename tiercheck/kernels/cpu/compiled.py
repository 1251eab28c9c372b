"""How the kernels are compiled, and operations that Numba lacks."""

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
    "multiply_add_wide",
    "pointer",
]

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

LINE = 16
"""fp32 elements in a cache line."""

TILE = 4096
"""Elements that a kernel works on at a time, so that they stay in the first-level cache."""


def compiled(function: Function, *, inline: str = "never") -> Function:
    """Compile with Numba at the first call, without the GIL, and cache the result on disk if a directory is
    writable."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "inline": inline}
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError as error:  # Numba finds no directory that it may write to
        logger.warning("%s is compiled anew in every process; set NUMBA_CACHE_DIR (%s)", function.__name__, error)
        return cast(Function, numba.njit(**options)(function))


def inlined(function: Function) -> Function:
    """:func:`compiled`, and inlined by Numba: for functions that are called with arrays for each element or small
    block. A call that is not inlined counts the arrays' references, in atomic operations."""
    return compiled(function, inline="always")


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view. Numba compiles a kernel once for writable and once for read-only arguments; a kernel that only
    reads an array is always given a read-only one."""
    view = array.view()
    view.flags.writeable = False
    return view


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` in fp32, rounded once (a fused multiply-add)."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def multiply_add_wide(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """:func:`multiply_add` in fp64."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer. With addresses as arguments, one compiled kernel takes any number of arrays."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.uintp), generate


@compiled
def borrowed(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory as a 1-D array without a reference count: slicing it, or passing it on, costs no atomic
    operation.

    For other arrays, Numba counts a reference for every slice and every argument. The array that is borrowed must
    outlive the loop. An argument does; an array that compiled code allocates needs :func:`keep_alive` after the loop.
    """
    return carray(pointer(np.uintp(array.ctypes.data)), (array.size,), array.dtype)


@compiled
def keep_alive(array: NDArray[Any]) -> None:
    """Does nothing. Numba frees an array after the last line that names it; this line names it."""


@compiled
def elements_to_line(array: NDArray[np.float32]) -> int:
    """How many elements from the first one on lie before the next cache line begins: 1 to 16.

    A vector that crosses into the next line costs twice as much.
    """
    return LINE - (array.ctypes.data % 64) // 4


@compiled
def aligned(room: NDArray[np.float32]) -> NDArray[np.float32]:
    """A borrowed part of ``room`` that begins a cache line, shorter than ``room`` by ``LINE`` elements."""
    start = elements_to_line(room)
    return borrowed(room)[start : start + room.size - LINE]

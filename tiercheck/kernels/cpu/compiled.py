"""How the kernels are compiled, and what Numba lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

__all__ = ["TILE", "compiled", "frozen", "multiply_add", "pointer_to_floats"]

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

CPointer: Any = types.CPointer

TILE = 4096
"""Elements a replay keeps in the first two caches while it applies all steps to them."""


def compiled(function: Function) -> Function:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError as error:  # Numba finds no directory that it may write to
        logger.warning("%s is compiled anew in every process; set NUMBA_CACHE_DIR (%s)", function.__name__, error)
        return cast(Function, numba.njit(**options)(function))


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
def pointer_to_floats(typing_context: Any, address: Any) -> Any:
    """An address as a pointer, so that a kernel takes any number of arrays without being compiled for each."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return CPointer(types.float32)(types.uintp), generate

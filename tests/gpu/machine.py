"""Where CUDA kernels run in the tests: on a GPU, or on the host over ``simt.h``; and what is needed for either."""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

__all__ = ["GUARD", "GUARD_BYTE", "Gpu", "Machine", "guarded", "need_cupy", "need_gpu", "need_torch_on_gpu"]

GUARD = 256
GUARD_BYTE = 0x5A


class Machine(Protocol):
    """Takes arrays in and out, each with guards beyond both of its ends."""

    stream: Any
    sizes: tuple[int, ...]
    """What a kernel is tried on: odd ones, and ones of several blocks of threads."""

    def put(self, array: NDArray[Any]) -> Any: ...
    def get(self, array: Any) -> NDArray[Any]: ...
    def intact(self, array: Any) -> bool:
        """Whether nothing was written beyond the ends of an array of :meth:`put`."""
        ...


def need_cupy() -> Any:
    """CuPy, which imports without a GPU. Where it is missing the test is skipped; in CI that is a failure."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        message = f"CuPy cannot be imported ({error}); install tiercheck[gpu] to run this test"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message, allow_module_level=True)


def need_gpu() -> Any:
    """CuPy on a machine with a GPU; elsewhere the test is skipped."""
    cupy = need_cupy()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs a GPU: {error}", allow_module_level=True)
    if count == 0:
        pytest.skip("needs a GPU: CUDA sees none", allow_module_level=True)
    return cupy


def need_torch_on_gpu() -> None:
    """CuPy and torch on a machine with a GPU; elsewhere the test is skipped."""
    need_gpu()
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a torch that is built for CUDA", allow_module_level=True)


def guarded(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The array's bytes between guards."""
    held = np.full(array.nbytes + 2 * GUARD, GUARD_BYTE, np.uint8)
    held[GUARD : GUARD + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return held


class Gpu:
    """The current device, and a stream of the lowest priority."""

    sizes = (0, 1, 2, 31, 255, 256, 257, 4095, 4097, 100_003, 1_000_003)

    def __init__(self, cupy: Any) -> None:
        from tiercheck.kernels import cuda

        self._cupy = cupy
        self._held: dict[int, Any] = {}
        self.stream = cuda.low_priority_stream()

    def put(self, array: NDArray[Any]) -> Any:
        with self.stream:
            held = self._cupy.asarray(guarded(array))
        inside = held[GUARD : GUARD + array.nbytes].view(array.dtype)
        self._held[id(inside)] = (held, inside)
        return inside

    def get(self, array: Any) -> NDArray[Any]:
        host: NDArray[Any] = array.get(stream=self.stream)
        self.stream.synchronize()
        return host

    def intact(self, array: Any) -> bool:
        held = self.get(self._held[id(array)][0])
        return bool(np.all(held[:GUARD] == GUARD_BYTE) and np.all(held[len(held) - GUARD :] == GUARD_BYTE))

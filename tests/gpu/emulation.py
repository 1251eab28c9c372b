"""The CUDA kernels on the host: their very sources, compiled by g++ over ``simt.h``, behind the same Python functions.

Arrays are NumPy's. What this cannot show is the device's own arithmetic (its rounding is that of IEEE 754 with the
options that :mod:`tiercheck.kernels.cuda.module` compiles with), its weaker memory, and its speed.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tests.gpu.machine import GUARD, GUARD_BYTE, guarded
from tests.servers.programs import need
from tiercheck.kernels.cuda import module
from tiercheck.kernels.registry import cuda_sources

__all__ = ["Emulator", "OnDevice", "compile_for_host", "compile_text"]

EMULATION = Path(__file__).parent / "simt.h"

HOST_OPTIONS = ("-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")


class OnDevice(np.ndarray[Any, Any]):
    """An array that passes for one on the device."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """As CuPy has it: an array without elements has no address."""
        found = dict(self.__array_interface__)
        return found if self.size else {**found, "data": (0, False)}


def compile_for_host(directory: Path) -> ctypes.CDLL:
    """All sources of the package as one library, each in a namespace of its own."""
    texts = []
    for source, kernels in cuda_sources().items():
        entries = "\n".join(f"ON_HOST({name})" for name in kernels)
        texts.append(f"namespace {source} {{\n{module.text_of(source)}\n{entries}\n}}")
    return compile_text("\n".join(texts), directory)


def compile_text(text: str, directory: Path) -> ctypes.CDLL:
    compiler = need("g++", package="g++")
    path, library = directory / "kernels.cpp", directory / "kernels.so"
    path.write_text(f'#include "{EMULATION}"\n{text}\n')
    command = [str(compiler), *HOST_OPTIONS, "-shared", "-fPIC", str(path), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


class Emulator:
    """A :class:`~tests.gpu.machine.Machine` whose ``launch`` stands in for that of the package.

    ``resident`` blocks are under way at a time, and ``seed`` decides which threads go on when; it counts up by itself.
    """

    stream = None
    sizes = (0, 1, 31, 255, 256, 257, 4097)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.resident = 3
        self.seed = 0

    def put(self, array: NDArray[Any]) -> OnDevice:
        return guarded(array)[GUARD : GUARD + array.nbytes].view(array.dtype).view(OnDevice)

    def get(self, array: OnDevice) -> NDArray[Any]:
        return np.array(array)

    def intact(self, array: OnDevice) -> bool:
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return bool(np.all(owner[:GUARD] == GUARD_BYTE) and np.all(owner[len(owner) - GUARD :] == GUARD_BYTE))

    def launch(self, source: str, kernel: str, grid: int, block: int, arguments: Sequence[Any], stream: Any) -> None:
        assert 1 <= grid < 2**31 and 1 <= block <= 1024
        assert kernel in cuda_sources()[source]
        status = self.call(self.function(kernel), grid, block, arguments)
        assert status == 0, f"{kernel} failed on the host; stderr says why"

    def function(self, kernel: str) -> Callable[..., int]:
        return cast(Callable[..., int], self._library[f"on_host_{kernel}"])

    def call(self, function: Callable[..., int], grid: int, block: int, arguments: Sequence[Any]) -> int:
        """0 where every thread came to its end."""
        cells = [cell_of(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
        self.seed += 1
        return function(addresses, grid, block, self.resident, self.seed)


def cell_of(argument: Any) -> NDArray[Any]:
    """Memory that holds the argument as the kernel takes it: a pointer, a number, or a structure."""
    if argument is None:
        return np.zeros(1, np.uintp)
    if isinstance(argument, OnDevice):
        return np.array([argument.__array_interface__["data"][0]], np.uintp)
    if isinstance(argument, np.ndarray):
        return argument
    assert isinstance(argument, np.generic), f"{argument!r} has no size of its own"
    return np.array([argument])

"""Compiling the CUDA sources, and launching their kernels.

NVRTC compiles a source at its first use in a process, for each device: that takes tenths of a second. CuPy's own
``RawModule`` is not used, since it appends ``-ftz=true``, which flushes denormals to zero. Nothing here waits for the
device or allocates on it.
"""

from __future__ import annotations

import importlib.resources
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import cupy
import numpy as np
from cupy.cuda import function, nvrtc

from tiercheck.errors import ConfigurationError
from tiercheck.kernels.registry import cuda_sources

__all__ = [
    "NAMES",
    "DeviceArray",
    "Stream",
    "address_of",
    "borrow",
    "check",
    "check_values",
    "compile_source",
    "grid_for",
    "launch",
    "low_priority_stream",
    "text_of",
    "torch_stream",
    "warm_up",
]

logger = logging.getLogger(__name__)

DeviceArray: TypeAlias = Any
"""A ``cupy.ndarray``, which is untyped."""

Stream: TypeAlias = Any
"""A ``cupy.cuda.Stream``."""

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Every operation rounds once, as it is written. A fused operation is written as one."""

NAMES = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16"}
"""The dtypes that gradients may have, and their names in the names of kernels."""

DLPACK_CUDA = 2
"""``kDLCUDA`` of DLPack's ``DLDeviceType``."""

GRID_MAX = 4096
"""The most blocks of a kernel whose threads take several elements each: enough to fill any device."""

LOWEST = 1 << 16
"""A priority beyond CUDA's range, which it replaces by its lowest one."""


@cache
def text_of(source: str) -> str:
    """The text of a source, with its own headers in the place of their first ``#include``."""
    included: set[str] = set()

    def expand(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        text = (importlib.resources.files(__package__) / "source" / name).read_text("utf-8")
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate(text.splitlines(), 1):
            if header := re.fullmatch(r'#include "([^"]+)"', line):
                lines += [expand(header[1]), f'#line {number + 1} "{name}"']
            else:
                lines.append("" if line == "#pragma once" else line)
        return "\n".join(lines)

    return expand(f"{source}.cu") + "\n"


def compile_source(source: str, architecture: str) -> bytes:
    """The machine code of a source for an ``architecture`` such as ``sm_90``. Needs no GPU.

    Raises:
        ConfigurationError: NVRTC is missing, or cannot compile the source; the message has its log.
    """
    options = (*OPTIONS, f"--gpu-architecture={architecture}")
    try:
        program = nvrtc.createProgram(text_of(source), f"{source}.cu", (), ())
        try:
            nvrtc.compileProgram(program, options)
            return bytes(nvrtc.getCUBIN(program))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise ConfigurationError(f"NVRTC cannot compile {source}.cu for {architecture}: {error}\n{log}") from error
        finally:
            nvrtc.destroyProgram(program)
    except (RuntimeError, OSError) as error:  # its library is loaded by the first call
        raise ConfigurationError(
            f"NVRTC cannot be used ({error}); it comes with the CUDA toolkit, or: pip install nvidia-cuda-nvrtc"
        ) from error


def architecture_of(device: int) -> str:
    """The newest architecture that NVRTC knows and whose machine code this device runs, such as ``sm_90``.

    Raises:
        ConfigurationError: there is none.
    """
    capability = int(cupy.cuda.Device(device).compute_capability)
    within_reach = [each for each in nvrtc.getSupportedArchs() if each // 10 == capability // 10 and each <= capability]
    if not within_reach:
        raise ConfigurationError(
            f"device {device} has compute capability {capability / 10}, for which this NVRTC does not compile"
        )
    return f"sm_{max(within_reach)}"


_modules: dict[tuple[str, int], Any] = {}
_compiling = threading.Lock()


def module_of(source: str, device: int) -> Any:
    with _compiling:
        if (source, device) not in _modules:
            architecture = architecture_of(device)
            logger.debug("compiling %s.cu for %s", source, architecture)
            loaded = function.Module()
            loaded.load(compile_source(source, architecture))
            _modules[source, device] = loaded
        return _modules[source, device]


@cache
def kernel_of(source: str, kernel: str, device: int) -> Any:
    return module_of(source, device).get_function(kernel)


def launch(source: str, kernel: str, grid: int, block: int, arguments: Sequence[Any], stream: Stream) -> None:
    """Put a kernel into ``stream``, on the current device.

    ``arguments``: device arrays, NumPy scalars of the kernel's types, ``None`` for a null pointer, or a NumPy array of
    one record for a structure that is passed by value.

    Raises:
        ConfigurationError: an argument is not on the current device, or NVRTC does not compile the source.
    """
    device = int(cupy.cuda.runtime.getDevice())
    passed: list[Any] = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            passed.append(function.CPointer(argument.ctypes.data))
        elif argument is None:
            passed.append(np.uintp(0))
        else:
            if isinstance(argument, cupy.ndarray) and argument.device.id != device:
                raise ConfigurationError(
                    f"{kernel} runs on device {device}, and an array is on device {argument.device.id}"
                )
            passed.append(argument)
    kernel_of(source, kernel, device)((grid,), (block,), tuple(passed), stream=stream)


def grid_for(size: int, threads: int) -> int:
    """Blocks of ``threads`` for ``size`` elements, in a kernel whose threads step through them by the whole grid."""
    return min(GRID_MAX, max(1, -(-size // threads)))


def low_priority_stream() -> Stream:
    """A new stream on the current device, of the lowest priority, that does not wait for the default stream.

    The device starts blocks of streams of higher priority first. torch's own streams have the lowest priority, too,
    unless they are made otherwise: then training's kernels on such a stream share the device with these.
    """
    return cupy.cuda.Stream(non_blocking=True, priority=LOWEST)


@contextmanager
def torch_stream(pointer: int, device: int) -> Iterator[Stream]:
    """A stream of torch's, by its ``cuda_stream``, for launches inside of the context. It remains torch's."""
    with cupy.cuda.Device(device):
        yield cupy.cuda.ExternalStream(pointer, device)


def borrow(tensor: Any, stream: Stream) -> DeviceArray:
    """A torch CUDA tensor, or another object with DLPack, as a CuPy array of the same memory.

    From here on ``stream`` waits for the work that the tensor's library has put into its current stream so far; the
    host does not wait. The caller keeps the tensor alive until the work is done, and does not write to it. It must be
    detached from autograd (``detach()``). Pass bf16 as ``tensor.view(torch.uint16)``.

    Raises:
        ConfigurationError: the tensor is not on a GPU.
    """
    kind, _ = tensor.__dlpack_device__()
    if int(kind) != DLPACK_CUDA:
        raise ConfigurationError(f"a CUDA kernel works on GPU memory, and this {type(tensor).__name__} is not on a GPU")
    with stream:
        return cupy.from_dlpack(tensor)


def address_of(array: DeviceArray) -> int:
    """Where its elements are. An array without any has no address: 0."""
    return int(array.__cuda_array_interface__["data"][0])


def check(name: str, array: DeviceArray, dtype: Any, size: int | None = None, *, least: int = 0) -> None:
    """Errors: ``ValueError`` if ``array`` is not a 1-D, contiguous device array of ``dtype`` with ``size`` elements, or
    with at least ``least``."""
    if not hasattr(array, "__cuda_array_interface__"):
        raise ValueError(f"{name} must be a CuPy array on the device; borrow() makes one of a torch tensor")
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be a 1-D contiguous array of {np.dtype(dtype)}, not of {array.dtype}")
    if (size is not None and array.size != size) or array.size < least:
        raise ValueError(
            f"{name} must have {size if size is not None else f'at least {least}'} elements, not {array.size}"
        )


def check_values(values: DeviceArray, residual: DeviceArray | None) -> None:
    """Errors: ``ValueError`` if these are no values that a kernel encodes, or the residual is not theirs."""
    if values.dtype not in NAMES:
        raise ValueError(f"values are float32, float16 or bf16 patterns (uint16), not {values.dtype}")
    check("values", values, values.dtype)
    if residual is not None:
        check("residual", residual, np.float32, values.size)


def warm_up() -> None:
    """Compile and load every kernel for the current device, so that none compiles while training waits."""
    device = int(cupy.cuda.runtime.getDevice())
    for source, entries in cuda_sources().items():
        for entry in entries:
            kernel_of(source, entry, device)

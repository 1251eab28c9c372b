"""The GPU of this machine: what it is, whether memory can be pinned for it, and how fast it copies to the host.

By the CUDA driver library alone, so that it works without torch and CuPy. What is pinned is shared memory, as that of
the first tier: it is registered page by page, and need not be as fast as what the driver allocates itself. Source: the
CUDA driver API, "Memory Management" (``cuMemHostRegister``, ``cuMemcpyDtoH``) and "Device Management".
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib import metadata
from types import TracebackType
from typing import Any, Protocol, Self

from tiercheck.errors import TierCheckError

__all__ = ["CudaGpu", "Gpu", "GpuDiagnosis", "GpuError", "examine_gpu"]

LIBRARY = "libcuda.so.1"
COPY_NBYTES = 256 << 20
REPEATS = 3
NAME_BYTES = 256
RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")


class GpuError(TierCheckError):
    """The CUDA driver is not there, or refused a call."""


class Gpu(Protocol):
    """One device. What it is asked may raise :class:`GpuError`."""

    @property
    def name(self) -> str: ...
    @property
    def driver(self) -> str:
        """The newest CUDA version that the driver knows, such as ``13.0``."""
        ...

    @property
    def memory_nbytes(self) -> int: ...
    def copy_s(self, nbytes: int, *, pinned: bool) -> float:
        """Seconds that a copy to the host takes: into pinned shared memory, or into ordinary memory."""
        ...


@dataclass(frozen=True)
class GpuDiagnosis:
    """What was found. Without a GPU only ``obstacle`` says anything."""

    obstacle: str = ""
    """Why there is no GPU to use, in one line."""
    name: str = ""
    driver: str = ""
    runtime: str = ""
    """The version of the CUDA runtime that is installed as a package; empty if none is."""
    memory_nbytes: int = 0
    pinned_bytes_per_s: float = 0.0
    """From the device into pinned shared memory; 0 if memory cannot be pinned."""
    pageable_bytes_per_s: float = 0.0
    pinning_obstacle: str = ""

    def to_object(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


OpenGpu = Callable[[], AbstractContextManager[Gpu]]


def examine_gpu(open_gpu: OpenGpu | None = None) -> GpuDiagnosis:
    """Look at the first visible GPU. Takes half a GiB of its memory and of the host's for a moment. Errors: none; they
    are said."""
    try:
        with (open_gpu or CudaGpu)() as gpu:
            pageable = bandwidth(gpu, pinned=False)
            try:
                pinned, obstacle = bandwidth(gpu, pinned=True), ""
            except GpuError as error:
                pinned, obstacle = 0.0, str(error)
            return GpuDiagnosis(
                name=gpu.name,
                driver=gpu.driver,
                runtime=runtime_version(),
                memory_nbytes=gpu.memory_nbytes,
                pinned_bytes_per_s=pinned,
                pageable_bytes_per_s=pageable,
                pinning_obstacle=obstacle,
            )
    except GpuError as error:
        return GpuDiagnosis(obstacle=str(error))


def bandwidth(gpu: Gpu, *, pinned: bool) -> float:
    """Bytes a second of the fastest copy: others share the bus with somebody."""
    return COPY_NBYTES / max(1e-9, min(gpu.copy_s(COPY_NBYTES, pinned=pinned) for _ in range(REPEATS)))


def runtime_version() -> str:
    for distribution in RUNTIMES:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


class CudaGpu:
    """The device 0 of those that are visible, through the driver. A context manager."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._driver = ctypes.CDLL(library)
            self._call("cuInit", 0)
            self._device = self._int("cuDeviceGet", 0)
        except (OSError, AttributeError) as error:
            raise GpuError(f"there is no CUDA driver ({error})") from None
        self._context = ctypes.c_void_p()

    def __enter__(self) -> Self:
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._driver.cuDevicePrimaryCtxRelease_v2(self._device)

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(NAME_BYTES)
        self._call("cuDeviceGetName", text, NAME_BYTES, self._device)
        return text.value.decode(errors="replace")

    @property
    def driver(self) -> str:
        version = self._int("cuDriverGetVersion")
        return f"{version // 1000}.{version % 1000 // 10}"

    @property
    def memory_nbytes(self) -> int:
        nbytes = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(nbytes), self._device)
        return nbytes.value

    def copy_s(self, nbytes: int, *, pinned: bool) -> float:
        """The copy returns when it has ended."""
        there = ctypes.c_uint64()
        with self._pinned(nbytes) if pinned else nullcontext(ctypes.create_string_buffer(nbytes)) as here:
            self._call("cuMemAlloc_v2", ctypes.byref(there), ctypes.c_size_t(nbytes))
            try:
                began = time.perf_counter()
                self._call("cuMemcpyDtoH_v2", here, there, ctypes.c_size_t(nbytes))
                return time.perf_counter() - began
            finally:
                self._driver.cuMemFree_v2(there)

    @contextmanager
    def _pinned(self, nbytes: int) -> Iterator[ctypes.Array[ctypes.c_char]]:
        try:
            fd = os.memfd_create("tiercheck-doctor")
            try:
                os.posix_fallocate(fd, 0, nbytes)
                mapping = mmap.mmap(fd, nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise GpuError(f"there is no shared memory to copy to: {error}") from None
        here = (ctypes.c_char * nbytes).from_buffer(mapping)  # it is unmapped when nobody has this any more
        self._call("cuMemHostRegister_v2", here, ctypes.c_size_t(nbytes), 0)
        try:
            yield here
        finally:
            self._driver.cuMemHostUnregister(here)

    def _int(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self._call(name, ctypes.byref(value), *arguments)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            said = text.value.decode(errors="replace") if text.value else f"error {code}"
            raise GpuError(f"{name}: {said}")

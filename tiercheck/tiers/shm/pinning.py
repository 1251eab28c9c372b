"""Page-locked memory for device-to-host copies, by the CUDA driver library alone.

A copy from the GPU to memory that is not page-locked goes through a buffer of the driver's, at a fraction of the
bandwidth, and holds up whoever asked for it. Locking takes about as long as such a copy, so it is done once for
memory that is used again and again. Source: the CUDA driver API, "Memory Management", ``cuMemHostRegister``.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from tiercheck.errors import ConfigurationError, TierError

__all__ = ["PIN_MODES", "CudaPinning"]

PIN_MODES = ("auto", "on", "off")
LIBRARY = "libcuda.so.1"
PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context, so for every library that this process uses."""
DEINITIALIZED = 4
"""CUDA_ERROR_DEINITIALIZED: the process ends, and the locks go with it."""


class CudaError(TierError):
    """A call of the CUDA driver failed, with ``code``."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class CudaPinning:
    """``mode``: ``auto`` pins if there is a GPU, ``on`` insists, ``off`` does not.

    Nothing of CUDA is touched before it is needed: a process that never pins makes no context. The device is the
    one that ``LOCAL_RANK`` names among the visible ones, as trainers choose it. Its primary context is held until
    :meth:`close`.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._driver: ctypes.CDLL | None = None
        self._loaded = False
        """Whether the driver is ready, and has a device."""
        self._device: int | None = None
        self._context = ctypes.c_void_p()
        self._lock = threading.RLock()  # a region's end may come in the middle of a call
        self.obstacle = "off" if mode == "off" else ""
        """Why nothing is pinned, once that is known."""

    def check(self) -> None:
        """Errors: ``ConfigurationError`` if ``mode`` is ``on`` and there is no GPU."""
        if self._mode == "on" and not self.available():
            raise ConfigurationError(
                f"pin=on needs a GPU that CUDA can use, but: {self.obstacle}; leave pin= out to pin if there is one"
            )

    def available(self) -> bool:
        """Whether there is a GPU. Makes no context."""
        if self._loaded or self.obstacle:
            return not self.obstacle
        with self._lock:
            if not self._loaded and not self.obstacle:
                try:
                    self._load()
                    self._loaded = True
                except (OSError, AttributeError, CudaError) as error:
                    self.obstacle = f"no GPU ({error})"
            return not self.obstacle

    def pin(self, address: int, nbytes: int) -> Callable[[], None] | None:
        """Page-lock memory that is backed and mapped; returns what undoes it.

        ``None`` if that cannot be had, with the reason in :attr:`obstacle`.
        Errors: ``ConfigurationError`` if ``mode`` is ``on``.
        """
        if not self.available():
            return None
        try:
            # Without the lock: it takes as long as the memory is large, and others pin meanwhile.
            self._in_context(lambda: self._call("cuMemHostRegister_v2", address, nbytes, PORTABLE))
        except CudaError as error:
            self.obstacle = f"refused ({error})"
            if self._mode == "on":
                raise ConfigurationError(f"pin=on, but {nbytes} bytes cannot be page-locked: {error}") from error
            return None
        pid = os.getpid()
        return lambda: self._unpin(address) if os.getpid() == pid else None  # a forked child has no part in it

    def pci_bus_id(self) -> str | None:
        """Of the device, such as ``0000:3b:00.0``; ``None`` if there is none, or it does not say."""
        if not self.available():
            return None
        text = ctypes.create_string_buffer(32)
        try:
            with self._lock:
                self._call("cuDeviceGetPCIBusId", text, 32, self._device)
        except CudaError:
            return None
        return text.value.decode().lower()

    def close(self) -> None:
        """Let the device's context go. Everything must be unpinned by then."""
        with self._lock:
            if self._context:
                self._context = ctypes.c_void_p()
                self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    # Details.

    def _load(self) -> None:
        driver = ctypes.CDLL(LIBRARY)
        self._declare(driver)
        self._driver = driver
        try:
            self._call("cuInit", 0)
            count = ctypes.c_int()
            self._call("cuDeviceGetCount", ctypes.byref(count))
            if count.value < 1:
                raise CudaError("CUDA sees none")
            device = ctypes.c_int()
            rank = os.environ.get("LOCAL_RANK", "0")
            self._call("cuDeviceGet", ctypes.byref(device), int(rank) % count.value if rank.isdigit() else 0)
            self._device = device.value
        except CudaError:
            self._driver = None
            raise

    @staticmethod
    def _declare(driver: ctypes.CDLL) -> None:
        number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
        for name, arguments in {
            "cuInit": (ctypes.c_uint,),
            "cuDeviceGetCount": (pointer,),
            "cuDeviceGet": (pointer, number),
            "cuDeviceGetPCIBusId": (ctypes.c_char_p, number, number),
            "cuDevicePrimaryCtxRetain": (pointer, number),
            "cuDevicePrimaryCtxRelease_v2": (number,),
            "cuCtxPushCurrent_v2": (pointer,),
            "cuCtxPopCurrent_v2": (pointer,),
            "cuMemHostRegister_v2": (pointer, size, ctypes.c_uint),
            "cuMemHostUnregister": (pointer,),
            "cuGetErrorName": (number, pointer),
        }.items():
            getattr(driver, name).argtypes = arguments

    def _in_context(self, work: Callable[[], None]) -> None:
        with self._lock:
            if not self._context:
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        # Pushed and popped: the thread may have a context of somebody else's.
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            work()
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _unpin(self, address: int) -> None:
        try:
            self._in_context(lambda: self._call("cuMemHostUnregister", address))
        except CudaError as error:
            if error.code != DEINITIALIZED:
                raise

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            assert self._driver is not None
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'error').decode()} ({code})", code)

"""Copies of a device's tensors into host memory, beside training and behind what it had put into its stream.

A copy is put there in chunks of :data:`CHUNK_NBYTES`: between two of them the device serves other streams, so that
training's own copies wait for one chunk at most (0.3 ms at 50 GB/s).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from tiercheck.streams.device.gate import Gate
from tiercheck.streams.device.protocol import Device, Event, Stream

__all__ = ["CHUNK_NBYTES", "Reading", "cloned"]

CHUNK_NBYTES = 16 << 20


class Reading:
    """Reads tensors as they are where the current stream of the thread that makes this stands. Another thread calls
    :meth:`copy` and :meth:`arrive`. The tensors may be written to after :meth:`hold_back`."""

    def __init__(self, device: Device, gate: Gate | None = None) -> None:
        """``gate``: what copies wait for."""
        self._device = device
        self._gate = gate
        self._begun = device.current().record()
        self.stream: Stream = device.side("bases")
        self._waits = False
        self._ended: Event | None = None
        self._lock = threading.Lock()

    def reaches(self, memory: memoryview) -> bool:
        """Whether the device copies into this host memory by itself, since it is pinned."""
        return self._device.is_pinned(torch.frombuffer(memory, dtype=torch.uint8))

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Put the copy into the stream. Whoever calls this keeps both until :meth:`arrive` has returned. If ``into`` is
        not pinned, CUDA may make the calling thread wait."""
        self._come_behind()
        if not source.is_contiguous():
            self.stream.run(lambda: _copy(into, source))
            return
        size = max(1, CHUNK_NBYTES // source.element_size())
        target, flat = into.view(-1), source.detach().view(-1)
        for start in range(0, flat.numel(), size):
            self.stream.run(_copying(target[start : start + size], flat[start : start + size]))

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """As :meth:`copy`, of many tensors: small ones are put there together, which takes less of the host."""
        small: list[tuple[torch.Tensor, torch.Tensor]] = []
        nbytes = 0
        for into, source in pairs:
            if source.nbytes > CHUNK_NBYTES or not source.is_contiguous():
                self.copy(into, source)
                continue
            small.append((into, source))
            nbytes += source.nbytes
            if nbytes >= CHUNK_NBYTES:
                self._copy_together(small)
                small, nbytes = [], 0
        self._copy_together(small)

    def _copy_together(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if not pairs:
            return
        self._come_behind()
        self.stream.run(partial(_copy_each, pairs))

    def _come_behind(self) -> None:
        if not self._waits:
            self._waits = True
            if self._gate is not None:
                self._gate.wait()
            self.stream.wait(self._begun)

    def hold_back(self) -> None:
        """What the calling thread puts into its current stream from now on begins when everything was read. The host
        does not wait."""
        self._device.current().wait(self._end())

    def arrive(self) -> None:
        """Wait until everything was read, and lies in host memory."""
        self._end().wait()

    def _end(self) -> Event:
        with self._lock:
            if self._ended is None:
                self._ended = self.stream.record()
            return self._ended


def cloned(tensor: torch.Tensor, device: Device | None) -> torch.Tensor:
    """The tensor as it is now, where the current stream stands."""
    if device is None or not device.holds(tensor):
        return tensor.clone()
    clone = device.like(tensor)
    device.current().run(_copying(clone, tensor))
    return clone


def _copy_each(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for into, source in pairs:
        _copy(into, source.detach())


def _copying(into: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    return lambda: _copy(into, source)


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source, non_blocking=True)

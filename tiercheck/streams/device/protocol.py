"""What the data path asks of a device whose work runs later than the host puts it there.

Work in one stream runs in order. Between streams there is no order, unless one waits for an event of another. So each
reader of training's tensors says what it comes behind, and whoever writes to them next waits for the reader's event. No
call here but :meth:`Event.wait` makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

__all__ = ["COMPACTION_NBYTES", "Device", "Event", "Stream"]

COMPACTION_NBYTES = 16
"""What :meth:`Device.compact` says of a tensor: four words of 32 bits."""


class Event(Protocol):
    """A moment in a stream: everything that was put there before."""

    def wait(self) -> None:
        """Block the calling thread until the device has come there. Never called in the step."""
        ...


class Stream(Protocol):
    """Work that runs in the order in which it was put here."""

    def record(self) -> Event:
        """Everything put here so far."""
        ...

    def wait(self, event: Event) -> None:
        """What is put here from now on begins when the device has come to the event. The host does not wait."""
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Put work here: torch operations on the device's tensors, and ``non_blocking`` copies between them and pinned
        memory. It must not read a value on the host. ``work`` may be called later; its results are there when an event
        that is recorded after it has come."""
        ...


class Device(Protocol):
    """One GPU. Its methods may be called from any thread."""

    @property
    def name(self) -> str:
        """For messages, such as ``cuda:0``."""
        ...

    @property
    def nbytes(self) -> int:
        """All memory that it has."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is the device's."""
        ...

    def current(self) -> Stream:
        """The stream into which the calling thread's operations go. Errors: ``UnsupportedSetup`` while it captures a
        CUDA graph."""
        ...

    def side(self, purpose: str) -> Stream:
        """A stream of the lowest priority, the same for each ``purpose``. It waits for no other, unless it is told
        to."""
        ...

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Whether the device copies into this host memory by itself, while the host goes on."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """New page-locked host memory, as uint8. Errors: ``CapacityExceeded``."""
        ...

    def memory(self, nbytes: int, purpose: str) -> torch.Tensor:
        """New memory of the device, as uint8. Errors: ``CapacityExceeded``, whose message says that there is none
        ``purpose``: such as "to stage gradients in: lower gpu_staging_bytes"."""
        ...

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """New memory of the device for a tensor of this shape and dtype. What it holds is not defined."""
        ...

    def quantise(
        self,
        codec: str,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """The kernel of a block codec (``int8``, ``nf4``, ``onebit``); call it inside of :meth:`Stream.run`.

        ``values``: fp32, fp16 or bf16, 1-D, contiguous, on the device. ``codes`` and ``scales``: uint8, of the lengths
        that the codec plans, on the device. ``residual``: fp32; it is added to the values, and becomes what the codec
        does not give back of them. The bits are those of the codec on the host.
        """
        ...

    def find_scale(self, tensors: Sequence[torch.Tensor], found: torch.Tensor) -> None:
        """Write the scale of these gradients (fp32, 1-D, contiguous) and a zero to ``found``, uint8; call it inside of
        :meth:`Stream.run`. All are on the device. The scale, how many gradients there may be, and the length of
        ``found`` are those of :mod:`tiercheck.kernels.reference.scale_search`."""
        ...

    def narrow(self, values: torch.Tensor, found: torch.Tensor, out: torch.Tensor) -> None:
        """Write the bf16 numbers that the scale multiplied, and set the zero behind the scale to another number if not
        every value (fp32, 1-D, contiguous) is given back by them. ``out``: uint8, two for each. As
        :meth:`find_scale`."""
        ...

    def workspace(self, elements: int, kept: int) -> torch.Tensor:
        """New memory of the device that :meth:`compact` needs for so many elements or fewer, of which at most so many
        are kept. Errors: ``CapacityExceeded``."""
        ...

    def compact(
        self,
        values: torch.Tensor,
        ratio: float,
        seed: int,
        indices: torch.Tensor,
        halves: torch.Tensor,
        said: torch.Tensor,
        workspace: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """What the codec ``sparse`` stores; call it inside of :meth:`Stream.run`.

        ``values``, ``residual``: as of :meth:`quantise`. The others are uint8, on the device. ``indices`` (uint32) and
        ``halves`` (fp16) are as long as the codec's capacity for the values, and their beginnings are written to.
        ``said``: how many there are, the exponent (int32), how many elements are not finite, and an undefined word.
        The bits are those of the codec on the host with the same ``seed``.
        """
        ...

    def prepare(self, codec: str) -> None:
        """Compile what :meth:`quantise` calls; for the codec ``sparse``, what :meth:`compact` does; for ``exact``, what
        :meth:`find_scale` and :meth:`narrow` do. Errors: ``ConfigurationError`` saying what to install."""
        ...

"""A CUDA device, by torch. Nothing of CUDA is touched before a tensor on a GPU is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch

from tiercheck.errors import CapacityExceeded, UnsupportedSetup
from tiercheck.kernels import (
    SAMPLES,
    Kernel,
    compact_into,
    from_half,
    narrow_scaled_into,
    quantise_into,
    quantise_nf4_into,
    quantise_onebit_into,
    select_threshold,
    settle,
    to_half,
)
from tiercheck.streams.device.protocol import Device, Event, Stream
from tiercheck.types import bytes_text

__all__ = ["Cuda", "device_of", "finish_all", "refuse_capture"]

LOWEST = 0
"""CUDA's lowest priority, which training's own streams have, too, unless they are made otherwise."""

QUANTISE: Mapping[str, tuple[Kernel[..., Any], Any, Any]] = {
    "int8": (quantise_into, np.int8, np.float32),
    "nf4": (quantise_nf4_into, np.uint8, np.float32),
    "onebit": (quantise_onebit_into, np.uint8, np.uint16),
}
"""By codec, the kernel that encodes, and the dtypes of codes and scales."""

_, FIND_SCALE, NARROW_FOUND = narrow_scaled_into.cuda
COMPACTION = (*select_threshold.cuda, *compact_into.cuda, *to_half.cuda, *from_half.cuda, *settle.cuda)
WORD = 4
"""Bytes of an fp32 number, and of a sample."""


def device_of(tensors: Iterable[torch.Tensor]) -> Device | None:
    """The GPU on which some of these tensors are; ``None`` if all are on the host. Errors: ``UnsupportedSetup`` if they
    are on several GPUs."""
    found = {each.device.index for each in tensors if each.is_cuda}
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(f"cuda:{index}" for index in sorted(found))
        raise UnsupportedSetup(
            f"this rank's tensors are on several GPUs ({names}): supported is one GPU a rank, such as by data, tensor "
            "or pipeline parallelism with a process for each GPU"
        )
    return cuda(found.pop())


@cache
def cuda(index: int) -> Cuda:
    return Cuda(index)


def refuse_capture() -> None:
    """Called by the hook of a step. Errors: ``UnsupportedSetup`` if the current stream captures a CUDA graph."""
    cuda: Any = torch.cuda
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        raise UnsupportedSetup(
            "optimizer.step() is being captured into a CUDA graph: when the graph is replayed no hook is called, so "
            "that no version would be saved. Supported is a graph of the forward and backward pass alone (as "
            "torch.compile makes them), and optimizer.step() outside of it"
        )


def finish_all(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until what was put on the tensors' GPUs is done, in all streams. For the time outside of training's steps:
    other threads go on with these tensors in other streams."""
    for index in {each.device.index for each in tensors if each.is_cuda}:
        torch.cuda.synchronize(index)


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self) -> CudaEvent:
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits for it sleeps
        event.record(self._stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def run(self, work: Callable[[], None]) -> None:
        # A thread's first device is GPU 0. To go back to it from the stream alone would make a context there.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream), torch.no_grad():
            work()


class Cuda:
    """See :class:`~tiercheck.streams.device.protocol.Device`."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._sides: dict[str, CudaStream] = {}

    @property
    def name(self) -> str:
        return str(self._device)

    @property
    def nbytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def current(self) -> Stream:
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedSetup(f"{self.name} captures a CUDA graph, in which no version can be saved")
            return CudaStream(torch.cuda.current_stream())

    def side(self, purpose: str) -> Stream:
        if purpose not in self._sides:
            stream: Any = torch.cuda.Stream(self._device, priority=LOWEST)  # type: ignore[no-untyped-call]
            self._sides[purpose] = CudaStream(stream)
        return self._sides[purpose]

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return memory.is_pinned()

    def pinned(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # torch has no class of its own for it
            raise CapacityExceeded(
                f"{bytes_text(nbytes)} of host memory cannot be page-locked for the copies of {self.name}: {error}"
            ) from error

    def memory(self, nbytes: int, purpose: str) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise CapacityExceeded(f"{self.name} has no {bytes_text(nbytes)} {purpose}; {error}") from error

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=self._device)

    def quantise(
        self,
        codec: str,
        values: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        kernel, code, scale = QUANTISE[codec]
        is_bfloat16 = values.dtype is torch.bfloat16
        given = [values.view(torch.int16) if is_bfloat16 else values, codes, scales]
        with self._stream() as stream:
            held = [_cuda_module().borrow(each, stream) for each in given]
            numbers = held[0].view(np.uint16) if is_bfloat16 else held[0]
            kept = None if residual is None else _cuda_module().borrow(residual, stream)
            kernel.by("cuda")(numbers, held[1].view(code), held[2].view(scale), residual=kept, stream=stream)

    def find_scale(self, tensors: Sequence[torch.Tensor], found: torch.Tensor) -> None:
        with self._stream() as stream:
            held = [_cuda_module().borrow(each, stream) for each in (*tensors, found)]
            FIND_SCALE.load()(held[:-1], held[-1], stream=stream)

    def narrow(self, values: torch.Tensor, found: torch.Tensor, out: torch.Tensor) -> None:
        with self._stream() as stream:
            held = [_cuda_module().borrow(each, stream) for each in (values, found, out)]
            NARROW_FOUND.load()(held[0], held[1], held[2].view(np.uint16), stream=stream)

    def workspace(self, elements: int, kept: int) -> torch.Tensor:
        return self.memory(Workspace.of(elements, kept).nbytes, "to find the largest elements of gradients in")

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
        threshold_of, reached, largest, halved, widened, settled = (each.load() for each in COMPACTION)
        is_bfloat16 = values.dtype is torch.bfloat16
        size, kept = values.numel(), indices.numel() // WORD
        layout = Workspace.of(size, kept)
        scan, survivors, decoded, samples, threshold = (workspace[each] for each in layout.slices)
        with self._stream() as stream:

            def lent(tensor: torch.Tensor, dtype: Any = None) -> Any:
                array = _cuda_module().borrow(tensor, stream)
                return array if dtype is None else array.view(dtype)

            numbers = lent(values.view(torch.int16), np.uint16) if is_bfloat16 else lent(values)
            lost = None if residual is None else lent(residual)
            words = lent(said, np.uint32)
            count, exponent, nonfinite = words[:1], words[1:2].view(np.int32), words[2:3]
            least, sampled = lent(threshold, np.float32), lent(samples, np.uint32)
            positions, chosen, stored = lent(indices, np.uint32), lent(survivors, np.float32), lent(halves, np.float16)
            to: dict[str, Any] = {"stream": stream}
            threshold_of(numbers, ratio, seed, least, sampled, residual=lost, **to)
            reached(numbers, least, positions, chosen, count, lent(scan, np.uint64), residual=lost, **to)
            largest(numbers, positions, chosen, count, nonfinite, residual=lost, **to)
            halved(chosen, stored, exponent, sampled, count=count, **to)
            if residual is None:
                return
            widened(stored, exponent, lent(decoded, np.float32), count=count, **to)
            if values.dtype is not torch.float32:  # what is given back is rounded once more
                given_back = decoded.view(torch.float32)
                given_back.copy_(given_back.to(values.dtype))
            settled(lost, positions, chosen, lent(decoded, np.float32), count=count, **to)

    def prepare(self, codec: str) -> None:
        kernel: Kernel[..., Any] = QUANTISE[codec][0] if codec in QUANTISE else narrow_scaled_into
        forms = kernel.cuda[:1] if codec in QUANTISE else (FIND_SCALE, NARROW_FOUND)
        if codec == "sparse":
            kernel, forms = compact_into, COMPACTION
        kernel.by("cuda")  # which says what to install
        with torch.cuda.device(self._device):
            for source, entries in [each for form in forms for each in form.entries.items()]:
                for entry in entries:
                    _cuda_module().kernel_of(source, entry, self._device.index)

    def _stream(self) -> AbstractContextManager[Any]:
        """The current one."""
        pointer = torch.cuda.current_stream(self._device).cuda_stream
        return cast(AbstractContextManager[Any], _cuda_module().torch_stream(pointer, self._device.index))


@dataclass(frozen=True)
class Workspace:
    """What lies where in the memory that a compaction needs."""

    slices: tuple[slice, ...]
    """Its scan over tiles, survivors, what is given back of them, samples, and the threshold."""
    nbytes: int

    @classmethod
    def of(cls, elements: int, kept: int) -> Workspace:
        from tiercheck.kernels.cuda.compaction import compact_workspace  # which imports CuPy

        tiles, samples = 2 * compact_workspace(elements), max(1, min(elements, SAMPLES))
        edges = [0, *accumulate(WORD * each for each in (tiles, kept, kept, samples, 1))]
        return cls(tuple(slice(start, stop) for start, stop in pairwise(edges)), edges[-1])


def _cuda_module() -> Any:
    from tiercheck.kernels.cuda import module  # which imports CuPy

    return module

"""A few elements of each tensor on a device, taken where its stream stands, and compared on the host later.

To look at them at once would make the host wait for the device. So a look puts one gathering and one short copy into
streams; what it found is asked for when the record or base that depends on it is closed, beside training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiercheck.streams.device.protocol import Device, Event, Stream

__all__ = ["Comparison", "DeviceSamples", "Sample"]

SAMPLES = 4
"""Elements of each tensor, spread over it."""
PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By an element's bytes, what it is read as."""


class Sample:
    """What the elements were at one moment in a stream."""

    def __init__(
        self,
        names: Sequence[str],
        nbytes: Sequence[int],
        joined: list[torch.Tensor],
        host: torch.Tensor,
        arrived: Event,
    ) -> None:
        """``joined``: what is being copied to ``host``. It must not be freed before."""
        self.names = names
        self._nbytes = nbytes
        self._joined = joined
        self._host = host
        self._arrived = arrived

    def by_name(self) -> dict[str, bytes]:
        """The bytes of each tensor's elements. Waits for the device."""
        self._arrived.wait()
        self._joined.clear()
        held, at = self._host.numpy().tobytes(), 0
        found: dict[str, bytes] = {}
        for name, nbytes in zip(self.names, self._nbytes, strict=True):
            found[name] = held[at : at + nbytes]
            at += nbytes
        return found


class Comparison:
    """Two looks at the same tensors, between which nobody should have written to them. ``known``: to these somebody
    has."""

    def __init__(self, before: Sample, after: Sample, *, known: Sequence[str] = ()) -> None:
        self._before = before
        self._after = after
        self._known = frozenset(known)

    def differing(self) -> tuple[str, ...]:
        """The names of the others that were written to. Waits for the device."""
        before, after = self._before.by_name(), self._after.by_name()
        return tuple(name for name in before if before[name] != after.get(name) and name not in self._known)


class DeviceSamples:
    """Takes the elements of these tensors, while they lie where they lie now."""

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor], device: Device) -> None:
        self._device = device
        self._side = device.side("samples")
        self._groups: dict[torch.dtype, list[torch.Tensor]] = {}
        """Views of elements: those of one size are brought together by one call."""
        alike: dict[torch.dtype, list[tuple[str, int]]] = {}
        for name, tensor in zip(names, tensors, strict=True):
            dtype = tensor.dtype if tensor.is_complex() else PATTERNS[tensor.element_size()]
            views = elements_of(tensor)
            self._groups.setdefault(dtype, []).extend(view if view.is_complex() else view.view(dtype) for view in views)
            nbytes = tensor.element_size() * sum(view.numel() for view in views)
            alike.setdefault(dtype, []).append((name, nbytes))
        sizes = [each for group in alike.values() for each in group]
        self._names = [name for name, _ in sizes]
        self._nbytes = [nbytes for _, nbytes in sizes]

    def take(self, stream: Stream) -> Sample:
        """As of where ``stream`` is now."""
        host = self._device.pinned(sum(self._nbytes))
        joined: list[torch.Tensor] = []
        groups = list(self._groups.values())
        stream.run(lambda: joined.extend(map(together, groups)))  # allocated in the stream that writes them
        self._side.wait(stream.record())
        self._side.run(lambda: copy_to(host, joined))
        return Sample(self._names, self._nbytes, joined, host, self._side.record())


def together(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements' bytes, in new memory."""
    joined = torch.cat(list(views)) if views else torch.empty(0)
    return (torch.view_as_real(joined).view(-1) if joined.is_complex() else joined).view(torch.uint8)


def copy_to(host: torch.Tensor, joined: Sequence[torch.Tensor]) -> None:
    at = 0
    for each in joined:
        host[at : at + each.numel()].copy_(each, non_blocking=True)
        at += each.numel()


def elements_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views, 1-D, of elements that are spread over the tensor."""
    tensor, size = tensor.detach(), tensor.numel()
    if not tensor.is_contiguous():
        places = sorted({(2 * each + 1) * size // (2 * SAMPLES) for each in range(SAMPLES)})
        indices = (torch.unravel_index(torch.tensor(at), tensor.shape) for at in places)
        return [tensor[tuple(int(each) for each in index)].view(1) for index in indices]
    step = max(1, size // SAMPLES)
    first = step // 2
    return [tensor.view(-1)[first : first + SAMPLES * step : step][:SAMPLES]] if size else []

"""A few elements of each tensor on a device, taken where its stream stands, and compared on the host later.

To look at them at once would make the host wait for the device. So a look puts one gathering and one short copy into
streams; what it found is asked for when the record or base that depends on it is closed, beside training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tiercheck.streams.device.protocol import Device, Event, Stream

__all__ = ["Comparison", "DeviceSamples", "Sample"]

SAMPLES = 4
"""Elements of each tensor, spread over it."""


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
        self._names = names
        pieces = [list(pieces_of(each)) for each in tensors]
        self._nbytes = [sum(piece.numel() for piece in each) for each in pieces]
        self._pieces = [piece for each in pieces for piece in each]

    def take(self, stream: Stream) -> Sample:
        """As of where ``stream`` is now."""
        host = self._device.pinned(sum(self._nbytes))
        joined: list[torch.Tensor] = []
        pieces = self._pieces
        stream.run(lambda: joined.append(torch.cat(pieces)))  # allocated in the stream that writes it
        self._side.wait(stream.record())
        self._side.run(lambda: copy_to(host, joined))
        return Sample(self._names, self._nbytes, joined, host, self._side.record())


def copy_to(host: torch.Tensor, joined: Sequence[torch.Tensor]) -> None:
    host.copy_(joined[0], non_blocking=True)


def pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of single elements as bytes."""
    flat, size = tensor.detach(), tensor.numel()
    for at in sorted({(2 * each + 1) * size // (2 * SAMPLES) for each in range(SAMPLES)} if size else ()):
        if tensor.is_contiguous():
            element = flat.view(-1)[at : at + 1]
        else:
            element = flat[tuple(int(index) for index in torch.unravel_index(torch.tensor(at), flat.shape))].view(1)
        yield (torch.view_as_real(element).view(-1) if element.is_complex() else element).view(torch.uint8)

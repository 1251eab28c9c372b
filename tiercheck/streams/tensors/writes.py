"""Who has written to tensors: seen by torch's counters of in-place writes, and by a few elements of each tensor.

torch counts in-place writes to a tensor, but not those through ``.data``, nor those by code that knows its address. So
some elements of each tensor (:data:`SAMPLES`, spread over it) are compared as well, and fewer of each if there are very
many. A write that leaves all of them as they were, such as a clamp that few elements need, is not seen by a
:class:`Watch`: :func:`contents` tells all bits, and is asked if a base is due
(:class:`~tiercheck.streams.records.iteration.IterationStream`).

The samples of all tensors on the host are taken by one call: a look at a tensor costs less than a microsecond, whatever
its size. Those of tensors on a device are taken where the stream stands, and compared later
(:mod:`tiercheck.streams.device.samples`): :meth:`Watch.comparisons`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.format.container import checksum_of
from tiercheck.kernels.reference.gathering import bytes_at
from tiercheck.streams.device.protocol import Device, Stream
from tiercheck.streams.device.samples import Comparison, DeviceSamples, Sample
from tiercheck.streams.tensors.as_bytes import array_of, wrappers_of, writes_to

__all__ = ["SAMPLES", "Unmoved", "Watch", "contents"]

SAMPLES = {1: 16, 2: 4, 3: 3, 4: 2}
"""By the number of dimensions, the elements compared along each of them; of more dimensions the first of each."""
SAMPLES_OF_MANY = {1: 4, 2: 2}
"""The same if there are more than :data:`FEW` tensors. Each element is in a cache line of its own, so that 16 of each
small tensor would be most of what training has."""
FEW = 2048
UNITS = (8, 4, 2, 1)
"""The bytes of what samples are read as: as many as divide the elements, and where these lie."""


class Unmoved(dict[str, torch.Tensor]):
    """Tensors that nobody else holds. Whoever returns them returns another object once one of them lies elsewhere,
    so that a :class:`Watch` need not ask each of them where it lies."""


class Seen(NamedTuple):
    """How tensors were at a look."""

    names: list[str]
    addresses: list[int]
    writes: list[int]
    samples: Sequence[bytes]
    by_tensor: Callable[[Sequence[bytes]], Sequence[bytes]]
    """The samples of each."""
    on_device: Sample | None = None
    """Of the tensors on a device."""


def contents(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A checksum of the bits of each tensor that is on the host, as a shard has it. To bring the others here would take
    as long as a base."""
    return {
        name: checksum_of(array_of(tensor).reshape(-1).view(np.uint8).data)
        for name, tensor in tensors.items()
        if tensor.device.type == "cpu"
    }


class Watch:
    """Remembers how the tensors that ``tensors`` returns are, and tells which of them were written to since.

    ``device``: where some of them may be. Of these the samples are compared later: whoever calls :meth:`written` takes
    :meth:`comparisons`. Without it the host waits for them. ``earlier``: one of tensors of these names, shapes and
    dtypes, in this order. If they lie where those lay, no samples need be chosen.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        device: Device | None = None,
        *,
        earlier: Watch | None = None,
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._unmoved: Unmoved | None = None
        """What was returned at the last look, if that says that it lies where it lay."""
        self._names: list[str] = []
        self._live: list[torch.Tensor] = []
        self._addresses: list[int] | None = None
        """Of the tensors at the last look: while they stay, so do their samples."""
        self._wrappers: list[torch.Tensor | None] | None = None
        self._samples: HostSamples | WaitingSamples | MixedSamples = HostSamples([], SAMPLES)
        self._on_device: DeviceSamples | None = None
        self._comparisons: list[Comparison] = []
        if earlier is not None:
            self._live, self._addresses = earlier._live, earlier._addresses
            self._samples, self._on_device = earlier._samples, earlier._on_device
        self.mark()

    def mark(self) -> None:
        """From here on, what is written counts."""
        self._marked = self._seen = self._look()

    def mark_seen(self) -> None:
        """The same from the last look on, :meth:`mark` or :meth:`written`. It looks no more."""
        self._marked = self._seen

    def written(self) -> tuple[str, ...]:
        """The names of the tensors that were written to, replaced, added or taken away since the last mark."""
        self._seen = self._look()
        return self._differing(self._seen)

    def counted(self) -> tuple[str, ...]:
        """As :meth:`written`, but of tensors on a device without their samples. It is no look for
        :meth:`mark_seen`."""
        return self._differing(self._look(sampled=False)) if self._device is not None else self.written()

    def comparisons(self) -> list[Comparison]:
        """Those that :meth:`written` has left to be made, since this was called last."""
        left, self._comparisons = self._comparisons, []
        return left

    def compared_in(self, stream: Stream) -> Comparison | None:
        """Tensors on a device as of the last mark, with those where ``stream`` is now. ``None``: there are none."""
        before = self._marked.on_device
        if before is None or self._on_device is None:
            return None
        return Comparison(before, self._on_device.take(stream))

    def _differing(self, now: Seen) -> tuple[str, ...]:
        before = self._marked
        names: tuple[str, ...] = ()
        if before[:4] != now[:4]:
            was, is_now = by_name(before), by_name(now)
            names = tuple(name for name in {**was, **is_now} if was.get(name) != is_now.get(name))
        if before.on_device is not None and now.on_device is not None:
            self._comparisons.append(Comparison(before.on_device, now.on_device, known=names))
        return names

    def _look(self, *, sampled: bool = True) -> Seen:
        tensors = self._tensors()
        if tensors is not self._unmoved or self._addresses is None:
            self._names, self._live = list(tensors), list(tensors.values())
            self._unmoved = tensors if isinstance(tensors, Unmoved) else None
            self._wrappers = wrappers_of(self._live)
            addresses = [each.data_ptr() for each in self._live]
            if addresses != self._addresses:
                self._choose_samples()
                self._addresses = addresses
        samples = self._samples
        counted = writes_to(self._live, self._wrappers)
        seen = Seen(self._names, self._addresses, counted, samples.taken(), samples.by_tensor)
        if sampled and self._device is not None and self._on_device is not None:
            return seen._replace(on_device=self._on_device.take(self._device.current()))
        return seen

    def _choose_samples(self) -> None:
        samples = SAMPLES if len(self._live) <= FEW else SAMPLES_OF_MANY
        device = self._device
        self._on_device = None
        if device is not None and any(device.holds(each) for each in self._live):
            there = [index for index, each in enumerate(self._live) if device.holds(each)]
            tensors = [self._live[index] for index in there]
            self._on_device = DeviceSamples([self._names[index] for index in there], tensors, device)
            self._samples = MixedSamples([None if device.holds(each) else each for each in self._live], samples)
        elif all(tensor.device.type == "cpu" for tensor in self._live):
            self._samples = HostSamples(self._live, samples)
        else:
            self._samples = WaitingSamples([picked(each, samples) for each in self._live])


def by_name(seen: Seen) -> dict[str, object]:
    samples = seen.by_tensor(seen.samples)
    return dict(zip(seen.names, zip(seen.addresses, seen.writes, samples, strict=True), strict=True))


class HostSamples:
    """The picked elements of tensors in host memory, all taken at once: by their addresses, since a view of each tensor
    would cost more time than its bytes. Whoever has this keeps the tensors, and asks only while they lie where they
    lay. ``samples``: as :data:`SAMPLES`."""

    def __init__(self, tensors: Sequence[torch.Tensor], samples: Mapping[int, int]) -> None:
        found: dict[int, list[NDArray[np.int64]]] = {unit: [] for unit in UNITS}
        self._units: list[int] = []
        self._counts: list[int] = []
        for tensor in tensors:
            unit, addresses = addresses_of(tensor, samples.get(tensor.ndim, 1))
            found[unit].append(addresses)
            self._units.append(unit)
            self._counts.append(addresses.size * unit)
        self._groups = [(unit, *reachable(unit, np.concatenate(each))) for unit, each in found.items() if each]

    def taken(self) -> Sequence[bytes]:
        return [memory.take(places).tobytes() for _, memory, places in self._groups]

    def by_tensor(self, taken: Sequence[bytes]) -> Sequence[bytes]:
        left = {unit: each for (unit, *_), each in zip(self._groups, taken, strict=True)}
        found = []
        for unit, count in zip(self._units, self._counts, strict=True):
            found.append(left[unit][:count])
            left[unit] = left[unit][count:]
        return found


class MixedSamples:
    """The picked elements of those tensors that are not on a device."""

    def __init__(self, tensors: Sequence[torch.Tensor | None], samples: Mapping[int, int]) -> None:
        self._here = [index for index, each in enumerate(tensors) if each is not None]
        self._count = len(tensors)
        self._samples = HostSamples([each for each in tensors if each is not None], samples)

    def taken(self) -> Sequence[bytes]:
        return self._samples.taken()

    def by_tensor(self, taken: Sequence[bytes]) -> Sequence[bytes]:
        found = [b""] * self._count
        for index, each in zip(self._here, self._samples.by_tensor(taken), strict=True):
            found[index] = each
        return found


class WaitingSamples:
    """The picked elements of tensors of which some are on devices. The host waits for them."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views

    def taken(self) -> Sequence[bytes]:
        return device_samples(self._views)

    def by_tensor(self, taken: Sequence[bytes]) -> Sequence[bytes]:
        return taken


def addresses_of(tensor: torch.Tensor, most: int) -> tuple[int, NDArray[np.int64]]:
    """Where its picked elements lie, in units of so many bytes."""
    start = tensor.data_ptr()
    laid_out = offsets_of(tensor.shape, tensor.stride(), tensor.element_size(), most)
    unit, offsets = next(each for each in laid_out if not start % each[0])
    return unit, offsets + start


@lru_cache(maxsize=1024)
def offsets_of(
    shape: tuple[int, ...], strides: tuple[int, ...], nbytes: int, most: int
) -> tuple[tuple[int, NDArray[np.int64]], ...]:
    """Where the picked elements of such a tensor lie in it, by the units that can be read there. Most of a model's
    tensors are like others."""
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        step = step_of(size, most)
        offsets = np.add.outer(offsets, np.arange(step // 2, size, step) * stride * nbytes).reshape(-1)
    return tuple(
        (unit, np.add.outer(offsets, np.arange(0, nbytes, unit)).reshape(-1))
        for unit in UNITS
        if not nbytes % unit and not (offsets % unit).any()
    )


def reachable(unit: int, addresses: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All memory from the first address to the last as one array, and the places of the addresses in it. Nobody has all
    of that memory: only those places are read."""
    if not addresses.size:
        return np.empty(0, np.dtype(f"u{unit}")), addresses
    first = int(addresses.min())
    memory = bytes_at(first, int(addresses.max()) - first + unit).view(f"u{unit}")
    return memory, (addresses - first) // unit


def picked(tensor: torch.Tensor, samples: Mapping[int, int]) -> torch.Tensor:
    """A view of a few elements, spread over the tensor: so many along each dimension, by their number."""
    most = samples.get(tensor.ndim, 1)
    steps = [step_of(size, most) for size in tensor.shape]
    return tensor.detach()[tuple(slice(step // 2, None, step) for step in steps)]


def step_of(size: int, most: int) -> int:
    """From one picked element of a dimension to the next; the first is half as far from the edge."""
    return max(1, -(-size // most))


def device_samples(views: Sequence[torch.Tensor]) -> Sequence[bytes]:
    """What views of picked elements on devices hold now: one transfer for each device."""
    parts = [view.flatten().view(torch.uint8) for view in views]
    found: dict[int, bytes] = {}
    for device in {part.device for part in parts}:
        here = [index for index, part in enumerate(parts) if part.device == device]
        joined = torch.cat([parts[index] for index in here]).cpu().numpy().tobytes()
        start = 0
        for index in here:
            found[index] = joined[start : start + parts[index].numel()]
            start += parts[index].numel()
    return [found[index] for index in range(len(parts))]

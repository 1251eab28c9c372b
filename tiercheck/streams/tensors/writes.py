"""Who has written to tensors: seen by torch's counters of in-place writes, and by a few elements of each tensor.

torch counts in-place writes to a tensor, but not those through ``.data``, nor those by code that knows its address. So
some elements of each tensor (:data:`SAMPLES`, spread over it) are compared as well. A write that leaves all of them as
they were, such as a clamp that few elements need, is not seen by a :class:`Watch`: :func:`contents` tells all bits, and
is asked if a base is due (:class:`~tiercheck.streams.records.iteration.IterationStream`).

A look at a tensor on the host costs 1 to 3 microseconds, whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.format.container import checksum_of
from tiercheck.streams.tensors.as_bytes import STAND_INS, array_of, writes_to

__all__ = ["SAMPLES", "Watch", "contents"]

SAMPLES = {1: 16, 2: 4, 3: 3, 4: 2}
"""By the number of dimensions, the elements compared along each of them; of more dimensions the first of each."""


class Seen(NamedTuple):
    """How tensors were at a look."""

    names: list[str]
    addresses: list[int]
    writes: list[int]
    samples: Sequence[bytes]


def contents(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A checksum of the bits of each tensor that is on the host, as a shard has it. To bring the others here would take
    as long as a base."""
    return {
        name: checksum_of(array_of(tensor).reshape(-1).view(np.uint8).data)
        for name, tensor in tensors.items()
        if tensor.device.type == "cpu"
    }


class Watch:
    """Remembers how the tensors that ``tensors`` returns are, and tells which of them were written to since."""

    def __init__(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self._addresses: list[int] | None = None
        """Of the tensors at the last look: while they stay, so do the views of their samples."""
        self._on_host: list[NDArray[Any]] | None = None
        """Live views of the samples; ``None`` if any of them is not in host memory."""
        self._on_device: list[torch.Tensor] = []
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
        before, now = self._marked, self._seen
        if before == now:
            return ()
        was, is_now = by_name(before), by_name(now)
        return tuple(name for name in {**was, **is_now} if was.get(name) != is_now.get(name))

    def _look(self) -> Seen:
        tensors = self._tensors()
        live = list(tensors.values())
        addresses, counted = [each.data_ptr() for each in live], writes_to(live)
        if addresses != self._addresses:
            self._addresses = addresses
            self._keep_views(live)
        on_host = self._on_host
        samples = device_samples(self._on_device) if on_host is None else [view.tobytes() for view in on_host]
        return Seen(list(tensors), addresses, counted, samples)

    def _keep_views(self, tensors: Sequence[torch.Tensor]) -> None:
        if all(tensor.device.type == "cpu" for tensor in tensors):
            self._on_host, self._on_device = [host_view(tensor) for tensor in tensors], []
        else:
            self._on_host, self._on_device = None, [picked(tensor) for tensor in tensors]


def by_name(seen: Seen) -> dict[str, object]:
    names, *rest = seen
    return dict(zip(names, zip(*rest, strict=True), strict=True))


def picked(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a few elements, spread over the tensor."""
    most = SAMPLES.get(tensor.ndim, 1)
    steps = [max(1, -(-size // most)) for size in tensor.shape]
    return tensor.detach()[tuple(slice(step // 2, None, step) for step in steps)]


def host_view(tensor: torch.Tensor) -> NDArray[Any]:
    """The picked elements, live: in the dtype in which NumPy can hold their patterns."""
    view = picked(tensor)
    stand_in = STAND_INS.get(view.dtype)
    return view.numpy() if stand_in is None else view.view(stand_in).numpy()


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

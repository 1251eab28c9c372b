"""The codec ``sparse`` on a device: kernels choose the elements that are stored, and make them fp16.

How many there are is known on the device alone. So room is planned for the most, which is a hundredth of the gradient
or so. It lands in pinned host memory, and as many as there are go into the record when that is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiercheck.format.header import round_up
from tiercheck.streams.codecs import DTYPES, FLOATS, Codec, Part
from tiercheck.streams.codecs.feedback import Feedback
from tiercheck.streams.codecs.indices import CHUNK_ELEMENTS
from tiercheck.streams.codecs.sparse import Sparse, Survivors
from tiercheck.streams.device.protocol import COMPACTION_NBYTES, Device
from tiercheck.streams.gradients.routes import Landing, Route, route_of

__all__ = ["Compacted", "Compaction", "compacted", "fits", "sparse_codec"]

SAID = COMPACTION_NBYTES // 4
"""Words that a kernel says of a gradient."""


class Compaction:
    """How a device encodes by ``codec``. The memory that it needs for that is taken at once."""

    block = CHUNK_ELEMENTS
    """No gradient that the device encodes is parted."""

    def __init__(self, device: Device, codec: Sparse, sizes: Iterable[int], nbytes_max: int) -> None:
        """``sizes``: of the gradients, in elements. ``nbytes_max``: what one may take in the ring, or the host encodes
        it. Errors: ``CapacityExceeded``; ``ConfigurationError`` if the kernels cannot be compiled."""
        self.codec = codec
        self._device = device
        given = [size for size in sizes if size]
        fitting = [size for size in given if fits(codec, size, nbytes_max)]
        self._elements_most = max(fitting, default=0)
        self.nbytes_most = nbytes_of(codec, self._elements_most)
        """Of the ring, for the longest gradient."""
        self.nbytes = sum(nbytes_of(codec, size) for size in fitting)
        """The same for all of them."""
        self.takes_all = len(fitting) == len(given)
        self._workspace: torch.Tensor | None = None
        if self._elements_most:
            device.prepare(codec.name)
            self._workspace = device.workspace(self._elements_most, codec.capacity(self._elements_most))

    def takes(self, dtype: str, size: int) -> bool:
        """Whether the device encodes such a gradient."""
        return dtype in FLOATS and 0 < size <= self._elements_most

    def parts(self, elements: int) -> tuple[Part, ...]:
        """What the device makes of so many."""
        return parts_of(self.codec, elements)

    def encode(
        self, values: torch.Tensor, seed: int, places: Sequence[torch.Tensor], residual: torch.Tensor | None
    ) -> None:
        """Inside of :meth:`Stream.run`. ``places``: of the parts, as bytes."""
        assert self._workspace is not None
        indices, halves, said = places
        self._device.compact(values, self.codec.ratio, seed, indices, halves, said, self._workspace, residual)


@dataclass(frozen=True)
class Compacted:
    """Gradients that a device compacts: what becomes of each, and where it lands."""

    codec: Sparse
    names: tuple[str, ...]
    kinds: tuple[tuple[str, torch.Size], ...]
    """Of each, dtype and shape."""
    parts: tuple[tuple[tuple[Part, int], ...], ...]
    """Of each, and where they begin."""
    route: Route
    nbytes: int

    def landed(self, memory: torch.Tensor) -> dict[str, Survivors]:
        """What lies there, by name: views of it."""
        held = memory.numpy()
        found: dict[str, Survivors] = {}
        for name, (dtype, shape), parts in zip(self.names, self.kinds, self.parts, strict=True):
            indices, halves, said = (held[at : at + part.nbytes].view(DTYPES[part.dtype]) for part, at in parts)
            count, nonfinite = int(said[0]), int(said[2])
            exponent = int(said[1:2].view(np.int32)[0])
            stored = indices[:count], halves[:count]
            found[name] = Survivors(self.codec, dtype, tuple(shape), *stored, exponent, nonfinite)
        return found


def compacted(
    gradients: Sequence[tuple[str, str, torch.Tensor]], compaction: Compaction, chunk_nbytes: int
) -> Compacted | None:
    """What becomes of these: each with its name and dtype. ``None`` if there are none."""
    if not gradients:
        return None
    laid_out: list[tuple[tuple[Part, int], ...]] = []
    landings: list[Landing] = []
    end = 0
    for _, _, gradient in gradients:
        placed: list[tuple[Part, int]] = []
        for part in compaction.parts(gradient.numel()):
            placed.append((part, end))
            end += round_up(part.nbytes)
        laid_out.append(tuple(placed))
        starts = tuple(at for _, at in placed)
        landings.append(Landing(gradient.shape, gradient.dtype, starts, compaction))
    return Compacted(
        codec=compaction.codec,
        names=tuple(name for name, _, _ in gradients),
        kinds=tuple((dtype, gradient.shape) for _, dtype, gradient in gradients),
        parts=tuple(laid_out),
        route=route_of(landings, chunk_nbytes),
        nbytes=end,
    )


def sparse_codec(codec: Codec) -> Sparse | None:
    """The codec ``sparse`` that this is, or to which it adds feedback."""
    inner = codec.codec if isinstance(codec, Feedback) else codec
    return inner if isinstance(inner, Sparse) else None


def fits(codec: Sparse, size: int, nbytes_max: int) -> bool:
    """Whether a device can encode so many elements at once."""
    return 0 < size <= CHUNK_ELEMENTS and nbytes_of(codec, size) <= nbytes_max


def parts_of(codec: Sparse, elements: int) -> tuple[Part, ...]:
    kept = codec.capacity(elements)
    said = SAID if elements else 0
    return Part("indices", "U32", (kept,)), Part("values", "F16", (kept,)), Part("said", "U32", (said,))


def nbytes_of(codec: Sparse, elements: int) -> int:
    return sum(round_up(part.nbytes) for part in parts_of(codec, elements))

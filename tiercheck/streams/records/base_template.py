"""What one base after another has in common: where each tensor lies, what the header says of it, and which elements of
the live tensors are compared. It is worked out for the first base, and again if the tensors are others.

With its moments a model of many experts has a hundred thousand tensors. To work it out takes 60 microseconds a tensor,
for which training would stand still at each base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.format.checksums import BLOCKS
from tiercheck.format.container import Recurring, TensorSpec, header_room
from tiercheck.format.header import round_up
from tiercheck.format.host_state import pack
from tiercheck.format.index.message import INDEX
from tiercheck.format.references import REFERENCES
from tiercheck.streams.device.protocol import Device
from tiercheck.streams.gradients.pieces import Piece, as_they_are, blocks_of, pieces_of
from tiercheck.streams.tensors.as_bytes import dtype_name
from tiercheck.streams.tensors.writes import Watch

__all__ = ["HOST", "IDENTITY", "OPTIMIZER", "BaseLayout", "BaseTemplate"]

IDENTITY, OPTIMIZER, HOST = "identity", "optimizer", "host"
OBJECTS = (IDENTITY, OPTIMIZER, HOST, INDEX, BLOCKS, REFERENCES)
"""Of a base, at most."""


@dataclass(frozen=True)
class BaseLayout:
    """Where each tensor of a base lies."""

    specs: Mapping[str, TensorSpec]
    """In the order in which they lie."""
    ranges: Mapping[str, slice]
    """Of each, in the memory of all."""
    tensors: Recurring
    pieces: tuple[Piece, ...]
    """Of that, for hashing."""
    header_nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> BaseLayout:
        """Errors: ``UnsupportedSetup`` naming a tensor of a dtype that a shard cannot hold."""
        specs = {name: TensorSpec(name, dtype_name(each, name), tuple(each.shape)) for name, each in tensors.items()}
        recurring = Recurring(specs.values())
        pieces = tuple(pieces_of(recurring, as_they_are(specs.values())))
        ranges = dict(zip(specs, map(slice, recurring.starts, recurring.stops), strict=True))
        return cls(specs, ranges, recurring, pieces, header_room(specs.values(), OBJECTS))

    def nbytes_max(self, objects: Mapping[str, int]) -> int:
        """Bytes to reserve for the shard. ``objects``: the bytes of each, but for the ``blocks``."""
        digests = np.zeros(self.pieces[-1].digests.stop if self.pieces else 0, np.uint64)
        sizes = (*objects.values(), len(pack(self.blocks(digests))), self.tensors.nbytes)
        return self.header_nbytes + sum(map(round_up, sizes))

    def blocks(self, digests: NDArray[np.uint64]) -> dict[str, bytes]:
        """The object ``blocks``. ``digests``: of the pieces."""
        names = list(self.specs)
        return {names[place]: each for place, each in blocks_of(self.pieces, digests).items()}


class BaseTemplate:
    """Of one rank's bases. One thread asks it. It keeps the tensors of the last base until the next one."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._dtypes: list[torch.dtype] = []
        self._shapes: list[torch.Size] = []
        self._layout: BaseLayout | None = None
        self._watch: Watch | None = None

    def layout(self, tensors: Mapping[str, torch.Tensor]) -> BaseLayout:
        """Errors: as of :meth:`BaseLayout.of`."""
        # No list of the shapes: Python's garbage collector would look at each.
        there = zip(tensors.values(), self._dtypes, self._shapes, strict=False)
        same = list(tensors) == self._names and all(
            each.dtype is dtype and each.shape == shape for each, dtype, shape in there
        )
        if self._layout is None or not same:
            self._layout = self._watch = None
            self._layout = BaseLayout.of(tensors)
            self._names = list(tensors)
            self._dtypes = [each.dtype for each in tensors.values()]
            self._shapes = [each.shape for each in tensors.values()]
        return self._layout

    def watch(self, tensors: Callable[[], Mapping[str, torch.Tensor]], device: Device | None) -> Watch:
        """Of tensors of the base that :meth:`layout` was asked for last, and of its new constants."""
        self._watch = Watch(tensors, device, earlier=self._watch)
        return self._watch

"""Which block of a tensor a rank holds, from the mesh and the placements of a ``DTensor``. Numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HeldBlock", "block_of"]


@dataclass(frozen=True)
class HeldBlock:
    """A block of a tensor, as one rank holds it."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """By dimension, where the block begins. An empty block may begin at the end."""
    lengths: tuple[int, ...]
    replica: int = 0
    """Which of the equal copies of the block this is."""
    replicas: int = 1
    """How many ranks hold the block."""


def block_of(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], sharded: Sequence[int | None]
) -> HeldBlock:
    """The block of the rank at ``coordinate`` in a mesh of the size ``mesh``.

    ``sharded``: by dimension of the mesh, the dimension of the tensor that it divides, or ``None`` if all ranks along
    it hold the same. Dimensions of the mesh divide in their order, each as ``torch.chunk`` does: into equal blocks, of
    which the last is shorter, and those after it are empty.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    replica, replicas = 0, 1
    for size, at, dimension in zip(mesh, coordinate, sharded, strict=True):
        if dimension is None:
            replica, replicas = replica * size + at, replicas * size
            continue
        whole = lengths[dimension]
        block = -(-whole // size)
        begin = min(at * block, whole)
        offsets[dimension] += begin
        lengths[dimension] = min(block, whole - begin)
    return HeldBlock(tuple(shape), tuple(offsets), tuple(lengths), replica, replicas)

"""Gradients on a device that come as they came before: what becomes of each, where its parts lie in a record, and what
the record says of it. Worked out when they come for the first time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiercheck.format.container import Recurring, TensorSpec
from tiercheck.format.header import round_up
from tiercheck.kernels.reference.scale_search import SAMPLED_TENSORS_MAX
from tiercheck.streams.codecs import Codec, Encoding, Part
from tiercheck.streams.codecs.blocks import BlockCodec
from tiercheck.streams.codecs.exact import SCALE
from tiercheck.streams.gradients.compaction import Compacted
from tiercheck.streams.gradients.description import Description
from tiercheck.streams.gradients.pieces import Piece, as_they_are, pieces_of
from tiercheck.streams.gradients.routes import Landing, Route, route_of
from tiercheck.streams.records.record_names import STAMP_DIGITS, gradient_name
from tiercheck.streams.tensors.as_bytes import NAMES

__all__ = ["Arrangement", "Direct", "arrange"]


@dataclass(frozen=True)
class Direct:
    """A gradient whose parts land in the record."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    narrows: bool
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Arrangement:
    """``direct``: in the order in which they lie; the names ``by_host`` are those that go by way of host memory as they
    are."""

    direct: tuple[Direct, ...]
    by_host: tuple[str, ...]
    compacted: Compacted | None
    """Those of which the device chooses elements; ``None``: there are none."""
    route: Route
    """Of those that are direct. Their parts lie behind one another, each on a line of its own."""
    starts: list[int]
    """Of these parts, from the beginning of the first one on that has bytes."""
    nbytes: int
    """From the beginning of the first part to the end of the last one."""
    searched: tuple[int, ...]
    """In which of them the scale is sought; none, if none are narrowed."""
    tensors: Recurring | None
    """Their parts, if they can come first in a record, by themselves."""
    pieces: tuple[Piece, ...]
    """Of that, for hashing."""
    description: Description
    """If the scale is one, and each block codec has found finite numbers."""
    scaled: Description
    """If the scale is another one."""


def arrange(
    direct: Sequence[Direct],
    by_host: Sequence[str],
    compacted: Compacted | None,
    codec: Codec,
    blocks: BlockCodec | None,
    chunk_nbytes: int,
) -> Arrangement:
    """``codec``: of the stream; ``blocks``: by which the device encodes, if it does."""
    specs = [
        TensorSpec(gradient_name(0, each.name, part.suffix), part.dtype, part.shape)
        for each in direct
        for part in each.parts
    ]
    starts: list[int] = []
    end = 0
    for spec in specs:  # as slots of a shard are laid out
        starts.append(round_up(end) if spec.nbytes else end)
        end = starts[-1] + spec.nbytes
    left = iter(starts)
    landings = [
        Landing(each.shape, each.dtype, tuple(next(left) for _ in each.parts), blocks, each.narrows) for each in direct
    ]
    tensors = None if by_host or compacted else Recurring(specs, STAMP_DIGITS)
    text = (blocks or codec).text

    def encodings(pattern: int | None) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for each in direct:
            scalars = {"nonfinite": 0} if blocks else {}
            if each.narrows and pattern is not None:
                scalars = {SCALE: pattern}
            suffixes = tuple(part.suffix for part in each.parts)
            found[each.name] = Encoding(text, NAMES[each.dtype], tuple(each.shape), suffixes, scalars).to_object()
        return found

    stored = {each.name: each.parts[0].dtype for each in direct}
    narrowed = [index for index, each in enumerate(direct) if each.narrows]
    by_size = sorted(narrowed, key=lambda index: direct[index].shape.numel())
    return Arrangement(
        direct=tuple(direct),
        by_host=tuple(by_host),
        compacted=compacted,
        route=route_of(landings, chunk_nbytes),
        starts=starts,
        nbytes=end,
        searched=tuple(by_size[-SAMPLED_TENSORS_MAX:]),
        tensors=tensors,
        pieces=() if tensors is None else tuple(pieces_of(tensors, as_they_are(specs))),
        description=Description.of(stored, lambda _: encodings(None)),
        scaled=Description.of(stored, encodings),
    )

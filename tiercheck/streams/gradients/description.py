"""What a record says of its gradients, worked out and packed once for all records that say the same but for a scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.format import host_state
from tiercheck.streams.codecs.exact import SCALE
from tiercheck.streams.gradients.scales import Scale

__all__ = ["Description", "Gathered"]


@dataclass(frozen=True)
class Description:
    """``stored``: by name, the dtype of what is stored of a gradient."""

    stored: Mapping[str, str]
    encodings: Mapping[str, dict[str, Any]]
    """By name. Those that are scaled have some scale."""
    packed: NDArray[np.uint8]
    """The encodings, packed."""
    scales_at: NDArray[np.int64]
    """The bytes in ``packed`` that are a scale: four for each gradient that has one."""

    @classmethod
    def of(cls, stored: Mapping[str, str], encodings: Callable[[int], dict[str, dict[str, Any]]]) -> Description:
        """``encodings``: what is said if the scale has this pattern."""
        # Packed with two scales that have no byte in common: where they differ, each record's scale will be.
        one, other = (encodings(pattern) for pattern in (0x7F7F7F7F, 0x60606060))
        packed, differing = (np.frombuffer(host_state.pack(each, name="gradients"), np.uint8) for each in (one, other))
        return cls(stored, one, packed, np.flatnonzero(packed != differing).reshape(-1, 4))

    def encodings_with(self, scale: Scale | None) -> dict[str, dict[str, Any]]:
        if scale is None:
            return dict(self.encodings)
        scalars = {"scalars": {SCALE: scale.pattern}}
        return {
            name: {**each, **scalars} if SCALE in each["scalars"] else each for name, each in self.encodings.items()
        }


@dataclass(frozen=True)
class Gathered:
    """Gradients in a shard, which come first there."""

    checksums: NDArray[np.uint64]
    description: Description
    scale: Scale | None
    """Of those that are scaled."""

    @property
    def stored(self) -> Mapping[str, str]:
        return self.description.stored

    def packed(self) -> bytes:
        """How each is described in the record, packed."""
        packed = self.description.packed
        if self.scale is not None:
            packed = packed.copy()
            packed[self.description.scales_at] = np.frombuffer(self.scale.pattern.to_bytes(4, "big"), np.uint8)
        return packed.tobytes()

    def encodings(self) -> dict[str, dict[str, Any]]:
        """The same as plain values."""
        return self.description.encodings_with(self.scale)

"""The size of the demo's model, for those who must not import torch to know it."""

from __future__ import annotations

__all__ = ["VOCABULARY", "parameter_count"]

VOCABULARY = 256


def parameter_count(*, width: int, layers: int, sequence: int) -> int:
    """The parameters of the byte-level GPT of this shape, known before one is built."""
    block = 12 * width * width + 13 * width
    return layers * block + (2 * VOCABULARY + sequence + 2) * width

"""The states of the random generators that every training has: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tiercheck import objects

__all__ = ["differing", "random_state", "restore_random_state"]

WORDS = struct.Struct("<625I")
"""The 624 words of Python's Mersenne Twister, and its position in them. They are recorded with every iteration, while
training stands still: as numbers they took eight times as long to store."""
TWISTER_VERSION = 3
"""Of what ``random.getstate`` returns."""


def random_state() -> dict[str, Any]:
    """The states of all generators by kind, those of every visible GPU included."""
    version, words, gaussian = random.getstate()
    state: dict[str, Any] = {
        "python": (version, WORDS.pack(*words) if version == TWISTER_VERSION else words, gaussian),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_available():
        state["cuda"] = [each.numpy() for each in torch.cuda.get_rng_state_all()]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`random_state` returned, or some kinds of it."""
    if "python" in state:
        version, words, gaussian = state["python"]
        random.setstate((version, WORDS.unpack(words) if isinstance(words, bytes) else words, gaussian))
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "torch" in state:
        torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([torch.from_numpy(np.array(each)) for each in state["cuda"]])


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> frozenset[str]:
    """The kinds of which the two states differ, or only one has."""
    return frozenset(
        kind
        for kind in {*one, *other}
        if kind not in one or kind not in other or objects.pack(one[kind]) != objects.pack(other[kind])
    )

"""A small shard with a tensor of each kind, and two objects."""

from __future__ import annotations

import numpy as np

from tiercheck.format.container import ShardMetadata, TensorEntry, payload
from tiercheck.keys import Stream

METADATA = ShardMetadata(Stream.DIFFERENTIAL, 2, 41, 45, 1, 4, {"codec": "exact", "é": "naïve"})
KEY = str(METADATA.key)
TIER = "shm://test"
OBJECTS = {"host": {"rng": (1, 2), "lr": 0.1}, "hyperparameters": [{"lr": 1e-3}]}


def entry(name, array, dtype):
    return TensorEntry(name, dtype, array.shape, np.ascontiguousarray(array).data if array.size else b"")


def sample_entries():
    return [
        entry("weight", np.arange(6, dtype="<f4").reshape(2, 3), "F32"),
        TensorEntry("scale", "BF16", (), b"\x80\x3f"),
        entry("mask", np.array([True, False, True]), "BOOL"),
        TensorEntry("empty", "I64", (0, 3), b""),
        entry("phase", np.array([1 + 2j, 3j]), "C128"),
    ]


def sample_file():
    return b"".join(payload(METADATA, sample_entries(), OBJECTS))

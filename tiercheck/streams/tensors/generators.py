"""The states of the random generators that every training has: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tiercheck.format import host_state

__all__ = ["differing", "not_restored", "of_gpus_here", "random_state", "restore_random_state"]

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
        "torch": np.from_dlpack(torch.get_rng_state()),
    }
    if gpus_here():
        state["cuda"] = [each.numpy() for each in torch.cuda.get_rng_state_all()]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`random_state` returned, or some kinds of it. Of GPUs those that are visible here."""
    if "python" in state:
        version, words, gaussian = state["python"]
        random.setstate((version, WORDS.unpack(words) if isinstance(words, bytes) else words, gaussian))
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "torch" in state:
        torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
    for index, each in enumerate(state.get("cuda", [])[: gpus_here()]):
        torch.cuda.set_rng_state(torch.from_numpy(np.array(each)), index)


def gpus_here() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def of_gpus_here(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state, for as many GPUs as are visible here: those that it does not know stay as they are."""
    known, count = state.get("cuda"), gpus_here()
    if known is None:
        return dict(state)
    if not count:
        return {kind: each for kind, each in state.items() if kind != "cuda"}
    others = [torch.cuda.get_rng_state(index).numpy() for index in range(len(known), count)]
    return {**state, "cuda": [*known[:count], *others]}


def not_restored(state: Mapping[str, Any]) -> list[str]:
    """Why what is drawn on GPUs may not be what the process that saved the state would have drawn there, in words."""
    saved, count = len(state.get("cuda", [])), gpus_here()
    if saved == count:
        return []
    if saved > count:
        what = f"those of {_devices(count, saved)} are not restored"
    else:
        what = f"those of {_devices(saved, count)} begin as they are"
    return [
        f"the checkpoint holds the random generators of {saved} GPUs, and {count} are visible here: {what}, and "
        "another GPU may stand under a number. Where the job draws on GPUs, as dropout does, resume with as many "
        "visible (CUDA_VISIBLE_DEVICES) as before"
    ]


def _devices(first: int, stop: int) -> str:
    return f"cuda:{first}" if stop == first + 1 else f"cuda:{first} to cuda:{stop - 1}"


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> frozenset[str]:
    """The kinds of which the two states differ, or only one has."""
    return frozenset(
        kind
        for kind in {*one, *other}
        if kind not in one or kind not in other or host_state.pack(one[kind]) != host_state.pack(other[kind])
    )

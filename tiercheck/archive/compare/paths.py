"""Where two host states differ: by path, such as ``options.0.lr``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tiercheck.format.container import checksum_of
from tiercheck.types import shown

__all__ = ["PathDifference", "differing_paths"]

DEPTH_MAX = 64


@dataclass(frozen=True)
class PathDifference:
    """A value that is not the same in both, or is only in one of them (``None`` in the other)."""

    path: str
    before: str | None
    """The beginning of its text."""
    after: str | None


def differing_paths(before: object, after: object, path: str = "") -> Iterator[PathDifference]:
    """In the order of the paths' parts in ``before``. Mappings and lists are gone into."""
    ours, theirs = members(before), members(after)
    if ours is None or theirs is None or type(before) is not type(after) or path.count(".") >= DEPTH_MAX:
        if not same(before, after):
            yield PathDifference(path, *told(before, after))
        return
    for name in [*ours, *(each for each in theirs if each not in ours)]:
        inner = f"{path}.{name}" if path else str(name)
        if name not in theirs:
            yield PathDifference(inner, text(ours[name]), None)
        elif name not in ours:
            yield PathDifference(inner, None, text(theirs[name]))
        else:
            yield from differing_paths(ours[name], theirs[name], inner)


def members(value: object) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return None


def same(before: object, after: object) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return before.dtype == after.dtype and before.shape == after.shape and bytes_of(before) == bytes_of(after)
    if isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
        return before.dtype == after.dtype and before.shape == after.shape and before.tobytes() == after.tobytes()
    if isinstance(before, float) and isinstance(after, float) and before != before:
        return after != after  # NaN
    return type(before) is type(after) and bool(before == after)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def told(before: object, after: object) -> tuple[str, str]:
    """The texts of two values that differ. If these are one, as of arrays of one shape, digests tell them apart."""
    ours, theirs = text(before), text(after)
    return (ours, theirs) if ours != theirs else (f"{ours} {digest(before)}", f"{theirs} {digest(after)}")


def digest(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return checksum_of(bytes_of(value))
    return checksum_of(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())


def text(value: object) -> str:
    if isinstance(value, torch.Tensor | np.ndarray) and value.shape:
        return f"{value.dtype} {list(value.shape)}"
    return shown(value)

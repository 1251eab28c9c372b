"""A kernel on several threads: the array in contiguous pieces, one a thread.

Compiled kernels release the GIL and start no thread of their own, so that what a caller grants is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

__all__ = ["PIECE_MIN", "run", "split"]

Result = TypeVar("Result")

PIECE_MIN = 1 << 16
"""Fewer elements are not worth a thread."""


def split(size: int, threads: int, *, unit: int = 64) -> list[slice]:
    """``range(size)`` in at most ``threads`` contiguous pieces of about equal size; at least one, perhaps empty.

    Pieces start at multiples of ``unit``: blocks stay whole, and only the last piece has a vector tail, as the whole
    array has. Errors: ``ValueError`` for less than one thread.
    """
    if threads < 1:
        raise ValueError(f"a kernel runs on at least one thread, not {threads}")
    count = max(1, min(threads, size // max(PIECE_MIN, unit)))
    edges = [size * index // count // unit * unit for index in range(count)] + [size]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def run(function: Callable[[slice], Result], pieces: Sequence[slice]) -> list[Result]:
    """``function`` of each piece, in the pieces' order; the first on the calling thread, each other on its own."""
    if len(pieces) == 1:
        return [function(pieces[0])]
    with ThreadPoolExecutor(len(pieces) - 1, thread_name_prefix="tiercheck-kernel") as pool:
        others = [pool.submit(function, piece) for piece in pieces[1:]]
        return [function(pieces[0]), *(other.result() for other in others)]

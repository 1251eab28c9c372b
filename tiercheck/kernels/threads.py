"""Running a kernel on several threads: each thread works on one contiguous piece of the array.

Compiled kernels release the GIL and start no threads, so that no more threads run than the caller grants.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

from tiercheck.config import int_of

__all__ = ["PIECE_MIN", "processors_of_rank", "run", "split"]

Result = TypeVar("Result")

PIECE_MIN = 1 << 16
"""Elements of a piece, at least: for fewer, starting a thread costs more than it saves."""


def processors_of_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The processors of this process, if the ranks of its node share them alike, as the launcher tells. Errors:
    ``ConfigurationError``."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, int_of("LOCAL_WORLD_SIZE", 1, environment)))


def split(size: int, threads: int, *, unit: int = 64) -> list[slice]:
    """``range(size)`` in at most ``threads`` contiguous pieces of about equal size. There is at least one, perhaps
    empty.

    Pieces start at multiples of ``unit``. So blocks stay whole, and only the last piece ends in a partial vector, as
    the whole array does. Errors: ``ValueError`` for less than one thread.
    """
    if threads < 1:
        raise ValueError(f"a kernel runs on at least one thread, not {threads}")
    count = max(1, min(threads, size // max(PIECE_MIN, unit)))
    edges = [size * index // count // unit * unit for index in range(count)] + [size]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def run(function: Callable[[slice], Result], pieces: Sequence[slice]) -> list[Result]:
    """Call ``function`` with each piece, the first on the calling thread and each other on its own thread.

    Returns the results in the order of the pieces. Errors: those of ``function``; every thread has ended then.
    """
    if len(pieces) == 1:
        return [function(pieces[0])]
    with ThreadPoolExecutor(len(pieces) - 1, thread_name_prefix="tiercheck-kernel") as pool:
        others = [pool.submit(function, piece) for piece in pieces[1:]]
        return [function(pieces[0]), *(other.result() for other in others)]

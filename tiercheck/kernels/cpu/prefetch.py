"""Prefetching memory into the cache.

A replay reads a tile of the state once and then computes on it for a while. Without prefetching the next tile in the
meantime, the core would wait for memory, then the memory for the core.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import LINE, compiled, inlined

__all__ = ["BLOCK", "block_between_requests", "lines_wanted", "prefetch", "prefetch_lines", "prefetch_span"]

BLOCK = 512
"""The most elements of a step between two requests for memory."""

LINES_UNDER_WAY = 24
"""About the number of cache lines that a core can wait for at a time. If more are requested, the core stalls until some
have arrived: with 42 at a time instead of 21, ten steps took two thirds longer (AMD Zen 5)."""

SECOND_LEVEL, DATA, TO_READ = 2, 1, 0


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, address: Any) -> Any:
    """Fetch the cache line at ``address`` into the second-level cache. Any address is allowed."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        declared = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, word, word, word]), "llvm.prefetch.p0"
        )
        target = builder.inttoptr(arguments[0], pointer)
        builder.call(declared, [target, word(TO_READ), word(SECOND_LEVEL), word(DATA)])
        return context.get_dummy_value()

    return types.void(types.uintp), generate


@compiled
def prefetch_span(address: np.uintp, elements: int) -> None:
    """Fetch ``elements`` fp32 elements from ``address`` on, and the rest of the last line."""
    for each in range(elements // LINE + 2):
        prefetch(address + np.uintp(64 * each))


@inlined
def prefetch_lines(streams: NDArray[np.uintp], start: int, lines: int, first: int, last: int) -> None:
    """Fetch lines ``first..last-1`` of the next tile, in which each stream has ``lines`` lines from element ``start``
    on. Lines are counted stream by stream. ``streams`` are the addresses of the arrays' first elements."""
    last = min(last, lines * streams.size)
    while first < last:
        stream = first // lines
        line = first - stream * lines
        count = min(last - first, lines - line)
        base = streams[stream] + np.uintp(4 * start + 64 * line)
        for each in range(count):
            prefetch(base + np.uintp(64 * each))
        first += count


@compiled
def lines_wanted(streams: int, steps: int, block: int) -> int:
    """How many lines to fetch with every block of a step, so that all of the next tile is fetched by the end of this
    one.

    0 for a single step: that is one sequential pass, which the processor's own prefetcher recognises.
    """
    return -(-streams * (block // LINE) // steps) if steps > 1 else 0


@compiled
def block_between_requests(streams: int, steps: int) -> int:
    """The longest block, a power of two, with which :func:`lines_wanted` is no more than a core can wait for."""
    block = BLOCK
    while block > LINE and lines_wanted(streams, steps, block) > LINES_UNDER_WAY:
        block //= 2
    return block

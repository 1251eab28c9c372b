"""Asking for memory before it is needed.

A replay reads a tile of the state once and computes on it for a while; unless the next tile is on its way meanwhile,
memory and arithmetic wait for each other in turn.
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
"""Elements of a step between two requests for memory, at most."""

LINES_UNDER_WAY = 24
"""Lines that a core can wait for at once, about. Asked for more it stands still until some have come: with 42 at once,
instead of 21, ten steps took two thirds longer (AMD Zen 5)."""

SECOND_LEVEL, DATA, TO_READ = 2, 1, 0


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address in the second-level cache; harmless at any address."""

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
    """Ask for so many fp32 elements from an address on, and for the rest of the line behind them."""
    for each in range(elements // LINE + 2):
        prefetch(address + np.uintp(64 * each))


@inlined
def prefetch_lines(streams: NDArray[np.uintp], start: int, lines: int, first: int, last: int) -> None:
    """Ask for lines ``first..last-1`` of those from element ``start`` of all streams, ``lines`` of each, one stream
    after the other. The addresses of streams are those of their elements 0."""
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
    """Lines to ask for with every block of a step, so that all streams of the next tile are on their way by the end.

    None for a single step: that is one pass through memory, which the processor foresees by itself.
    """
    return -(-streams * (block // LINE) // steps) if steps > 1 else 0


@compiled
def block_between_requests(streams: int, steps: int) -> int:
    """The longest block, a power of two, with which no more lines are wanted at once than can be under way."""
    block = BLOCK
    while block > LINE and lines_wanted(streams, steps, block) > LINES_UNDER_WAY:
        block //= 2
    return block

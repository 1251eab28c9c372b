"""Which jobs ``test_relayout`` resumes from which: all, or a few that cover what matters.

A pair is ``3-zero1:fsdp`` on so many ranks: what three ranks saved under ZeRO-1 is resumed by those under FSDP2.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

__all__ = ["Pair", "covering", "every", "in_fp32"]

RANKS = (1, 2, 3, 4)
KINDS = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp")
IN_BF16 = ((2, "zero3-bf16", 1, "zero1-bf16"), (2, "zero1-bf16", 3, "zero3-bf16"))


class Pair(NamedTuple):
    saved_by: int
    kind: str
    resumed_by: int
    into: str

    @property
    def source(self) -> str:
        return f"{self.saved_by}-{self.kind}"

    @property
    def name(self) -> str:
        return f"{self.source}:{self.into}"

    @property
    def is_another_layout(self) -> bool:
        return (self.saved_by, self.kind) != (self.resumed_by, self.into)

    def covers(self) -> set[tuple[object, ...]]:
        """Any two of: the frameworks and the numbers of ranks before and after; and the kinds."""
        before, after = framework(self.kind), framework(self.into)
        return {
            ("frameworks", before, after),
            ("ranks", self.saved_by, self.resumed_by),
            ("saved", before, self.saved_by),
            ("resumed", after, self.resumed_by),
            ("across", before, self.resumed_by),
            ("back across", self.saved_by, after),
            ("saved kind", self.kind),
            ("resumed kind", self.into),
        }


def framework(kind: str) -> str:
    return "deepspeed" if kind.startswith("zero") else kind


def every() -> list[Pair]:
    """All pairs of two layouts: {1, 2, 3, 4} ranks x {DDP, ZeRO 0 to 3, FSDP2}, each with each; and some in bf16."""
    return [*in_fp32(), *(Pair(*each) for each in IN_BF16)]


def in_fp32() -> list[Pair]:
    return [pair for each in product(RANKS, KINDS, RANKS, KINDS) if (pair := Pair(*each)).is_another_layout]


def covering() -> list[Pair]:
    """A greedy choice: each two of the frameworks and the numbers of ranks before and after come together in one of
    them, and each kind is saved, and resumed into."""
    candidates = in_fp32()
    left = set().union(*(pair.covers() for pair in candidates))
    chosen: list[Pair] = []
    while left:
        chosen.append(max(candidates, key=lambda pair: len(pair.covers() & left)))
        left -= chosen[-1].covers()
    return [*chosen, *(Pair(*each) for each in IN_BF16)]

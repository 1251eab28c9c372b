"""Resuming under another layout: who looks for what, and which versions a new rank can come to.

The ranks that saved are the *old* ranks, those that resume the *new* ones. A new rank needs the pieces that it is to
hold, from whichever old ranks it can read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tiercheck.policy.recovery.lineage import Lineage

__all__ = ["dealt", "fetchers", "left_to", "reachable", "readers"]


def dealt(rank: int, ranks: int, old_ranks: int) -> range:
    """The old ranks that one of ``ranks`` looks for in the tiers that all of them share: each is one's, and all have
    equally many."""
    return range(rank, old_ranks, ranks)


def left_to(rank: int, ranks: int, lineage: Lineage) -> list[int]:
    """The departed ranks whose shards this one deletes when nothing needs them: the job had more ranks once, if only
    in a start that was cut short."""
    return [old for old in dealt(rank, ranks, lineage.ranks_most) if old >= ranks]


def readers(seen: Sequence[Collection[int]]) -> dict[int, int]:
    """By old rank, which new rank tells the others what it has. ``seen``: by new rank, the old ones that it found.
    Where it can, the one to which the old rank was dealt does."""
    chosen: dict[int, int] = {}
    for rank, found in enumerate(seen):
        for old in found:
            before = chosen.get(old)
            if before is None or (rank - old) % len(seen) < (before - old) % len(seen):
                chosen[old] = rank
    return chosen


def fetchers(reads: Sequence[tuple[str, Collection[int]]]) -> dict[tuple[str, int], int]:
    """By place and old rank, which new rank fetches what several of the place are to read of that old rank; each has
    about as many. ``reads``: by new rank, its place (empty: it shares none) and the old ranks that it is to read."""
    readers: dict[tuple[str, int], list[int]] = {}
    for rank, (place, olds) in enumerate(reads):
        for old in olds if place else ():
            readers.setdefault((place, old), []).append(rank)
    shared = sorted(each for each, ranks in readers.items() if len(ranks) > 1)
    loads: dict[int, int] = {}
    chosen: dict[tuple[str, int], int] = {}
    for each in shared:
        rank = min(readers[each], key=lambda rank: (loads.get(rank, 0), rank))
        loads[rank] = loads.get(rank, 0) + 1
        chosen[each] = rank
    return chosen


def reachable(ways: Mapping[int, Iterable[int]], suffice: Callable[[frozenset[int]], bool]) -> set[int]:
    """The versions that a new rank can come to. ``ways``: by old rank, the versions of it that can be read here;
    ``suffice``: whether these old ranks together have all that the new rank wants."""
    by_version: dict[int, set[int]] = {}
    for old, versions in ways.items():
        for version in versions:
            by_version.setdefault(version, set()).add(old)
    known: dict[frozenset[int], bool] = {}
    found: set[int] = set()
    for version, ranks in by_version.items():
        together = frozenset(ranks)
        if together not in known:
            known[together] = suffice(together)
        if known[together]:
            found.add(version)
    return found

"""Who stores what several ranks hold alike, as replicas do under DDP: one rank for each tensor, evenly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiercheck.types import Survives

__all__ = ["owners", "why_each"]


def owners(nbytes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """By tensor, the rank that stores it: the largest first, each to the rank that has least so far. The same on every
    rank. No rank gets more than its even share and the largest tensor together."""
    load = [0] * ranks
    found: dict[str, int] = {}
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        rank = load.index(min(load))
        load[rank] += nbytes[name]
        found[name] = rank
    return {name: found[name] for name in nbytes}


def why_each(survives: Survives, nodes: Sequence[object]) -> str:
    """Why every rank has to store all of a replica; empty if one rank for each tensor is as safe. ``survives``: the
    widest failure that the tiers outlive; ``nodes``: by rank, where it runs."""
    if survives >= Survives.NODE or len(set(nodes)) == 1:
        return ""
    return (
        "no tier outlives a node, and the ranks are on several: while every rank stores the whole, the nodes that are "
        "left can go on without one that is lost"
    )

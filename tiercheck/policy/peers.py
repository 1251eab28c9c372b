"""Whose memory keeps a rank's objects: its peer's.

The nodes of a failure domain form a ring, in the order of the lowest rank each has, and the peer of a node is the next
one on it. The user names the domains (racks, power feeds, switches). A ring inside a domain keeps the traffic on its
fast network, and what takes the whole domain is what remote storage is for. A domain with one node has no ring: it
joins one over all nodes.

Source: the TierCheck paper's node tier, one neighbour a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Place", "peer_of"]


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its node, and the failure domain that the node is in."""

    node: str
    domain: str = ""


def peer_of(rank: int, places: Sequence[Place]) -> int | None:
    """The rank whose node keeps the objects of ``rank``; ``None`` where all ranks are on one node.

    ``places``: of every rank, in rank order. On the peer node it is the rank with the same place among the ranks of
    its node, or the last one where there are fewer.
    """
    own = places[rank]
    ring = _nodes(places, own.domain)
    if len(ring) == 1:
        ring = _nodes(places, None)
    if len(ring) == 1:
        return None
    peer = ring[(ring.index(own.node) + 1) % len(ring)]
    local = _ranks_on(own.node, places).index(rank)
    candidates = _ranks_on(peer, places)
    return candidates[min(local, len(candidates) - 1)]


def _nodes(places: Sequence[Place], domain: str | None) -> list[str]:
    """The nodes of a domain (``None``: all), in the order of the lowest rank each has."""
    return list(dict.fromkeys(place.node for place in places if domain is None or place.domain == domain))


def _ranks_on(node: str, places: Sequence[Place]) -> list[int]:
    return [rank for rank, place in enumerate(places) if place.node == node]

"""Whose memory keeps a rank's objects: its peer's.

The nodes of a failure domain form a ring, in the order of the lowest rank that each node has. The peer of a node is the
next node of the ring. The user names the domains (racks, power feeds, switches). A ring inside a domain keeps the
traffic on the domain's fast network; remote storage survives a failure of the whole domain. If a domain has one node,
the node's peer is the next one of a ring over all nodes.

Source: the TierCheck paper's node tier, one neighbour a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RankLocation", "peer_of"]


@dataclass(frozen=True)
class RankLocation:
    """Where a rank runs: its node, and the failure domain that the node is in."""

    node: str
    domain: str = ""


def peer_of(rank: int, locations: Sequence[RankLocation]) -> int | None:
    """The rank whose node keeps the objects of ``rank``; ``None`` if all ranks are on one node.

    ``locations``: of every rank, in rank order. On the peer node it is the rank with the same position among the ranks
    of its node, or the last rank if that node has fewer.
    """
    own = locations[rank]
    ring = _nodes(locations, own.domain)
    if len(ring) == 1:
        ring = _nodes(locations, None)
    if len(ring) == 1:
        return None
    peer = ring[(ring.index(own.node) + 1) % len(ring)]
    local = _ranks_on(own.node, locations).index(rank)
    candidates = _ranks_on(peer, locations)
    return candidates[min(local, len(candidates) - 1)]


def _nodes(locations: Sequence[RankLocation], domain: str | None) -> list[str]:
    """The nodes of a domain (``None``: all), in the order of the lowest rank each has."""
    return list(dict.fromkeys(location.node for location in locations if domain is None or location.domain == domain))


def _ranks_on(node: str, locations: Sequence[RankLocation]) -> list[int]:
    return [rank for rank, location in enumerate(locations) if location.node == node]

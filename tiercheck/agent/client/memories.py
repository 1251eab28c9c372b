"""What a node's memory holds of a job, as the other nodes can read it from the node's agent."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from string import Formatter
from urllib.parse import quote

from tiercheck.agent.client.endpoint import RankEndpoint
from tiercheck.agent.server.neighbours import neighbours_namespaces
from tiercheck.hierarchy import Hierarchy
from tiercheck.policy.recovery.spans import spans_of
from tiercheck.recovery.finding.node_memory import NodeMemory
from tiercheck.tiers.shm.found import own_namespaces, ranks_in
from tiercheck.tiers.shm.namespaces import SHM, kept_under, namespace_path
from tiercheck.tiers.url import TierURL

__all__ = ["memories_of_node"]

FIRST_TIER = "shm"
PEER = "peer"


def memories_of_node(hierarchy: Hierarchy, agent: str, endpoint: RankEndpoint, deadline_s: float) -> list[NodeMemory]:
    """``hierarchy``: as the job was given it, with its fields; ``agent``: the name of the node's. Blocks for a look at
    the names in shared memory.

    A field of a URL stands for any number: on this machine, or in another order, it was another one.
    """
    first, *others = (tier.url for tier in hierarchy.tiers)
    peers = [url for url in others if scheme_of(url) == PEER]
    found: list[tuple[str, str, str, list[int]]] = []
    if scheme_of(first) == FIRST_TIER:
        for name, root in own_namespaces(pattern_of(first)):
            mount = {} if root.parent == SHM else {"mount": str(root.parent)}
            found.append((name, "&own=yes", TierURL(FIRST_TIER, name, mount).text, ranks_in(root)))
    # Of a job that has one node left, and so no neighbour, the other nodes' may be kept under the first tier's name.
    for name, root in kept_namespaces(agent, peers or [first]):
        found.append((name, "", "", ranks_in(root)))
    how = f"at={quote(endpoint.endpoint)}&deadline={deadline_s:g}"
    if endpoint.server_key:
        how += f"&server_key={quote(endpoint.server_key)}" + keys_of(peers)
    return [
        NodeMemory(
            name=f"memory of {endpoint.node}" if own else f"memory of {endpoint.node} for its neighbours",
            host=endpoint.host,
            url=f"{PEER}://{quote(name)}?{how}{own}",
            local=local,
            only_here=endpoint.only_here,
            ranks=spans_of(ranks),
        )
        for name, own, local, ranks in found
        if ranks
    ]


def kept_namespaces(agent: str, peers: Iterable[str]) -> list[tuple[str, Path]]:
    """What the agent keeps for neighbours under the names of these tiers: the name, and its directory."""
    found: list[tuple[str, Path]] = []
    patterns = list(map(pattern_of, peers))
    for namespace in neighbours_namespaces(agent):
        root = namespace_path(namespace)
        name = kept_under(root)
        if name is not None and any(re.fullmatch(pattern, name) for pattern in patterns):
            found.append((name, root))
    return found


def scheme_of(url: str) -> str:
    return url.partition("://")[0]


def pattern_of(url: str) -> str:
    """What matches the URL's location, whatever numbers its fields stand for."""
    location = url.partition("://")[2].partition("?")[0]
    parts = Formatter().parse(location)
    return "".join(re.escape(literal) + (r"\d+" if field is not None else "") for literal, field, _, _ in parts)


def keys_of(peers: Iterable[str]) -> str:
    """The option that says where a client's keys are, if a tier of the job says so."""
    options = (option for url in peers for option in url.partition("?")[2].split("&"))
    return next((f"&{option}" for option in options if option.startswith("keys=")), "")

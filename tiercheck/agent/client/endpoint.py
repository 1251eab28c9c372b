"""How ranks tell one another where their agents are, so that each finds its peer."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiercheck import schema
from tiercheck.errors import ConfigurationError
from tiercheck.hierarchy import Hierarchy
from tiercheck.policy.peers import RankLocation, peer_of

__all__ = ["RankEndpoint", "beside_neighbour", "peer_address"]

log = logging.getLogger(__name__)

BOOT = Path("/proc/sys/kernel/random/boot_id")
EVERY_INTERFACE = ("0.0.0.0", "::", "*")


@schema.ready
@dataclass(frozen=True)
class RankEndpoint:
    """One rank's node, and the peer server there."""

    node: str
    domain: str
    host: str
    """The machine, as :func:`this_machine` names it: a loopback address means nothing on another one."""
    endpoint: str
    """``HOST:PORT``, or the socket of an agent that serves its own machine alone: ``ipc:///PATH``."""
    server_key: str | None

    @classmethod
    def of(cls, node: str, endpoint: str, server_key: str | None, environment: Mapping[str, str]) -> RankEndpoint:
        """This process's own. ``environment`` may hold ``TIERCHECK_FAILURE_DOMAIN`` (without it all nodes are in one),
        and ``TIERCHECK_HOST``, the name others reach this machine by if its agent listens on all interfaces."""
        domain = environment.get("TIERCHECK_FAILURE_DOMAIN", "")
        listens, _, port = endpoint.rpartition(":")
        if listens.strip("[]") in EVERY_INTERFACE:
            endpoint = f"{environment.get('TIERCHECK_HOST') or socket.gethostname()}:{port}"
        return cls(node, domain, this_machine(), endpoint, server_key)

    @property
    def only_here(self) -> bool:
        """Whether nobody but its own machine can reach it."""
        if self.endpoint.startswith("ipc://"):
            return True
        host = self.endpoint.rpartition(":")[0].strip("[]")
        return host.startswith("127.") or host in ("::1", "localhost")


def this_machine() -> str:
    """Its name, and what tells it from others of that name, such as containers that all are ``localhost``: its boot."""
    try:
        boot = BOOT.read_text().strip()[:8]
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()} ({boot})"


def beside_neighbour(hierarchy: Hierarchy, rank: int, ranks: Sequence[RankEndpoint]) -> Hierarchy:
    """The hierarchy with the neighbour's address, or without a neighbour's memory if the job has one node alone: it may
    have lost the others, and have more again. Errors: as of :func:`peer_address`."""
    address = peer_address(rank, ranks)
    if address is not None:
        return hierarchy.with_peer(*address)
    if rank == 0:
        all_ranks = f"all {len(ranks)} ranks are" if len(ranks) > 1 else "the only rank is"
        log.warning(
            "%s on one node (%s): there is no neighbour, and peer:// is left out until the job starts on more nodes "
            "(TIERCHECK_NODE tells nodes apart that share a machine)",
            all_ranks,
            ranks[rank].node,
        )
    return hierarchy.without_peer()


def peer_address(rank: int, ranks: Sequence[RankEndpoint]) -> tuple[str, str | None] | None:
    """``HOST:PORT`` and public key of the peer server that keeps the objects of ``rank``; ``ranks`` in rank order.
    ``None`` if all ranks are on one node: there is no neighbour.

    Errors: ``ConfigurationError`` if two nodes have one agent, or nobody but its own machine can reach the peer.
    """
    own = ranks[rank]
    peer = peer_of(rank, [RankLocation(each.node, each.domain) for each in ranks])
    if peer is None:
        return None
    chosen = ranks[peer]
    if (chosen.host, chosen.endpoint) == (own.host, own.endpoint):
        raise ConfigurationError(
            f"ranks {rank} and {peer} are on two nodes, {own.node} and {chosen.node}, with one agent, {own.endpoint}: "
            "a copy there would be lost together with the original. Give each node an agent of its own: set "
            "TIERCHECK_AGENT_NODE to another name on each"
        )
    if chosen.only_here and chosen.host != own.host:
        raise ConfigurationError(
            f"the peer of rank {rank} is rank {peer} on {chosen.host}, whose agent listens on {chosen.endpoint}, which "
            f"{own.host} cannot reach. Without keys an agent serves its own machine only: make some with "
            "'tiercheck keys DIRECTORY', bring them to every node, and set TIERCHECK_KEYS=DIRECTORY there"
        )
    return chosen.endpoint, chosen.server_key

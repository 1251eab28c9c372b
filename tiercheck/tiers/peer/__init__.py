"""Peer memory: objects in a neighbour node's memory over ZeroMQ, and the server that keeps them there.

The protocol of either side is free of I/O (:mod:`.serving`, :mod:`.receiving`; :mod:`.calling`, :mod:`.putting`,
:mod:`.getting`), and runs in a thread with the sockets (:mod:`.server`; :mod:`.link`).
"""

from __future__ import annotations

from tiercheck.tiers.peer.driver import PeerDriver
from tiercheck.tiers.peer.keys import KEYS_VARIABLE, PeerKeys
from tiercheck.tiers.peer.server.limits import PeerLimits, PeerStatistics
from tiercheck.tiers.peer.server.server import PeerServer

__all__ = ["KEYS_VARIABLE", "PeerDriver", "PeerKeys", "PeerLimits", "PeerServer", "PeerStatistics"]

"""What a peer server allows, and what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tiercheck.errors import ConfigurationError

__all__ = [
    "CHUNK_BYTES",
    "CHUNK_BYTES_MAX",
    "CHUNK_BYTES_MIN",
    "CREDIT_BYTES",
    "ENCRYPTED_CHUNK_BYTES",
    "ENVELOPE_BYTES",
    "LOOPBACK_RECEIVE_BYTES",
    "LOOPBACK_SEND_BYTES",
    "PeerLimits",
    "PeerStatistics",
]

CHUNK_BYTES = 4 << 20
"""The size of a chunk unless somebody asks for another. Below it the cost of a message shows; far above it memory is
no longer found in the cache when it is checked and copied."""
ENCRYPTED_CHUNK_BYTES = 2 << 20
"""The same with keys. A chunk is encrypted before any of it leaves and decrypted once all of it is there, so that
smaller ones keep both ends at work."""
CHUNK_BYTES_MIN = 64 << 10
CHUNK_BYTES_MAX = 16 << 20
ENVELOPE_BYTES = 64
"""What encryption adds to a frame is less: ZeroMQ counts it when it looks whether a frame is too long."""
CREDIT_BYTES = 16 << 20
"""What a client has under way at once, unless somebody asks for another: enough for 100 Gbit/s over a round trip of a
millisecond. What was checksummed long before it is sent is no longer in the cache."""
LOOPBACK_SEND_BYTES = 256 << 10
"""Without keys: what the kernel may hold of a connection that is not received yet. There is no distance to fill, and
what is sent is received while it is in the cache. Elsewhere the kernel finds the size that fits: over a network there
is a distance, and with keys the next chunk has to arrive while one is decrypted."""

LOOPBACK_RECEIVE_BYTES = 1 << 20


@dataclass(frozen=True)
class PeerLimits:
    """Upper bounds of a :class:`~tiercheck.tiers.peer.PeerServer`. Bytes and seconds."""

    memory_bytes: int = 1 << 60
    """Objects and half-received objects of all namespaces together; more raises ``CapacityExceeded``."""
    in_flight_bytes: int = 256 << 20
    """What senders of several chunks may have under way at once, all together: the credit that the server has to
    give. Objects of one chunk come without asking for it; once as many bytes of them are being stored, nothing more is
    read from the network. Besides, each connection may have 16 MiB (or one message, if that is more) queued, and one
    half read: for the worst that ``connections`` clients can do together, count that for each of them, up to
    ``private_bytes``."""
    private_bytes: int = 1 << 30
    """What connections may make the process's own memory grow by, before those are ended that may be the cause: those
    of which no whole message came lately. A client at work goes on, and one that is idle comes back. Of local sockets
    the kernel counts nothing: any growth counts as theirs. Memory of tiers that can be mapped is shared, and does not
    count."""
    buffer_bytes: int = 1 << 30
    """Copies of objects on their way to or from drivers whose memory cannot be mapped; and, while it is read, a chunk
    for each of ``calls``. A client may hold as many of those on their way to it as are free beside it."""
    objects: int = 1 << 18
    """Of all namespaces together, however small; more raises ``CapacityExceeded``."""
    chunk_bytes: int = 8 << 20
    """The largest frame taken; a longer one ends its connection."""
    namespaces: int = 64
    """That are open at once; for another one an empty one is closed, or it raises ``CapacityExceeded``."""
    connections: int = 256
    transfers: int = 1024
    """Puts under way at once, and gets: another put is refused, another get ends the one that is silent longest."""
    calls: int = 128
    """Operations of the drivers at once; while there are that many nothing more is read from the network."""
    outcomes: int = 4096
    """Finished puts and deletes that are remembered for a client that has lost the answer."""
    idle_s: float = 60.0
    """A transfer whose client is silent for that long is dropped, and with it what it had reserved."""

    def __post_init__(self) -> None:
        counts = ("objects", "namespaces", "connections", "transfers", "calls", "outcomes")
        for name in ("memory_bytes", "buffer_bytes", "private_bytes", *counts):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"PeerLimits.{name} must be at least 1, not {getattr(self, name)}")
        if not CHUNK_BYTES_MIN <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise ConfigurationError(
                f"PeerLimits.chunk_bytes must be {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX} bytes, not {self.chunk_bytes}"
            )
        if self.in_flight_bytes < self.chunk_bytes:
            raise ConfigurationError("PeerLimits.in_flight_bytes must hold at least one chunk (chunk_bytes)")
        if self.idle_s <= 0:
            raise ConfigurationError(f"PeerLimits.idle_s must be more than 0, not {self.idle_s}")


@dataclass(frozen=True)
class PeerStatistics:
    """What a server has done since it started; a snapshot."""

    objects_put: int = 0
    bytes_put: int = 0
    objects_got: int = 0
    bytes_got: int = 0
    clients: int = 0
    """Connections that are open now."""
    bytes_in_flight: int = 0
    """Credit that senders hold now, and copies that wait to be sent."""
    transfers: int = 0
    """Puts and gets under way now."""
    dropped: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Frames that were counted and dropped, by reason."""

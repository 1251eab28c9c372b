"""Ports that an agent can have again: the system gives none of them away by itself."""

from __future__ import annotations

from pathlib import Path

from tiercheck.runtime.chance import CHANCE

__all__ = ["ports_to_keep"]

GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, HIGHEST = 10000, 65535
TRIES = 16


def ports_to_keep() -> list[int]:
    """Some ports to try, in a random order. 0, which is any port, comes last.

    Outside of the range that outgoing connections and port 0 are served from: a port from there may be somebody else's
    as soon as an agent has died.
    """
    try:
        first, last = map(int, GIVEN_AWAY.read_text().split())
    except (OSError, ValueError):
        first, last = 32768, 60999
    lasting = [*range(LOWEST, min(first, HIGHEST)), *range(max(last + 1, LOWEST), HIGHEST)]
    return [*CHANCE.sample(lasting, min(TRIES, len(lasting))), 0]

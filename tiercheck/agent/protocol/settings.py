"""What an agent is told when it starts."""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from tiercheck.agent.protocol.rundir import RunDirectory, default_node
from tiercheck.errors import ConfigurationError

__all__ = ["AgentSettings"]

PORT_MAX = 65535
LOOPBACK = "tcp://127.0.0.1:0"


class AgentSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How the agent of one node runs. Errors: ``ConfigurationError`` for a value that cannot be."""

    node: str = field(default_factory=default_node)
    """The agent's name on this machine. A trainer registers to one by name."""
    bind: str | None = None
    """Where the peer server listens: ``tcp://HOST:PORT`` (port 0: the port it had before, or any free one), for which
    it needs keys. ``None``: with keys the loopback address; without them a socket in the run directory, by which agents
    and trainers of this user, on this machine, reach it. Empty: no peer server, if no tier is a neighbour's memory."""
    keys: str | None = None
    """The directory of the peer server's CURVE keys, as ``tiercheck keys`` makes it."""
    memory_bytes: int | None = None
    """The most that peers' objects may hold here (``None``: what the shared memory has room for)."""
    http_port: int = 0
    """Of the status page and the metrics, on 127.0.0.1. 0: any free one."""
    detached: bool = False
    """Started by a trainer rather than by the platform: it ends by itself when nobody needs it any more."""
    linger_s: float = 600.0
    """How long nobody must have needed a detached agent before it ends. After that time, any agent also puts to rest
    the replication jobs whose trainer is gone and whose objects are all where they belong."""
    idle_s: float = 15.0
    """The same, for a detached agent that looks after nothing at all: no replication job, no trainer of this node that
    is attaching, and nothing of a neighbour's. That is so after a clean end. Its memory for neighbours goes then."""
    abandon_s: float = 86400.0
    """After so long without a word from a trainer, a detached agent no longer waits for a tier that takes nothing, such
    as the memory of a neighbour that never came back. What is left stays in shared memory, and the next agent of this
    node goes on with it."""
    drain_s: float = 60.0
    """How long a SIGTERM may take: everything captured goes to where it belongs before the agent ends."""
    fold_threads: int | None = None
    """Bases folded at a time. ``None``: one for each eight processors that folds may use, and at least one."""
    fold_cpus: str = ""
    """The processors that folds may use, such as ``0-3,8``. Empty: all that the agent may use."""
    fold_nice: int | None = None
    """The niceness of the process that folds, 0 to 19. ``None``: 10. It is no less than the agent's own."""

    def __post_init__(self) -> None:
        RunDirectory.of(self.node)
        if self.bind and not self.bind.startswith("tcp://"):
            raise ConfigurationError(f"the peer server binds to an address such as tcp://127.0.0.1:0, not {self.bind}")
        if self.bind and self.keys is None:
            raise ConfigurationError(
                f"the peer server needs keys to bind to {self.bind}, where any user of this machine could read and "
                "replace what it keeps: make some with 'tiercheck keys DIRECTORY' and give them (--keys, or "
                "TIERCHECK_KEYS); or leave the address out, and it listens in the run directory, to this user alone"
            )
        if self.memory_bytes is not None and self.memory_bytes < 0:
            raise ConfigurationError(f"memory_bytes must not be negative, not {self.memory_bytes}")
        if not 0 <= self.http_port <= PORT_MAX:
            raise ConfigurationError(f"http_port must be a port (0: any free one), not {self.http_port}")
        for name in ("linger_s", "idle_s", "abandon_s", "drain_s"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} must not be negative, not {getattr(self, name):g}")

    @property
    def peer_bind(self) -> str:
        """What :attr:`bind` comes to; empty for no peer server."""
        if self.bind is not None:
            return self.bind
        return LOOPBACK if self.keys is not None else f"ipc://{RunDirectory.of(self.node).peer_socket}"

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> AgentSettings:
        """Errors: ``ConfigurationError`` for anything but what :meth:`to_json` returns."""
        try:
            return msgspec.json.decode(text, type=cls)
        except ValueError as error:
            raise ConfigurationError(f"these are no settings of an agent: {error}") from None

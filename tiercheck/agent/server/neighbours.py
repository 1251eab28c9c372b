"""The peer server of this node: where the neighbours' ranks keep their objects, in this node's shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from tiercheck.agent.protocol.settings import AgentSettings
from tiercheck.agent.status.snapshot import PeerSnapshot
from tiercheck.errors import CapacityExceeded, NotFound, Transient, Unauthorized
from tiercheck.keys import ClaimKey, CommitKey, LineageKey, MarkerKey, ShardKey, parse
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.posix.files import map_os_errors
from tiercheck.tiers.shm.driver import NamespaceKind, ShmDriver
from tiercheck.tiers.shm.found import own_namespaces
from tiercheck.tiers.shm.namespaces import in_use, keep_under, kept_under, namespace_names, namespace_path, remove_one
from tiercheck.types import shown

__all__ = [
    "MakePeerServer",
    "PeerService",
    "holds_shards",
    "kept_for_neighbours",
    "make_peer_server",
    "namespace_opener",
    "neighbours_namespaces",
    "open_own",
    "peer_snapshot",
    "shm_name",
]

NAMESPACE_CHARACTERS_MAX = 64
HASHED = "x."
"""What begins a name that stands for another one, and no other name: else a client could ask for it."""
NAMESPACES_MAX = 64
"""That neighbours may make, over all lives of an agent."""
PRIVATE_BYTES_MAX = 512 << 20
"""What an agent's own memory may grow by: what it keeps is shared memory, and the server has little to buffer."""

OpenNamespace = Callable[[str], Awaitable[TierDriver]]


class PeerService(Protocol):
    """What the agent needs of a peer server; :class:`tiercheck.tiers.peer.PeerServer` is one."""

    @property
    def endpoint(self) -> str: ...

    @property
    def server_key(self) -> str | None: ...

    @property
    def statistics(self) -> Any: ...

    def check(self) -> None:
        """Errors: what has ended it, if anything has."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


MakePeerServer = Callable[[AgentSettings, OpenNamespace, str], PeerService]
"""From settings, what opens a namespace, and the address to bind to."""


def make_peer_server(settings: AgentSettings, open_namespace: OpenNamespace, bind: str) -> PeerService:
    """Errors: ``ConfigurationError`` for keys that cannot be used, or an address that needs keys."""
    from tiercheck.tiers.peer import PeerKeys, PeerLimits, PeerServer

    limits = PeerLimits(private_bytes=PRIVATE_BYTES_MAX)
    if settings.memory_bytes is not None:
        limits = dataclasses.replace(limits, memory_bytes=settings.memory_bytes)
    keys = PeerKeys.load(settings.keys) if settings.keys else None
    return PeerServer(open_namespace, bind=bind, keys=keys, limits=limits, may_name=may_name, open_own=open_own)


@contextlib.asynccontextmanager
async def open_own(name: str) -> AsyncIterator[TierDriver]:
    """The memory of a job of this user on this node, to be read: other nodes recover from it. No lock is taken on it,
    so that its job may remove it at any time.

    Errors: ``NotFound`` if there is none, or it is not known to be a job's.
    """
    found = await asyncio.to_thread(own_namespaces, re.escape(name))
    if not found:
        raise NotFound(f"there is no memory of a job {shown(name)} on this node")
    driver = ShmDriver(name, mount=found[0][1].parent, kind=NamespaceKind.OWN, make=False)
    await driver.open_to_read()
    try:
        yield driver
    finally:
        await driver.close()


def may_name(text: str) -> bool:
    """Whether neighbours may put, read or delete an object of that name: the shards of their ranks, and the records
    that go with them. A replication job tells an agent what to do, and no neighbour does."""
    return isinstance(parse(text), ShardKey | LineageKey | ClaimKey | MarkerKey | CommitKey)


def namespace_opener(node: str, *, namespaces_max: int = NAMESPACES_MAX) -> OpenNamespace:
    """Opens the namespaces that neighbours ask for, each a shared-memory namespace of the agent's own."""

    async def open_namespace(name: str) -> TierDriver:
        own = shm_name(node, name)
        await asyncio.to_thread(make_room, node, own, namespaces_max)
        driver = kept_for_neighbours(own)
        await driver.open()
        try:
            root = namespace_path(own)
            if (kept_under(root) or name) != name:
                # Of two agents, "a" and "a-b", either could be asked for what the other one keeps.
                raise Unauthorized(f"another agent of this machine keeps {own}; give one of them another name")
            with map_os_errors(driver.url):
                keep_under(root, name)
        except BaseException:
            await driver.close()
            raise
        return driver

    return open_namespace


def make_room(node: str, name: str, namespaces_max: int) -> None:
    """Remove namespaces that hold nothing until there is room for another one, unless ``name`` is there already.

    Errors: ``CapacityExceeded`` if as many hold something.
    """
    kept = neighbours_namespaces(node)
    if name in kept:
        return
    for each in list(kept):
        if len(kept) < namespaces_max:
            return
        if not holds_shards(each) and not in_use(namespace_path(each)):
            with contextlib.suppress(NotFound, Transient):  # it has gone by itself, or is used again
                remove_one(each)
                kept.remove(each)
    if len(kept) >= namespaces_max:
        raise CapacityExceeded(
            f"{len(kept)} namespaces are kept for neighbours, as many as there may be: remove those of jobs that are "
            f"over ({', '.join(kept[:3])}...)"
        )


def neighbours_namespaces(node: str) -> list[str]:
    """The names of the namespaces that the agent ``node`` keeps for neighbours."""
    names = [name for name in namespace_names() if name.startswith(f"peer-{node}-")]
    return [name for name in names if (told := kept_under(namespace_path(name))) and shm_name(node, told) == name]


def holds_shards(name: str) -> bool:
    """Whether a recovery could read anything there."""
    return next(namespace_path(name).glob("r*/g*/*/*.safetensors"), None) is not None


def kept_for_neighbours(name: str) -> TierDriver:
    """The driver of a shared-memory namespace that holds what neighbours have put."""
    return ShmDriver(name, kind=NamespaceKind.NEIGHBOURS)


def shm_name(node: str, name: str) -> str:
    """``peer-<node>-<name>``, where that fits; two names never share a namespace."""
    plain = f"peer-{node}-{name}"
    is_plain = all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    if is_plain and not name.startswith(HASHED) and len(plain) <= NAMESPACE_CHARACTERS_MAX:
        return plain
    # 40 characters of a node's name at most leave room for 16 digits, 64 bits.
    return f"peer-{node}-{HASHED}{hashlib.sha256(name.encode()).hexdigest()}"[:NAMESPACE_CHARACTERS_MAX]


def peer_snapshot(server: PeerService) -> PeerSnapshot:
    """Its counts, by the names its statistics give them."""
    counts: dict[str, int] = {}
    dropped: dict[str, int] = {}
    statistics = server.statistics
    for each in dataclasses.fields(statistics):
        value = getattr(statistics, each.name)
        if isinstance(value, Mapping):
            dropped = {str(reason): int(count) for reason, count in value.items()}
        else:
            counts[each.name] = int(value)
    return PeerSnapshot(server.endpoint, server.server_key is not None, counts, dropped)

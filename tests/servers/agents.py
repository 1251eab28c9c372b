"""Node agents under test: a run directory of their own, a rank's tiers, and what stands in for a peer server."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tiercheck.agent.protocol.settings import AgentSettings
from tiercheck.agent.server.neighbours import OpenNamespace
from tiercheck.errors import NotFound, Transient
from tiercheck.format import container
from tiercheck.format.container import ShardMetadata, TensorEntry
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import CommitKey, LineageKey, MarkerKey, ShardKey, parse
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.replication.objects.records import seal
from tiercheck.tiers.shm.namespaces import remove_namespace

__all__ = ["EAGER", "FakePeer", "Node", "eager_agents", "fake_peer", "node", "shard"]

EAGER = Path(__file__).parent / "eager"
"""On the path of a trainer, the agent that it starts does not stand back."""


TOKEN = "ab" * 8
"""Of every generation here."""


def shard(key: ShardKey, nbytes: int = 64, world_size: int = 8) -> list[bytes | bytearray | memoryview]:
    """A sound shard with one tensor, whose content tells its version."""
    metadata = ShardMetadata.of(key, world_size, TOKEN)
    content = bytes([key.last % 251]) * nbytes
    return list(container.payload(metadata, [TensorEntry(f"{key.first}/x", "U8", (nbytes,), content)]))


@dataclass
class Node:
    """One node with a durable store: what a trainer would make there."""

    folder: Path
    """Short enough for a socket's path."""
    name: str = field(default_factory=lambda: f"n-{secrets.token_hex(4)}")
    """Of its own: agents find each other's replication jobs by it, in memory that all tests share."""
    namespaces: list[str] = field(default_factory=list)

    @property
    def durable(self) -> Path:
        return self.folder / "durable"

    def shm(self, size: str = "64MiB") -> str:
        """The URL of a new first tier."""
        name = f"agent-{secrets.token_hex(6)}"
        self.namespaces.append(name)
        return f"shm://{name}?size={size}"

    def settings(self, **changes: object) -> AgentSettings:
        return AgentSettings(**{"node": self.name, "bind": "", "detached": True, **changes})  # type: ignore[arg-type]

    def job(
        self,
        first: str,
        *,
        rank: int = 0,
        generation: int = 1,
        durable: str | None = None,
        node: str | None = None,
        batch: int = 2,
        world_size: int = 1,
        codec: str = "",
    ) -> ReplicationJob:
        tiers = (
            JobTier("shm", first),
            JobTier("nvme", durable or f"nvme://{self.durable}?survives=rack", codec),
        )
        return ReplicationJob(tiers, node or self.name, rank, world_size, generation, batch)

    def open(self, job: ReplicationJob) -> OpenHierarchy:
        return job.hierarchy.open(rank=job.rank)

    def clear_memory(self) -> None:
        while self.namespaces:
            namespace, until = self.namespaces.pop(), time.monotonic() + 10
            while True:
                try:
                    remove_namespace(namespace)
                except NotFound:
                    pass
                except Transient:  # a process that was ended has not let go of it yet
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.02)
                    continue
                break

    def clear(self) -> None:
        self.clear_memory()
        shutil.rmtree(self.folder)


async def open_generation(
    hierarchy: OpenHierarchy, generation: int = 1, parent: int = 0, left_at: int = 0, kept: tuple[int, ...] = ()
) -> None:
    branch = Branch(generation, parent, left_at, 1, TOKEN, kept=kept)
    for tier in hierarchy.tiers:
        await tier.driver.put(str(LineageKey(generation)), [seal(LineageKey(generation), branch)])


async def capture(hierarchy: OpenHierarchy, *keys: ShardKey, nbytes: int = 64) -> None:
    for key in keys:
        await hierarchy.first.driver.put(str(key), shard(key, nbytes))


def base(version: int, rank: int = 0, generation: int = 1) -> ShardKey:
    return ShardKey.base(generation, version, rank)


def record(version: int, rank: int = 0, generation: int = 1) -> ShardKey:
    return ShardKey.differential(generation, version, version, rank)


async def held(hierarchy: OpenHierarchy, index: int = -1) -> list[str]:
    """What a mover moves, marks and commits; neither the lineage nor reports."""
    names = [info.key async for info in hierarchy.tiers[index].driver.list()]
    return [name for name in names if isinstance(parse(name), ShardKey | MarkerKey | CommitKey)]


@dataclass(frozen=True)
class FakeStatistics:
    objects_put: int = 0
    bytes_put: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: {"malformed": 0})


class FakePeer:
    """Stands in for a peer server where the test is about something else."""

    def __init__(self, bind: str) -> None:
        self.bind = bind
        self.statistics = FakeStatistics()
        self.server_key: str | None = None
        self.running = False

    @property
    def endpoint(self) -> str:
        host, _, port = self.bind.removeprefix("tcp://").rpartition(":")
        return f"{host}:{port if port != '0' else '7070'}"

    def check(self) -> None:
        """It never fails."""

    async def start(self) -> None:
        self.running = True

    async def close(self) -> None:
        self.running = False


def fake_peer(settings: AgentSettings, open_namespace: OpenNamespace, bind: str) -> FakePeer:
    return FakePeer(bind)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node whose agents meet their trainers in a directory of the test's own."""
    folder = Path(tempfile.mkdtemp(prefix="tc-"))
    monkeypatch.setenv("TIERCHECK_RUN_DIR", str(folder / "run"))
    made = Node(folder)
    yield made
    made.clear()


@pytest.fixture
def eager_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents that this process starts compete like anybody else: the other tests cannot starve them."""
    monkeypatch.syspath_prepend(EAGER)

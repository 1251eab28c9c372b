"""What other nodes' memory holds is read from there: by fewer ranks, past an agent that is away, and by nobody else."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.simulation.life import HostMover, ranks_in
from tests.training import life
from tests.unit.recovery.layouts.test_relayout import CONFIG, FAILED_AT, Part, joined, succeeded
from tests.unit.runtime.test_group import on_all_ranks
from tiercheck import schema
from tiercheck.agent.client.endpoint import RankEndpoint
from tiercheck.agent.client.session import AgentSession
from tiercheck.checkpointer import Checkpointer
from tiercheck.errors import RecoveryError
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.policy.recovery.spans import spans_of
from tiercheck.recovery.finding.node_memory import NodeMemory
from tiercheck.replication.job import ReplicationJob
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.runtime.runtime import Scheduler
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.wrappers.base import Call, WrappingDriver
from tiercheck.types import Capabilities, Survives


class Surviving(WrappingDriver):
    def __init__(self, inner: TierDriver, survives: Survives) -> None:
        super().__init__(inner)
        self._survives = survives

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, survives=self._survives)

    async def around(self, call: Call, work: Callable[[], Awaitable[Any]]) -> Any:
        return await work()


@dataclass
class Hosts:
    """Each has what its rank captures, and what it keeps for the rank before it. No store is shared."""

    name: str = field(default_factory=lambda: f"hosts-{uuid.uuid4().hex}")
    away: set[int] = field(default_factory=set)
    """Hosts whose agents tell of their memory, and serve none of it."""

    def place(self, what: str, host: int) -> str:
        return f"{self.name}-{what}-{host}"

    def tiers(self, rank: int, hosts: list[int]) -> Hierarchy:
        captured = self.place("captured", hosts[rank])
        kept = self.place("kept", hosts[(rank + 1) % len(hosts)])
        return Hierarchy.of(
            Tier(f"memory://{captured}", "memory", wrap=lambda driver: Surviving(driver, Survives.PROCESS)),
            Tier(f"memory://{kept}", "neighbour", wrap=lambda driver: Surviving(driver, Survives.NODE)),
        )

    def told(self, host: int) -> list[NodeMemory]:
        found = []
        for what in ("captured", "kept"):
            place = self.place(what, host)
            url = "peer://gone?at=127.0.0.1:1" if host in self.away else f"memory://{place}"
            local = f"memory://{place}" if what == "captured" else ""
            if ranks := ranks_in(place):
                found.append(NodeMemory(f"{what} on {host}", f"host-{host}", url, local, False, spans_of(ranks)))
        return found

    def lose(self, host: int) -> None:
        for what in ("captured", "kept"):
            MemoryDriver.forget(self.place(what, host))


@dataclass
class Session:
    """As :class:`tiercheck.agent.client.session.AgentSession`: the agent is a few tasks of the trainer."""

    hosts: Hosts
    host: int
    hierarchy: Hierarchy
    scheduler: Scheduler
    node: str = "agent"
    lacks_to_fold: str = ""
    opened: HostMover | None = None

    def endpoint(self, node: int) -> RankEndpoint:
        return RankEndpoint(f"host-{self.host}/0", "", f"host-{self.host}", "127.0.0.1:7", None)

    async def memories(self, hierarchy: Hierarchy, endpoint: RankEndpoint) -> list[NodeMemory]:
        return self.hosts.told(self.host)

    def mover(self, job: ReplicationJob, first: TierDriver) -> HostMover:
        self.opened = HostMover(self.hierarchy.open(), job)
        return self.opened

    async def register(self) -> None:
        assert self.opened is not None
        await self.scheduler.call(self.opened.open(), what="registering", deadline_s=10)

    async def withdraw(self) -> None:
        pass

    async def end(self) -> None:
        if self.opened is not None:
            await self.scheduler.call(self.opened.close(), what="leaving", deadline_s=10)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    for host in range(4):
        made.lose(host)


def run(monkeypatch: pytest.MonkeyPatch, hosts: Hosts, on: list[int], last: int) -> list[Any]:
    """A life on these hosts, a rank each, ended as by a crash. By rank: what it recovered, and by version its part."""

    async def of(placed: Hierarchy, rank: int, scheduler: Scheduler, *_: Any) -> Session:
        return Session(hosts, on[rank], placed, scheduler)

    monkeypatch.setattr(AgentSession, "of", of)

    def act(group: SimulatedGroup) -> Any:
        provider = Part(group)
        config = replace(CONFIG, mover="agent", bases="capture", deadline_s=12)
        checkpointer = Checkpointer(provider, hosts.tiers(group.rank, on), group=group, config=config)
        with life(checkpointer):
            held = provider.train_to(checkpointer, last)
        return checkpointer.recovery, held

    return on_all_ranks(len(on), act)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_fewer_ranks_read_what_the_memory_of_the_hosts_that_are_left_holds(
    monkeypatch: pytest.MonkeyPatch, hosts: Hosts, gone: int
) -> None:
    """A host is removed, and the others change places: what it had is at its neighbour."""
    saved = run(monkeypatch, hosts, [0, 1, 2], FAILED_AT)
    hosts.lose(gone)
    left = [host for host in (2, 1, 0) if host != gone]
    resumed = run(monkeypatch, hosts, left, FAILED_AT)
    assert joined(resumed, FAILED_AT) == joined(saved, FAILED_AT)
    assert {(recovery.version, str(recovery.fidelity)) for recovery, _ in resumed} == {(FAILED_AT, "exact")}
    read = {tier for recovery, _ in resumed for _, tier in recovery.sources}
    assert read & {f"{what} on {host}" for what in ("captured", "kept") for host in left}
    assert read <= {row.tier for recovery, _ in resumed for row in recovery.matrix}


def test_an_agent_that_is_away_costs_its_copies_and_is_named(
    monkeypatch: pytest.MonkeyPatch, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    saved = run(monkeypatch, hosts, [0, 1, 2], FAILED_AT)
    hosts.away = {0}
    resumed = run(monkeypatch, hosts, [1, 2, 0], FAILED_AT)  # rank 0's are on host 0, and kept on host 1
    assert joined(resumed, FAILED_AT) == joined(saved, FAILED_AT)
    assert any("captured on 0 is done without, since it does not answer" in each for each in caplog.messages)
    hosts.away = {0, 1, 2}
    for outcome in run(monkeypatch, hosts, [2, 0, 1], FAILED_AT):
        assert isinstance(outcome, RecoveryError)
        assert "start the ranks on the nodes where they were" in str(outcome)
    hosts.away = set()
    assert joined(run(monkeypatch, hosts, [2, 0, 1], FAILED_AT), FAILED_AT) == joined(saved, FAILED_AT)


def test_what_a_node_tells_is_small() -> None:
    """Less than 1 KB, of a node with eight ranks, and nothing if another rank of the node tells it."""
    ranks = spans_of(range(8_000, 8_008)), spans_of(range(7_992, 8_000))
    url = f"peer://run-7?at=gpu0123.cluster.example.org%3A61234&deadline=30&server_key={'ab' * 32}&own=yes"
    host = "gpu0123.cluster.example.org"
    told = [NodeMemory(f"memory of {host}/1000", host, url, "shm://run-7", False, each) for each in ranks]
    assert len(schema.pack(told)) < 1000
    assert len(schema.pack(())) == 1


def test_lineage_decides_and_not_the_newest_number(monkeypatch: pytest.MonkeyPatch, hosts: Hosts) -> None:
    """A host that was away for a generation comes back with what another future had captured."""
    run(monkeypatch, hosts, [0, 1, 2], 9)
    stale = {
        place: dict(MemoryDriver(place).store.objects)
        for what in ("captured", "kept")
        for place in [hosts.place(what, 2)]
    }
    for host in range(3):
        for name in (hosts.place("captured", host), hosts.place("kept", host)):
            store = MemoryDriver(name).store.objects
            for key in [key for key in store if "-000000000009" in key or "-000000000008" in key or "08.safe" in key]:
                del store[key]
    second = run(monkeypatch, hosts, [0, 1, 2], 11)
    left_at = succeeded(second)[0][0].version
    assert left_at < 9
    for place, objects in stale.items():
        store = MemoryDriver(place).store.objects
        for key, content in objects.items():
            store.setdefault(key, content)
    third = run(monkeypatch, hosts, [1, 2, 0], 11)
    assert {recovery.version for recovery, _ in succeeded(third)} == {11}
    assert {recovery.point.generation for recovery, _ in third} == {2}
    assert joined(third, 11) == joined(second, 11)

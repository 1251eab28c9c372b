"""Whole lives of a job in one event loop: its ranks open, record, are killed, recover and go on, in virtual time.

The whole core runs (opening, recovery, recording, the mover) over tiers in memory. Simulated is only what it is given:
the loop, the group, the process locks, the tokens, and how long each call to a tier takes. The seed decides all of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tests.simulation.number_state import NumberFolding, NumberState
from tiercheck.agent.client.endpoint import RankEndpoint
from tiercheck.agent.client.node_agent import NodeAgent
from tiercheck.agent.jobs.opening import lineage_of
from tiercheck.config import CheckpointConfig
from tiercheck.errors import Closed, JobConflict, RanksLate
from tiercheck.hierarchy import Hierarchy, OpenHierarchy, Tier
from tiercheck.keys import ShardKey, Stream, parse
from tiercheck.opening.job import OpenedJob
from tiercheck.opening.startup import open_job
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.policy.recovery.spans import spans_of
from tiercheck.recovery.finding.node_memory import NodeMemory
from tiercheck.replication.fold_executor import LocalFoldExecutor
from tiercheck.replication.handle import MoverHandle, MoverStatus
from tiercheck.replication.job import ReplicationJob
from tiercheck.replication.mover import Mover
from tiercheck.runtime.runtime import Runtime, TaskScheduler
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver
from tiercheck.types import Capabilities, Survives

__all__ = ["Cluster", "Process"]

T = TypeVar("T")

CONFIG = CheckpointConfig(base_every=7, batch=2, deadline_s=30.0, mover="trainer")
CALL_S_MAX = 0.004
COPY_S_MAX = 0.05
"""How long the copy of a base takes to begin."""
ITERATION_S = 0.02
DYING_S = 0.05
"""How far apart the ranks of a job are killed."""


class Room:
    """Where the ranks of one start of the job leave their messages, a round a collective."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.rounds: dict[int, dict[int, bytes]] = {}
        self.full: dict[int, asyncio.Event] = {}


class LoopGroup:
    """Ranks that are tasks of one loop: see :class:`tiercheck.runtime.group.AsyncGroup`."""

    def __init__(self, rank: int, room: Room) -> None:
        self.rank, self.world_size = rank, room.world
        self._room = room
        self._round = 0

    async def all_gather(self, message: bytes, *, what: str, deadline_s: float) -> list[bytes]:
        self._round += 1
        here = self._room.rounds.setdefault(self._round, {})
        full = self._room.full.setdefault(self._round, asyncio.Event())
        here[self.rank] = message
        if len(here) == self.world_size:
            full.set()
        try:
            async with asyncio.timeout(deadline_s):
                await full.wait()
        except TimeoutError:
            late = sorted(set(range(self.world_size)) - here.keys())
            raise RanksLate(f"{what}: rank {self.rank} waited {deadline_s:g} s for {late}", late=late) from None
        return [here[each] for each in range(self.world_size)]

    def close(self) -> None:
        pass


class ProcessDriver(WrappingDriver):
    """A process's way to a tier: each call takes a while, and none has an effect once the process is dead."""

    def __init__(self, inner: TierDriver, process: Process, survives: Survives) -> None:
        super().__init__(inner)
        self._process = process
        self._capabilities = replace(inner.capabilities, survives=survives)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        process = self._process
        if call.operation not in (Operation.CLOSE, Operation.LIST):
            await asyncio.sleep(process.cluster.random.random() * CALL_S_MAX)
        strikes = process.cluster.strikes(call)
        if strikes == "before":
            process.dead = True
        if process.dead and call.operation is not Operation.CLOSE:  # what a process holds goes with it
            raise Closed("the process was killed", tier=self.url)
        result = await work()
        if strikes == "after":
            process.dead = True
            raise Closed("the process was killed before it knew", tier=self.url)
        return result


class HostAgent:
    """The agent of a host, as one rank knows it. Its mover is a process of the host's, too, and dies with the rank."""

    lacks_to_fold = ""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._mover: HostMover | None = None
        self.node = process.cluster.label(process.rank)

    def endpoint(self, node: int) -> RankEndpoint:
        return RankEndpoint(self.node, "", self.node, f"{self.node}:7", None)

    async def memories(self, hierarchy: Hierarchy, endpoint: RankEndpoint) -> list[NodeMemory]:
        cluster, found = self._process.cluster, []
        cluster.asked.append(self._process.rank)
        captured, kept = cluster.memory(self._process.rank), cluster.kept(self._process.rank)
        for place, name, local in ((captured, "memory", f"memory://{captured}"), (kept, "kept", "")):
            if ranks := ranks_in(place):
                spans = spans_of(ranks)
                found.append(NodeMemory(f"{name} of {self.node}", self.node, f"memory://{place}", local, False, spans))
        return found

    def mover(self, job: ReplicationJob, first: TierDriver) -> MoverHandle:
        self._mover = HostMover(self._process.hierarchy().open(), job)
        return self._mover

    async def register(self) -> None:
        assert self._mover is not None
        await self._mover.open()

    async def withdraw(self) -> None:
        pass

    async def end(self) -> None:
        if self._mover is not None:
            await self._mover.close()


class HostMover:
    """A mover with tiers of its own, which it opens when it is registered."""

    def __init__(self, tiers: OpenHierarchy, job: ReplicationJob) -> None:
        self._tiers = tiers
        self._job = job
        self._mover: Mover | None = None
        self._mark: int | None = None

    async def open(self) -> None:
        await self._tiers.opened(None)
        job, policies = self._job, self._job.policies()
        self._mover = Mover(
            self._tiers,
            rank=job.rank,
            world_size=job.world_size,
            generation=job.generation,
            placement=policies.placement,
            retention=policies.retention,
            lineage=await lineage_of(self._tiers, job.generation),
            mark=self._mark,
            folds=LocalFoldExecutor(NumberFolding(), self._tiers.first) if job.folds != "no" else None,
        )

    async def close(self) -> None:
        await self._tiers.__aexit__(None, None, None)

    @property
    def status(self) -> MoverStatus:
        return self._mover.status if self._mover else MoverStatus()

    @property
    def conflict(self) -> JobConflict | None:
        return self._mover.conflict if self._mover else None

    def nudge(self, *, hurry_s: float = 0.0) -> None:
        if self._mover is not None:
            self._mover.nudge(hurry_s=hurry_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)


def ranks_in(place: str, *, but: Stream | None = None) -> set[int]:
    """The ranks that have shards in that memory, of any stream ``but`` one."""
    keys = map(parse, MemoryDriver(place).store.objects)
    return {key.rank for key in keys if isinstance(key, ShardKey) and key.stream is not but}


class Process:
    """One rank, from one start of the job to its end."""

    def __init__(self, cluster: Cluster, rank: int, group: LoopGroup, training: LoopGroup) -> None:
        self.cluster, self.rank = cluster, rank
        self.dead = False
        self.state = cluster.state_of(rank)
        self.job: OpenedJob | None = None
        self.completed = -1
        """The newest version that was promised to be in the first tier."""
        self._group, self._training = group, training
        self._bases = 0
        self._scheduler = TaskScheduler(self._copy_begins)
        self._locked: list[tuple[str, int]] = []

    async def live(self, last: int) -> None:
        """Train up to version ``last``, and close."""
        job = self.job = await open_job(
            self.state,
            self.hierarchy(),
            group=self._group,
            runtime=Runtime(self._scheduler, {}, self._token, self._lock),
            find_agent=self._agent,
            config=self.cluster.config,
            caveats=tuple,
            on_lost_stage=self.cluster.on_lost_stage,
        )
        self.completed = job.recorder.version
        self.cluster.check(self)
        while self.completed < last:
            await self._training.all_gather(b"", what="the gradients", deadline_s=1e6)
            await asyncio.sleep(self.cluster.random.random() * ITERATION_S)
            version = self.completed + 1
            gradients = self.state.gradient(version)
            await job.live().capture(version, gradients)
            self.state.step(gradients["weight"])
            job.recorder.stepped(version)
            await job.recorder.complete(version)
            self.completed = version
            self.cluster.check(self)
        await job.end([])
        assert await job.resources.give_back() is None

    async def kill(self, life: asyncio.Task[None]) -> None:
        """Nothing that it does from here on has an effect; its locks are free."""
        self.dead = True
        life.cancel()
        await asyncio.wait({life})
        await self._scheduler.close()
        self.release()

    def release(self) -> None:
        self.cluster.locked.difference_update(self._locked)

    async def _agent(self, *_: object) -> NodeAgent:
        return HostAgent(self)

    def hierarchy(self) -> Hierarchy:
        def tier(name: str, place: str, survives: Survives) -> Tier:
            return Tier(f"memory://{place}", name, wrap=lambda driver: ProcessDriver(driver, self, survives))

        tiers = [tier("memory", self.cluster.memory(self.rank), Survives.PROCESS)]
        if self.cluster.has_neighbours:
            neighbour = (self.rank + 1) % self.cluster.world
            tiers.append(tier("neighbour", self.cluster.kept(neighbour), Survives.NODE))
        if self.cluster.has_store:
            tiers.append(tier("shared", self.cluster.shared, Survives.RACK))
        return Hierarchy.of(*tiers)

    def _lock(self, urls: Sequence[str], rank: int, _: str) -> Process:
        self._locked = [(url, rank) for url in urls]
        if self.cluster.locked & set(self._locked):
            raise JobConflict(f"rank {rank} of another job holds {urls}")
        self.cluster.locked.update(self._locked)
        return self

    def _token(self) -> str:
        return f"{self.cluster.random.getrandbits(64):016x}"

    def _copy_begins(self) -> float:
        self._bases += 1
        if self._bases > 1:
            self.cluster.base_begun.set()
        return self.cluster.random.random() * COPY_S_MAX


class Cluster:
    """A node a rank, each with a memory of its own. Copies go to a store that all see or, without ``has_store``, to the
    memory of the next node; with ``has_neighbours`` to both. If the config has agents move, they tell what their hosts'
    memory holds."""

    def __init__(
        self,
        seed: int,
        world: int = 3,
        config: CheckpointConfig = CONFIG,
        *,
        has_store: bool = True,
        has_neighbours: bool | None = None,
    ) -> None:
        self.config = config
        self.random = random.Random(seed)
        self.world = world
        self.has_store = has_store
        self.has_neighbours = not has_store if has_neighbours is None else has_neighbours
        self.hosts = list(range(world))
        """By rank, the host that it runs on."""
        self.names: dict[int, str] = {}
        """By host, another name than it has by itself."""
        self.asked: list[int] = []
        """The ranks that have told what their hosts' memory holds."""
        self.shared = f"life-{seed}-shared"
        self.locked: set[tuple[str, int]] = set()
        self.base_begun = asyncio.Event()
        """A base has begun after the one that its generation opens with."""
        self.history: dict[tuple[int, int], tuple[bytes, bytes, bytes, int]] = {}
        """The bits of (rank, version), in whichever life it came to be first."""
        self._used: set[str] = set()
        self.calls = 0
        """The calls that any rank has made to any tier so far."""
        self.kill_at = (0, "")
        """The number of the call at which its process is killed, and the moment: ``before`` it, or ``after`` it."""
        self.struck = asyncio.Event()
        self.on_lost_stage: LostStage | None = None
        self.recovered: list[int] = []
        """Per start, the version that the ranks went on from."""

    def state_of(self, rank: int) -> NumberState:
        """What a rank begins with."""
        return NumberState(rank)

    def label(self, rank: int) -> str:
        host = self.hosts[rank]
        return self.names.get(host, f"host-{host}")

    def memory(self, rank: int) -> str:
        """What is captured on the rank's host."""
        return f"{self.shared}-{self.hosts[rank]}"

    def kept(self, rank: int) -> str:
        """What the rank's host keeps for its neighbour."""
        return f"{self.shared}-kept-{self.hosts[rank]}"

    def lose_node(self, rank: int) -> None:
        self._used |= {self.memory(rank), self.kept(rank)}
        for name in (self.memory(rank), self.kept(rank)):
            MemoryDriver.forget(name)

    def forget(self) -> None:
        for name in self._used | {self.shared}:
            MemoryDriver.forget(name)

    def check(self, process: Process) -> None:
        """A version has the same bits on every way to it."""
        bits = process.state.bits
        assert self.history.setdefault((process.rank, process.completed), bits) == bits

    def strikes(self, call: Call) -> str:
        """Whether a kill strikes ``before`` this call, ``after`` its effect, or not at all: an empty text."""
        if call.operation in (Operation.CLOSE, Operation.LIST):  # what they leave, the call after them leaves as well
            return ""
        self.calls += 1
        number, moment = self.kill_at
        if self.calls != number:
            return ""
        self.struck.set()
        return moment

    async def start(
        self, last: int, until: Callable[[list[Process]], Awaitable[object]] | None = None
    ) -> list[Process]:
        """Start the job, and let it train to its end or, if that comes first, ``until``: then kill it, rank by rank."""
        self._used |= {place for rank in range(self.world) for place in (self.memory(rank), self.kept(rank))}
        room, training = Room(self.world), Room(self.world)
        ranks = range(self.world)
        processes = [Process(self, rank, LoopGroup(rank, room), LoopGroup(rank, training)) for rank in ranks]
        self.base_begun.clear()
        lives = [asyncio.create_task(process.live(last)) for process in processes]
        ends = asyncio.gather(*lives)
        crash = asyncio.ensure_future(until(processes)) if until else ends
        await asyncio.wait({ends, crash}, return_when=asyncio.FIRST_COMPLETED)
        if ends.done():
            crash.cancel()
            await ends
        else:
            for process, life in self.random.sample(list(zip(processes, lives, strict=True)), self.world):
                await process.kill(life)
                await asyncio.sleep(self.random.random() * DYING_S)
            await asyncio.wait({ends})
            ends.exception() if not ends.cancelled() else None
        assert not self.locked
        if opened := [process.job for process in processes if process.job is not None]:
            (version,) = {job.recovery.version if job.recovery else 0 for job in opened}
            self.recovered.append(version)
        return processes

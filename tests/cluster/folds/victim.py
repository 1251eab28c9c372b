"""Agents, and processes that fold for them, which are killed in the middle of a fold; run as a module by
``test_kills.py``.

``agents FOLDER`` counts the calls to the operating system that an agent makes from the moment when it asks for a fold.
Then it forks one again and again and kills it with SIGKILL before one of them, at points that are spread over all.
``folds FOLDER`` does so with the process that folds, from the moment when it is asked. Both print how many were killed.
``fold LAUNCH NUMBER COUNTED`` is such a process.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tests.cluster.agents.victim import whole
from tests.cluster.dying import die_before_event, lives_through
from tests.servers.agents import Node, base, capture, fake_peer, open_generation, record, shard
from tiercheck.agent.server.service import Agent
from tiercheck.errors import NotFound
from tiercheck.folding import __main__ as folding
from tiercheck.folding import launch
from tiercheck.folding.launch import Launch
from tiercheck.folding.messages import Ask, Replay
from tiercheck.folding.owner import FoldProcess
from tiercheck.folding.server import FoldServer
from tiercheck.format.container import Shard
from tiercheck.keys import JobKey, ShardKey
from tiercheck.replication.job import ReplicationJob
from tiercheck.replication.objects.records import seal
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm.driver import ShmDriver

FOLDED, LAST = 5, 7
NBYTES = 300_000
MAKE_S_MAX = 120.0
NEVER = 2**31
POINTS = 5


@dataclass
class Copied:
    """A base whose content tells its version. See :class:`tiercheck.streams.state.StateCapture`."""

    key: ShardKey
    constants = None
    disturbed = False
    unexpected = ()
    audited = False

    def __post_init__(self) -> None:
        self._content = b"".join(bytes(part) for part in shard(self.key, NBYTES))
        self.nbytes_max = len(self._content) + 4096

    def copy(self, memory: memoryview) -> None:
        memory[: len(self._content)] = self._content

    def let_change(self) -> bool:
        return self.disturbed

    def arrive(self) -> None:
        pass

    def finish(self) -> int:
        return len(self._content)

    def arrived(self) -> None:
        pass


class Copying:
    """See :class:`tiercheck.streams.state.FoldShards`."""

    def prepare(self, base: Shard) -> None:
        pass

    def __call__(self, base: Shard, differentials: Sequence[Shard], *, tier: str, check: Callable[[], None]) -> Copied:
        assert [shard.metadata.key.first for shard in differentials] == list(range(1, FOLDED + 1))
        check()
        return Copied(ShardKey.base(1, FOLDED, base.metadata.key.rank))


def folds(text: str, number: int, counted: Path | None) -> None:
    """The process that folds, which dies before the ``number``-th call of its fold."""
    folding.replays = lambda certified: Copying()
    take = FoldServer._take

    def taken(self: FoldServer, request: object) -> None:
        if isinstance(request, Ask) and isinstance(request.work, Replay):
            die_before_event(number, counted)
        take(self, request)  # type: ignore[arg-type]

    FoldServer._take = taken  # type: ignore[method-assign, assignment]
    make_driver("shm://imports-it?size=1MiB")
    folding.main(text)


class Starting:
    """Starts the processes that fold: the first one dies before the ``number``-th call of its fold."""

    def __init__(self, number: int = NEVER, counted: Path | None = None) -> None:
        self.numbers = [number]
        self.counted = counted
        self.started = 0

    def __call__(self, told: Launch, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        self.started += 1
        number = self.numbers.pop() if self.numbers else NEVER
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.cluster.folds.victim",
                "fold",
                msgspec.json.encode(told).decode(),
                str(number),
                str(self.counted or ""),
            ],
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            pass_fds=[told.descriptor],
            start_new_session=True,
        )


async def prepare(node: Node, job: ReplicationJob) -> None:
    async with node.open(job) as hierarchy:
        await open_generation(hierarchy)
        await hierarchy.first.driver.put(str(JobKey(0)), [seal(JobKey(0), job)])
        await capture(hierarchy, base(0), *(record(version) for version in range(1, LAST + 1)), nbytes=NBYTES)


async def live(
    node: Node, job: ReplicationJob, starting: Starting, dies_at: int = NEVER, counted: Path | None = None
) -> int:
    """An agent until the base is folded and all is where it belongs. Returns how many processes have folded."""
    launch._spawn = starting
    ask = FoldProcess.ask

    async def asked(self: FoldProcess, work: object, wanted: object) -> object:
        if isinstance(work, Replay):
            die_before_event(dies_at, counted)
        return await ask(self, work, wanted)  # type: ignore[arg-type]

    FoldProcess.ask = asked  # type: ignore[method-assign, assignment]
    async with Agent(node.settings(drain_s=60.0), make_peer_server=fake_peer) as agent, node.open(job) as hierarchy:
        async with asyncio.timeout(MAKE_S_MAX):
            while True:
                with suppress(NotFound):
                    await hierarchy.first.driver.stat(str(base(FOLDED)))
                    break
                await asyncio.sleep(0.05)
        await agent.drain()
    return starting.started


async def check(node: Node, job: ReplicationJob, *, finished: bool) -> None:
    """Every version can be had, what is there is whole, and no memory is taken by what nobody has."""
    async with node.open(job) as hierarchy:
        held = [await whole(hierarchy, index) for index in range(2)]
        shards = {key for each in held for key in each if isinstance(key, ShardKey)}
        covered = {version for key in shards if key.stream == "differential" for version in key.versions}
        newest = max(key.first for key in shards if key.stream == "base")
        assert newest in (0, FOLDED)
        assert covered.issuperset(range(newest + 1, LAST + 1)), f"versions after {newest} are gone: {covered}"
        memory = hierarchy.first.driver
        if newest == FOLDED:
            made = b"".join(bytes(part) for part in shard(base(FOLDED), NBYTES))
            assert bytes(await memory.get(str(base(FOLDED)))) == made
        assert newest == FOLDED or not finished
    # A process that folds ends after its agent has. What it has reserved is removed by whoever opens the tier then.
    async with asyncio.timeout(MAKE_S_MAX):
        while not await nothing_is_left_behind(job):  # noqa: ASYNC110  (a directory tells nobody)
            await asyncio.sleep(0.05)


async def nothing_is_left_behind(job: ReplicationJob) -> bool:
    # A driver of its own, so that what the others had mapped is not counted.
    async with make_driver(job.namespace) as driver:
        assert isinstance(driver, ShmDriver)
        nbytes = sum([info.nbytes async for info in driver.list()])
        reserved = list((driver.segments.root / ".tiercheck/tmp").iterdir())
        charged = driver.segments._accounting.read().charged
        return not reserved and (await driver.usage()).used_bytes == nbytes == charged


def one_life(node: Node, name: str, number: int, counted: Path | None = None, *, agents: bool) -> bool:
    """Whether it lives through. What it leaves is checked, and removed."""
    job = node.job(node.shm(), durable=f"nvme://{node.folder}/durable-{name}?survives=rack", batch=3)
    job = replace(job, folds="exactly", fold_every=FOLDED)
    asyncio.run(prepare(node, job))
    if agents:
        lived = lives_through(functools.partial(live, node, job, Starting(), number, counted))
    else:
        lived = asyncio.run(live(node, job, Starting(number, counted))) == 1
    asyncio.run(check(node, job, finished=lived or not agents))
    if not lived and agents:
        # The next one finds the replication job by itself, and folds.
        assert lives_through(functools.partial(live, node, job, Starting()))
        asyncio.run(check(node, job, finished=True))
    node.clear_memory()
    return lived


def kill_at_many_points(node: Node, *, agents: bool) -> int:
    counted = node.folder / "calls"
    assert one_life(node, "whole", NEVER, counted, agents=agents)
    calls = counted.stat().st_size
    killed = 0
    for life in itertools.count():
        if killed == POINTS:
            break
        number = calls * killed // POINTS
        if one_life(node, str(life), number, agents=agents):
            assert number, "none of its calls was seen"
            calls = number  # fewer than the first one's, which looked more often while it waited
        else:
            killed += 1
    return killed


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    if what == "fold":
        folds(given[0], int(given[1]), Path(given[2]) if given[2] else None)
        sys.exit()
    victim = Node(Path(given[0]))
    try:
        print(kill_at_many_points(victim, agents=what == "agents"))
    finally:
        victim.clear_memory()

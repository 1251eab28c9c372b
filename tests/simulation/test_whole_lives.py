"""Three ranks live, are killed, recover and go on, all of it in one event loop and in virtual time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import virtual_time
from tests.simulation.life import CONFIG, Cluster, Process
from tests.simulation.number_state import NumberFolding, NumberState
from tests.simulation.seeds import play_each
from tiercheck.errors import ConfigurationError
from tiercheck.keys import ShardKey, Stream, parse
from tiercheck.policy.recovery.agreement import agreed
from tiercheck.tiers.memory import MemoryDriver

LAST = 40
REPOSITORY = Path(__file__).absolute().parents[2]


def at(version: int) -> Callable[[list[Process]], Awaitable[object]]:
    """When the first rank has completed the version."""

    async def reached(processes: list[Process]) -> None:
        while max(process.completed for process in processes) < version:  # noqa: ASYNC110  the time is virtual
            await asyncio.sleep(0.003)

    return reached


async def whole_life(
    seed: int, *, has_store: bool = True, bases: str = "capture", kind: type[Cluster] = Cluster
) -> list[int]:
    """All ranks are killed; again, in the middle of a base; then a node is lost as well; at last they reach the end."""
    mover = "agent" if bases == "auto" else "trainer"  # auto folds in the agent
    cluster = kind(seed, config=replace(CONFIG, bases=bases, mover=mover), has_store=has_store)
    try:
        first = await cluster.start(LAST, at(cluster.random.randint(9, 14)))
        promised = min(process.completed for process in first)
        captures = bases == "capture"  # a base that is folded is on its way for a while after each seventh version
        in_a_base = (lambda _: cluster.base_begun.wait()) if captures else at(promised // 7 * 7 + 7)
        second = await cluster.start(LAST, in_a_base)
        assert promised <= cluster.recovered[-1] <= max(process.completed for process in first)
        promised = min(process.completed for process in second)
        third = await cluster.start(LAST, at(promised + cluster.random.randint(1, 9)))
        assert promised <= cluster.recovered[-1] <= max(process.completed for process in second)
        committed = outlives_a_node(cluster, third)
        cluster.lose_node(cluster.random.randrange(cluster.world))
        fourth = await cluster.start(LAST)
        assert committed <= cluster.recovered[-1] <= max(process.completed for process in third)
        assert [process.completed for process in fourth] == [LAST] * cluster.world
        folded = [process.job.mover.status.folded_bases for process in fourth if process.job]
        assert (max(folded) > 0) is (bases != "capture")
        assert [process.state.bits for process in fourth] == [trained(rank).bits for rank in range(cluster.world)]
        return cluster.recovered
    finally:
        cluster.forget()


def outlives_a_node(cluster: Cluster, processes: list[Process]) -> int:
    """The version that a recovery reaches at least, whichever node is lost, as the movers saw it last."""
    found = [process.job.mover.status for process in processes if process.job]
    if cluster.has_store:
        return max([status.watermark or 0 for status in found], default=0)
    return agreed([status.reach for status in found]) if len(found) == cluster.world else 0


def trained(rank: int, last: int = LAST, state: NumberState | None = None) -> NumberState:
    """What a rank comes to that nothing ever happens to. ``state``: what it begins with."""
    state = state or NumberState(rank)
    for version in range(1, last + 1):
        state.step(state.gradient(version)["weight"])
    return state


@pytest.mark.parametrize(
    ("has_store", "bases", "seeds"),
    [
        (True, "capture", (0, 4)),
        (False, "capture", (1, 2, 3)),
        (True, "fold", (5,)),
        (False, "fold", (6, 7)),
        (False, "auto", (8,)),
    ],
    ids=["store", "neighbours", "folded-store", "folded-neighbours", "auto-neighbours"],
)
def test_three_ranks_that_are_killed_and_lose_a_node_end_as_if_nothing_had_happened(
    has_store: bool, bases: str, seeds: tuple[int, ...]
) -> None:
    def live(seed: int) -> None:
        recovered = virtual_time.run(whole_life(seed, has_store=has_store, bases=bases))
        assert recovered[0] == 0
        assert len(recovered) == 4

    play_each(live, seeds)


class TogetherCluster(Cluster):
    """A step takes all ranks: none may replay other steps than the others."""

    def state_of(self, rank: int) -> NumberState:
        return NumberState(rank, steps_together=True)


@pytest.mark.parametrize(("bases", "seed"), [("capture", 10), ("fold", 11)])
def test_ranks_that_step_together_lose_no_more(bases: str, seed: int) -> None:
    assert len(virtual_time.run(whole_life(seed, bases=bases, kind=TogetherCluster))) == 4


def test_ranks_that_step_together_need_a_tier_that_all_share() -> None:
    with pytest.raises(ConfigurationError, match="the optimizer's step takes all 3 ranks"):
        virtual_time.run(whole_life(12, has_store=False, kind=TogetherCluster))


class Doubted(NumberState):
    """The fold to one version gives other bits."""

    VERSION = 14

    def folding(self, *, certified: bool) -> NumberFolding:
        return NumberFolding(differs=self.VERSION)


class DoubtedCluster(Cluster):
    def state_of(self, rank: int) -> NumberState:
        return Doubted(rank)


def test_a_fold_that_differs_is_no_base_and_what_training_had_is_captured() -> None:
    async def life() -> None:
        cluster = DoubtedCluster(9, config=replace(CONFIG, bases="fold", mover="trainer"))
        try:
            first = await cluster.start(LAST, at(18))
            versions = {key.last for rank in range(cluster.world) for key in bases_in(cluster.memory(rank))}
            assert Doubted.VERSION not in versions
            assert versions & {Doubted.VERSION + 1, Doubted.VERSION + 2, Doubted.VERSION + 3}, "a captured one"
            told = [process.job.mover.status.differing_version for process in first if process.job]
            assert told == [Doubted.VERSION] * cluster.world
            second = await cluster.start(LAST)
            assert [process.state.bits for process in second] == [trained(rank).bits for rank in range(cluster.world)]
        finally:
            cluster.forget()

    virtual_time.run(life())


def bases_in(place: str) -> list[ShardKey]:
    keys = map(parse, MemoryDriver(place).store.objects)
    return [key for key in keys if isinstance(key, ShardKey) and key.stream is Stream.BASE]


async def loses_constants(cluster: Cluster, processes: list[Process], until: int) -> int:
    """Memory loses what does not change, now and then, of this rank or that, until the first one has completed the
    version. Another tier has it by then: else nothing would be left of the job. Returns how often. Without a store that
    is once a life: as long as one rank's memory leads nowhere, nothing goes from any rank's."""
    times = 0
    while max(process.completed for process in processes) < until and (cluster.has_store or not times):
        await asyncio.sleep(cluster.random.random() * 0.4)
        if max(process.completed for process in processes) >= until:
            break  # what is lost behind the last base is stored by none
        memory = MemoryDriver(cluster.memory(cluster.random.randrange(cluster.world))).store.objects
        for name in list(memory):
            key = parse(name)
            others = [cluster.shared, *(cluster.kept(rank) for rank in range(cluster.world))]
            elsewhere = any(name in MemoryDriver(place).store.objects for place in others)
            if isinstance(key, ShardKey) and key.stream is Stream.CONSTANT and elsewhere:
                del memory[name]
                times += 1
    return times


class Still(NumberState):
    """What changes seldom never does. Without a store, each write to it takes a base that the ranks have not agreed on,
    and leaves no room for another one."""

    def gradient(self, version: int) -> dict[str, Any]:
        frozen = self.frozen.copy()
        gradients = super().gradient(version)
        self.frozen[:] = frozen
        return gradients


class StillCluster(Cluster):
    def state_of(self, rank: int) -> NumberState:
        return Still(rank)


async def life_without_constants(seed: int, *, has_store: bool, bases: str) -> None:
    cluster = (Cluster if has_store else StillCluster)(seed, config=replace(CONFIG, bases=bases), has_store=has_store)
    times = 0

    async def losing(processes: list[Process], until: int) -> None:
        nonlocal times
        times += await loses_constants(cluster, processes, until)
        await at(until)(processes)

    try:
        first = await cluster.start(LAST, lambda processes: losing(processes, cluster.random.randint(9, 20)))
        promised = min(process.completed for process in first)

        async def to_the_end(processes: list[Process]) -> None:
            await losing(processes, LAST - 12)
            await asyncio.Event().wait()

        second = await cluster.start(LAST, to_the_end)
        assert promised <= cluster.recovered[-1], "what memory lacks is read from another tier"
        assert times > 0
        for rank, process in enumerate(second):
            assert process.state.bits == trained(rank, state=cluster.state_of(rank)).bits
            newest = max(bases_in(cluster.memory(rank)))
            assert newest.last > LAST - 12
            assert str(newest.constants) in MemoryDriver(cluster.memory(rank)).store.objects
    finally:
        cluster.forget()


@pytest.mark.parametrize(
    ("has_store", "bases", "seeds"),
    [
        (True, "capture", range(4)),
        (False, "capture", range(4)),
        (True, "fold", (0, 1, 3, 4)),
        (False, "fold", (0, 1, 3, 4)),
    ],
    ids=["store", "neighbours", "folded-store", "folded-neighbours"],
)
def test_memory_that_loses_what_does_not_change_gets_it_again(
    has_store: bool, bases: str, seeds: Sequence[int]
) -> None:
    def live(seed: int) -> None:
        virtual_time.run(life_without_constants(seed, has_store=has_store, bases=bases))

    play_each(live, seeds)


def test_a_seed_is_one_story() -> None:
    assert virtual_time.run(whole_life(3)) == virtual_time.run(whole_life(3))


def test_a_whole_life_needs_no_torch_and_no_thread() -> None:
    """The core knows a state by its protocol, and waits by its scheduler only."""
    life = (
        "import sys, threading\n"
        "from tests.simulation import virtual_time\n"
        "import tests.simulation.test_whole_lives as lives\n"
        "virtual_time.run(lives.whole_life(1))\n"
        "assert 'torch' not in sys.modules, 'the core imports torch'\n"
        "assert threading.enumerate() == [threading.main_thread()]\n"
    )
    done = subprocess.run([sys.executable, "-c", life], cwd=REPOSITORY, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]

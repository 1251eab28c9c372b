"""Three ranks, one of which is killed at a call to a tier; the others are killed for it. Before the call, or after its
effect when its caller does not know yet."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import pytest

from tests.simulation import virtual_time
from tests.simulation.life import CONFIG, Cluster, Process
from tests.simulation.seeds import play_each
from tests.simulation.test_whole_lives import trained
from tiercheck.config import CheckpointConfig
from tiercheck.errors import RecoveryError
from tiercheck.keys import CommitKey, parse
from tiercheck.tiers.memory import MemoryDriver

LAST = 5
SHORT = replace(CONFIG, base_every=2, batch=2)


def committed(cluster: Cluster) -> int:
    """The newest base whose commit record is in the store."""
    keys = map(parse, MemoryDriver(cluster.shared).store.objects)
    return max((key.version for key in keys if isinstance(key, CommitKey)), default=0)


async def calls_of_a_life(seed: int, config: CheckpointConfig) -> int:
    cluster = Cluster(seed, config=config)
    try:
        await cluster.start(LAST)
        return cluster.calls
    finally:
        cluster.forget()


async def killed_at(seed: int, number: int, moment: str, config: CheckpointConfig, *, lost: bool) -> None:
    """A life that is killed, and then one to the end; ``lost``: a node's memory goes in between."""
    cluster = Cluster(seed, config=config)
    cluster.kill_at = (number, moment)
    try:
        killed = await cluster.start(LAST, lambda _: cluster.struck.wait())
        least = min(process.completed for process in killed)
        if lost:
            cluster.lose_node(number % cluster.world)
            least = committed(cluster)
        if lost and not least:  # the first bases had not left their nodes: that is a loss, and nobody passes over it
            with contextlib.suppress(RecoveryError):
                check_end(await cluster.start(LAST))
            return
        after = await cluster.start(LAST)
        most = max(process.completed for process in killed) + 1  # it may have been published, and nobody told
        assert max(least, 0) <= cluster.recovered[-1] <= max(most, 0), f"call {number}, {moment}"
        check_end(after)
    finally:
        cluster.forget()


def check_end(processes: list[Process]) -> None:
    assert [process.completed for process in processes] == [LAST] * len(processes)
    for process in processes:
        assert process.state.bits == trained(process.rank, LAST).bits


def kill_here_and_there(seed: int, config: CheckpointConfig) -> None:
    calls = virtual_time.run(calls_of_a_life(seed, config))
    assert calls > 100
    for number in range(1 + 4 * seed, calls + 1, 8):
        kind = number // 8 + seed  # the four kinds take turns
        moment, lost = ("before", "after")[kind % 2], kind // 2 % 2 == 1
        virtual_time.run(killed_at(seed, number, moment, config, lost=lost))


@pytest.mark.parametrize(("bases", "seeds"), [("capture", range(2)), ("fold", range(2, 3))], ids=["captured", "folded"])
def test_a_kill_at_any_call_costs_nothing_that_was_promised(bases: str, seeds: range) -> None:
    """What had returned is there if the memory is; else the newest committed base. Every eighth call of each seed."""
    play_each(partial(kill_here_and_there, config=replace(SHORT, bases=bases)), seeds)

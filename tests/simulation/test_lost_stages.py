"""A pipeline of three stages that loses the middle one with every copy of it, and is killed while that is made anew."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from tests.simulation import virtual_time
from tests.simulation.life import CONFIG, Cluster, Process
from tests.simulation.number_state import NumberState
from tests.simulation.seeds import play_each
from tiercheck.errors import RecoveryError
from tiercheck.keys import LineageKey, ShardKey, parse
from tiercheck.policy.neighbours import weigh
from tiercheck.policy.recovery.lineage import LineageRecord
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.replication.objects.records import unseal
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import Fidelity

FIRST, LAST, LOST = 5, 9, 1
SURVIVORS = (0, 2)
OPTIONS = LostStage(), LostStage(weights="by-layer", moments="averaged")
"""By the seed's parity."""


def lose(cluster: Cluster, ranks: Collection[int]) -> None:
    """Every copy of what these ranks have saved goes, in each memory and in the store."""
    places = [
        cluster.shared,
        *(place(rank) for rank in range(cluster.world) for place in (cluster.memory, cluster.kept)),
    ]
    for place in places:
        objects = MemoryDriver(place).store.objects
        for key in [text for text in objects if isinstance(each := parse(text), ShardKey) and each.rank in ranks]:
            del objects[key]
    for rank, version in [each for each in cluster.history if each[0] in ranks]:
        del cluster.history[rank, version]


def averaged(processes: list[Process], name: str) -> bytes:
    """What the middle stage is to be, of what the others are at now."""
    states = [processes[rank].state for rank in SURVIVORS]
    weights = weigh([(each.draw % 1000) ** 0.5 for each in states], 2.0)
    parts = [np.float32(weight) * getattr(each, name) for weight, each in zip(weights, states, strict=True)]
    return (parts[0] + parts[1]).tobytes()


def fidelities(processes: list[Process]) -> set[Fidelity | None]:
    return {each.job.recovery.fidelity if each.job and each.job.recovery else None for each in processes}


def records(cluster: Cluster) -> dict[int, LineageRecord]:
    objects = MemoryDriver(cluster.shared).store.objects
    found = [key for key in map(parse, list(objects)) if isinstance(key, LineageKey)]
    return {
        key.generation: unseal(bytes(objects[str(key)].content), LineageRecord, key=key, tier="shared") for key in found
    }


async def made_anew(seed: int, number: int, moment: str) -> int:
    """Two lives, and between them the loss. A kill in the second one at that call, if it is one; then a third life.
    Returns how many calls the second one takes up to its first step."""
    cluster, option = Cluster(seed, config=CONFIG), OPTIONS[seed % 2]
    try:
        await cluster.start(FIRST)
        lose(cluster, (LOST,))
        cluster.on_lost_stage, before = option, cluster.calls
        if number:
            cluster.kill_at = (before + number, moment)
            await cluster.start(FIRST, lambda _: cluster.struck.wait())
        processes = await cluster.start(FIRST)
        assert cluster.recovered[-1] == FIRST, "the others lose nothing"
        assert fidelities(processes) == {Fidelity.APPROXIMATE}
        for rank in SURVIVORS:
            assert processes[rank].state.bits == cluster.history[rank, FIRST]
        assert processes[LOST].state.weight.tobytes() == averaged(processes, "weight")
        if option.averages_moments:
            assert processes[LOST].state.momentum.tobytes() == averaged(processes, "momentum")
        else:
            assert not processes[LOST].state.momentum.any()
        assert processes[LOST].state.draw == processes[0].state.draw, "the host state is that of the stage before"
        calls = cluster.calls - before
        after = await cluster.start(LAST)
        assert fidelities(after) == {Fidelity.APPROXIMATE}, "later recoveries know"
        newest = records(cluster)[max(records(cluster))]
        assert any(branch.made for branch in newest.told), "the newest record retells it"
        return calls
    finally:
        cluster.forget()


def kill_here_and_there(seed: int) -> None:
    calls = virtual_time.run(made_anew(seed, 0, ""))
    for number in range(1 + 8 * seed, calls, 16):
        virtual_time.run(made_anew(seed, number, ("before", "after")[number // 16 % 2]))


def test_a_kill_at_any_call_of_such_a_recovery_loses_nothing() -> None:
    play_each(kill_here_and_there, range(2))


async def refused(seed: int, option: LostStage | None, lost: Collection[int], words: str) -> None:
    cluster = Cluster(seed, config=CONFIG)
    try:
        await cluster.start(FIRST)
        lose(cluster, lost)
        cluster.on_lost_stage = option
        with pytest.raises(RecoveryError, match=words):
            await cluster.start(FIRST)
    finally:
        cluster.forget()


@pytest.mark.parametrize(
    ("option", "lost", "words"),
    [
        (None, (1,), r'on_lost_stage="neighbours"'),
        (LostStage(), (0,), r"stage 0 \(average: it is an end stage of 3"),
        (LostStage(), (1, 2), r"stage 1 \(average: its neighbour 2 is lost too.*stage 2 \(average: it is an end"),
        (LostStage(method="older-base"), (1,), "no older base of it is at hand"),
    ],
    ids=["not asked for", "an end", "two in a row", "no older base"],
)
def test_what_cannot_be_made_is_refused(option: LostStage | None, lost: Collection[int], words: str) -> None:
    virtual_time.run(refused(1, option, lost, words))


async def two_ends() -> None:
    """Of three stages both ends: each is a copy of the middle one."""
    cluster = Cluster(2, config=CONFIG)
    try:
        await cluster.start(FIRST)
        lose(cluster, SURVIVORS)
        cluster.on_lost_stage = LostStage(method="neighbours-and-ends")
        processes = await cluster.start(FIRST)
        for rank in SURVIVORS:
            assert processes[rank].state.weight.tobytes() == processes[LOST].state.weight.tobytes()
        await cluster.start(LAST)
    finally:
        cluster.forget()


def test_both_ends_are_copies_of_the_middle_stage() -> None:
    virtual_time.run(two_ends())


async def older(seed: int, behind_max: int) -> tuple[int, list[Process], Cluster]:
    cluster = Cluster(seed, config=CONFIG)
    await cluster.start(FIRST)
    cluster.on_lost_stage = LostStage(method="older-base", behind_max=behind_max)
    cut = {key for key in all_keys(cluster) if key.rank == LOST and key.last > 2}
    for place in (cluster.shared, *(cluster.memory(rank) for rank in range(cluster.world))):
        for key in cut:
            MemoryDriver(place).store.objects.pop(str(key), None)
    for version in range(FIRST + 1):
        del cluster.history[LOST, version]
    processes = await cluster.start(FIRST)
    return cluster.recovered[-1], processes, cluster


def all_keys(cluster: Cluster) -> list[ShardKey]:
    places = (cluster.shared, *(cluster.memory(rank) for rank in range(cluster.world)))
    keys = [parse(text) for place in places for text in MemoryDriver(place).store.objects]
    return [key for key in keys if isinstance(key, ShardKey)]


def test_a_stage_far_behind_goes_back_alone_and_one_that_is_near_takes_the_others_back() -> None:
    version, processes, cluster = virtual_time.run(older(3, behind_max=1))
    assert version == FIRST
    assert fidelities(processes) == {Fidelity.APPROXIMATE}
    expected = NumberState(LOST)
    for step in (1, 2):
        expected.step(expected.gradient(step)["weight"])
    assert processes[LOST].state.weight.tobytes() == expected.weight.tobytes()
    assert processes[LOST].state.momentum.tobytes() == expected.momentum.tobytes()
    cluster.forget()
    version, processes, cluster = virtual_time.run(older(3, behind_max=10))
    assert fidelities(processes) == {Fidelity.EXACT}, "all went back to version 2, and trained again"
    assert version == 2
    cluster.forget()

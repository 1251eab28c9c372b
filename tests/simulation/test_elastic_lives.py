"""After each crash other ranks go on: nothing promised is lost, and nothing of those that are no more stays."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from itertools import pairwise

from tests.simulation import virtual_time
from tests.simulation.life import CONFIG, Cluster, Process
from tests.simulation.seeds import play_each
from tests.simulation.sharded_numbers import ShardedNumbers, trained_numbers
from tests.simulation.test_whole_lives import at
from tiercheck.errors import RecoveryError
from tiercheck.keys import LineageKey, ShardKey, parse
from tiercheck.tiers.memory import MemoryDriver

LAST = 66
CRASHES_UNTIL = 40
"""What comes after it takes more bases than are kept."""
RANKS_MAX = 4
LIVES = 7
CALLS_MAX = 250
"""A start on other ranks makes about so many calls until it has trained a few versions."""


class ElasticCluster(Cluster):
    """Ranks that have a part each of one state. Between two lives their number may change."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, RANKS_MAX, CONFIG, has_store=True, has_neighbours=False)
        self.elements: dict[tuple[int, int], tuple[bytes, bytes, int]] = {}
        """The bits of (element, version), in whichever life and on however many ranks it came to be first."""

    def state_of(self, rank: int) -> ShardedNumbers:
        return ShardedNumbers(rank, self.world)

    def check(self, process: Process) -> None:
        state = process.state
        assert isinstance(state, ShardedNumbers)
        for at_, (weight, momentum) in enumerate(zip(state.weight, state.momentum, strict=True), start=state.first):
            bits = weight.tobytes(), momentum.tobytes(), state.draw
            assert self.elements.setdefault((at_, process.completed), bits) == bits

    def stored(self) -> list[ShardKey]:
        """The shards in the tier that all ranks share."""
        return [key for key in map(parse, MemoryDriver(self.shared).store.objects) if isinstance(key, ShardKey)]

    def strike(self) -> Callable[[list[Process]], Awaitable[object]]:
        """A crash: at some call to a tier, also within an opening and a conversion, or once a version is reached."""
        if self.random.random() < 0.6:
            self.struck.clear()
            self.kill_at = self.calls + self.random.randint(1, CALLS_MAX), self.random.choice(["before", "after"])
            return lambda _: self.struck.wait()
        return at(max(self.recovered, default=0) + self.random.randint(1, 12))


async def elastic_life(seed: int) -> list[tuple[int, int]]:
    """Ranks live, are killed, and others go on, some of them on nodes of their own; memory is lost now and then. At
    last some reach the end. Returns the ranks of each life, and the version that it went on from. A start that is
    refused ends the story: nothing was committed yet, and what there was lay on nodes that the new ranks do not see.
    """
    cluster, story = ElasticCluster(seed), []
    committed = 0
    try:
        for life in range(LIVES):
            cluster.world = cluster.random.randint(1, RANKS_MAX)
            before = len(cluster.recovered)
            last = life == LIVES - 1
            processes = await (cluster.start(LAST) if last else cluster.start(CRASHES_UNTIL, cluster.strike()))
            cluster.kill_at = 0, ""
            if len(cluster.recovered) > before:
                story.append((cluster.world, cluster.recovered[-1]))
                assert cluster.recovered[-1] >= committed, f"base {committed} was committed"
            committed = max(committed, watermark_of(processes))
            if cluster.random.random() < 0.5:
                for rank in range(cluster.world):
                    cluster.lose_node(rank)
            elif all(process.job for process in processes) and cluster.random.random() < 0.5 and not last:
                # The same ranks come back first: nothing of what they had is lost.
                reached = min(process.completed for process in processes)
                processes = await cluster.start(CRASHES_UNTIL, at(reached + 1))
                assert cluster.recovered[-1] >= reached
                committed = max(committed, watermark_of(processes))
        check_end(cluster, processes)
        return story
    except RecoveryError as refusal:
        assert committed == 0, f"base {committed} was committed, and the start is refused: {refusal}"
        return story
    finally:
        cluster.forget()


def watermark_of(processes: list[Process]) -> int:
    """The newest base that is committed, as the movers saw it last."""
    return max([process.job.mover.status.watermark or 0 for process in processes if process.job], default=0)


def check_end(cluster: ElasticCluster, processes: list[Process]) -> None:
    assert [process.completed for process in processes] == [LAST] * cluster.world
    truth = trained_numbers(LAST)
    for process in processes:
        state = process.state
        assert isinstance(state, ShardedNumbers)
        assert (state.weight.tobytes(), state.momentum.tobytes(), state.draw) == (
            truth.weight[state.held].tobytes(),
            truth.momentum[state.held].tobytes(),
            truth.draw,
        )
    records = [key for key in map(parse, MemoryDriver(cluster.shared).store.objects) if isinstance(key, LineageKey)]
    newest = max(key.generation for key in records)
    left = {(key.generation, key.rank) for key in cluster.stored()}
    assert left == {(newest, rank) for rank in range(cluster.world)}, "what older generations left is reclaimed"


def test_other_ranks_go_on_after_each_crash() -> None:
    stories: list[list[tuple[int, int]]] = []

    def live(seed: int) -> None:
        stories.append(virtual_time.run(elastic_life(seed)))

    play_each(live, (0, 3, 48))
    changes = {(one, other) for story in stories for (one, _), (other, _) in pairwise(story)}
    assert stories[-1] == virtual_time.run(elastic_life(int(os.environ.get("TIERCHECK_SEED", "48")))), (
        "a seed is one story"
    )
    assert len(stories) == 1 or {one < other for one, other in changes} == {True, False}, "more ranks, and fewer"

"""The invariants of the design, over random schedules of training, moving, deleting and failing.

A failure prints its seed; ``TIERCHECK_SEED=n pytest tests/simulation`` replays that one alone.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.cluster import Cluster, is_base
from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.consensus import Readable, decide

SEEDS = [int(os.environ["TIERCHECK_SEED"])] if "TIERCHECK_SEED" in os.environ else range(150)


@pytest.mark.parametrize("snapshots", [False, True], ids=["differentials", "snapshots"])
@pytest.mark.parametrize("seed", SEEDS)
def test_invariants_hold_whatever_fails_when(seed: int, snapshots: bool) -> None:
    world = 1 + seed % 3
    peers = world > 1 and seed % 4 > 0
    cluster = Cluster(seed, world, base_every=2 + seed % 5, batch=1 + seed % 4, peers=peers, snapshots=snapshots)
    draw = cluster.random
    newest_commit = (0, -1)
    for _ in range(200):
        event = draw.choices(["step", "act", "fail"], weights=[5, 8, 1])[0]
        if event == "step":
            cluster.step()
        elif event == "act":
            cluster.act()
        else:
            cluster.fail(draw.choice(["software", "node", "rack"]))
        mark = cluster.watermark()
        if mark is not None:
            assert (mark.generation, mark.version) >= newest_commit, "the watermark went back"
            newest_commit = (mark.generation, mark.version)
    converge(cluster)


def converge(cluster: Cluster) -> None:
    """I6: once faults stop, every tier has what policy wants, and no more (I5)."""
    cluster.saves_fail = False
    for _ in range(3 * cluster.base_every):
        cluster.step()
    budget = 10_000
    while cluster.act(closing=True):
        budget -= 1
        assert budget, "the movers never come to rest"
    mark = cluster.watermark()
    assert mark is not None
    newest = max(
        key.first
        for key in cluster.ranks[0].memory
        if is_base(key, cluster.generation, 0) and isinstance(key, ShardKey)
    )
    assert (mark.generation, mark.version) == (cluster.generation, newest), "the newest base is committed"
    for index, rank in enumerate(cluster.ranks):
        shards = [key for key in rank.memory if isinstance(key, ShardKey)]
        bases = [key for key in shards if key.stream is Stream.BASE]
        assert len(bases) == 2, "two bases deep"
        bound = 4 if snapshots_of(shards) else 2 * cluster.base_every
        assert len(shards) - len(bases) <= bound, "no differential and no snapshot is kept for nothing"
        durable = [key for key in cluster.durable if isinstance(key, ShardKey) and key.rank == index]
        assert len([key for key in durable if key.stream is Stream.BASE]) == min(
            cluster.retention.keep_last, len([k for k in durable if k.stream is Stream.BASE])
        )
        if cluster.snapshots:
            newest_snapshots = [key for key in snapshots_of(durable) if key.first == mark.version + 1]
            assert len(newest_snapshots) == (1 if rank.version > mark.version else 0), "each supersedes the last"
            assert all(key.last == rank.version for key in newest_snapshots), "a rack failure now costs nothing"
        else:
            covered = {v for key in durable if key.stream is Stream.DIFFERENTIAL for v in key.versions}
            assert set(range(mark.version + 1, rank.version + 1)) <= covered, "a rack failure now costs nothing"
    version = cluster.ranks[0].version
    cluster.random.seed(1)
    if cluster.peers:
        # One node goes, and all that the others need is in the neighbours' memory.
        cluster.lose_node(cluster.random.randrange(cluster.world))
        durable, cluster.durable = cluster.durable, {}
        sources = [cluster.sources(index) for index in range(cluster.world)]
        points = decide([Readable.of(source.key for source in each) for each in sources], cluster.lineage)
        assert points is not None and points[0].last == version, "a node failure costs nothing once the peers have all"
        cluster.durable = durable
    # And so it is: the widest failure loses nothing that was captured.
    for index in range(cluster.world):
        cluster.lose_node(index)
    before = cluster.watermark()
    cluster.recover("software", before)
    assert cluster.trained_to == version


def snapshots_of(shards: list[ShardKey]) -> list[ShardKey]:
    return [key for key in shards if key.stream is Stream.SNAPSHOT]

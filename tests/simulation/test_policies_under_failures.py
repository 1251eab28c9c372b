"""The invariants of the design, over random schedules of training, moving, deleting and failing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.cluster import BASES_MAX, Cluster
from tests.simulation.seeds import play_each
from tests.simulation.surveys import shards
from tests.simulation.tiers import Tier
from tiercheck.keys import LineageKey, ShardKey, Stream
from tiercheck.policy.left_behind import LINEAGE_RECORDS_KEPT

SEEDS = (2, 5, 7, 8, 9, 10, 15)
"""Which jobs they stand for, is held by ``test_the_seeds_stand_for_every_kind_of_job``."""
MODES: dict[str, dict[str, Any]] = {
    "a shared tier": {},
    "a shared tier, snapshots": {"snapshots": True, "saves_fail": True},
    "a shared tier, failing saves": {"saves_fail": True},
    "no shared tier": {"shared": False},
    "no shared tier, snapshots": {"shared": False, "snapshots": True},
    "no shared tier, failing saves": {"shared": False, "saves_fail": True},
    "ranks on other nodes": {"moves": True},
    "ranks on other nodes, no shared tier": {"moves": True, "shared": False},
    "several ranks a node": {"per_node": 2, "moves": True, "stays_away": True},
    "several ranks a node, no shared tier": {"per_node": 2, "moves": True, "stays_away": True, "shared": False},
    "tiers away": {"stays_away": True},
    "tiers away, no shared tier": {"stays_away": True, "shared": False},
    "folded": {"folds": True},
    "folded, failing saves": {"folds": True, "saves_fail": True},
    "folded, several ranks a node, tiers away": {"folds": True, "per_node": 2, "moves": True, "stays_away": True},
    "damage": {"decays": True},
    "damage, no shared tier": {"decays": True, "shared": False},
}


def cluster_of(seed: int, kind: type[Cluster] = Cluster, **mode: Any) -> Cluster:
    per_node = mode.get("per_node", 1)
    world = 1 + seed % 4 if per_node == 1 else 2 + seed % 4
    peers = world > per_node and seed % 5 > 0
    return kind(seed, world, base_every=2 + seed % 5, batch=1 + seed % 3, peers=peers, **mode)


@pytest.mark.parametrize("mode", MODES)
def test_the_seeds_stand_for_every_kind_of_job(mode: str) -> None:
    """Of one rank (or one node) to four, each of the others with peers and without, at two intervals of bases."""
    assert {MODES[each].get("shared", True) for each in MODES} == {True, False}
    jobs = [cluster_of(seed, **MODES[mode]) for seed in SEEDS]
    fewest = MODES[mode].get("per_node", 1)
    assert {job.world for job in jobs} == set(range(fewest, fewest + 4))
    for world in range(fewest + 1, fewest + 4):
        same = [job for job in jobs if job.world == world]
        assert {job.peers for job in same} == {True, False}, f"{world} ranks, with peers or without"
        assert len({job.base_every for job in same}) >= 2, f"{world} ranks, one interval of bases"
    assert {job.placement.batch for job in jobs} == {1, 2, 3}


@pytest.mark.parametrize("mode", MODES)
def test_invariants_hold_whatever_fails_when(mode: str) -> None:
    play_each(lambda seed: run(cluster_of(seed, **MODES[mode])), SEEDS)


def run(cluster: Cluster, converge: Callable[[Cluster], None] | None = None) -> None:
    draw = cluster.random
    newest_commit, promised = (0, -1), cluster.promised()
    for _ in range(150):
        event = draw.choices(["step", "act", "fail", "forget"], weights=[5, 8, 1, 1])[0]
        restarts = cluster.restarts
        if event == "step":
            cluster.step()
        elif event == "act":
            cluster.act()
        elif event == "forget":
            draw.choice(cluster.ranks).mark = None  # its agent was started anew
        else:
            cluster.fail(draw.choice(cluster.failures))
        mark = cluster.watermark()
        if mark is not None:
            assert cluster.lineage.admits(mark.generation, mark.version), "the watermark lies in another future"
        if mark is not None and not cluster.decays:
            assert (mark.generation, mark.version) >= newest_commit, "the watermark went back"
            newest_commit = (mark.generation, mark.version)
        if not cluster.shared and not (cluster.saves_fail or cluster.snapshots or cluster.decays):
            now = cluster.promised()
            assert cluster.restarts > restarts or now >= promised, "a node's failure would cost more than before"
            promised = now
    (converge or converge_whole)(cluster)


def converge_whole(cluster: Cluster) -> None:
    """I6: once faults stop, every tier has what policy wants, and no more (I5)."""
    cluster.saves_fail = False
    cluster.opening_fails = cluster.step_fails = 0.0
    for _ in range(3 * cluster.base_every):
        cluster.step()
    come_to_rest(cluster)
    cluster.make_room()
    come_to_rest(cluster)
    version = cluster.trained_to
    assert version == cluster.ranks[0].version
    newest = version // cluster.base_every * cluster.base_every
    for index in range(cluster.world):
        check_memory(cluster, index)
        if cluster.peers:
            check_neighbour(cluster, index)
        if cluster.shared:
            check_durable(cluster, index, newest)
    for tier in cluster.tiers():
        assert sum(isinstance(key, LineageKey) for key in tier) <= LINEAGE_RECORDS_KEPT
    if cluster.peers:
        # One node goes, and all that the others need is in the neighbours' memory.
        assert cluster.promised() == version, "a node failure costs nothing once the peers have all"
    if cluster.shared:
        # And so it is: the widest failure loses nothing that was captured.
        mark = cluster.watermark()
        assert mark is not None
        assert (mark.generation, mark.version) == (cluster.generation, newest), "the newest base is committed"
        for node in cluster.nodes:
            cluster.lose(node)
    cluster.recover(cluster.watermark(), version)


def come_to_rest(cluster: Cluster) -> None:
    budget = 2_000
    while cluster.act(closing=True):
        budget -= 1
        assert budget, "the movers never come to rest"


def check_memory(cluster: Cluster, index: int) -> None:
    """What the memory of a rank's node holds of the rank. Of ranks that are not there any more it holds nothing."""
    node = cluster.ranks[index].node
    there = {other for other, rank in enumerate(cluster.ranks) if rank.node is node}
    assert {key.rank for key in shards(node.memory)} == there, "other ranks' objects are gone"
    held = recorded(node.memory, index)
    check_constants(cluster, index, node.memory)
    assert {key.generation for key in held} == {cluster.generation}
    bases = [key for key in held if key.stream is Stream.BASE]
    assert 1 <= len(bases) <= 2, "the newest, and the one before, if another rank may need that"
    bound = 4 if cluster.snapshots else (len(bases) if cluster.shared else 2) * cluster.base_every
    if cluster.folds:
        bound = cluster.ranks[index].version - min(bases).first
        assert cluster.ranks[index].version - max(bases).first < cluster.placement.fold_every, "few steps are replayed"
    assert len(held) - len(bases) <= bound, "no differential and no snapshot is kept for nothing"


def check_neighbour(cluster: Cluster, index: int) -> None:
    """What the neighbour keeps. A base that was overtaken on its way is not there, so that an older one may be."""
    kept = cluster.tiers_of(index)[1]
    keep_there = {other for other in range(cluster.world) if cluster.tiers_of(other)[1] is kept}
    assert {key.rank for key in shards(kept)} == keep_there, "other ranks' objects are gone"
    held = recorded(kept, index)
    check_constants(cluster, index, kept)
    bases = [key for key in held if key.stream is Stream.BASE]
    assert 1 <= len(bases) <= 2
    oldest = min(bases)
    assert all((key.generation, key.last) >= (oldest.generation, oldest.last) for key in held)


def recorded(tier: Tier, index: int) -> list[ShardKey]:
    """A rank's shards, but for its constants."""
    return [key for key in shards(tier, index) if key.stream is not Stream.CONSTANT]


def check_constants(cluster: Cluster, index: int, tier: Tier) -> None:
    """What a base refers to is there, and nothing else but what bases elsewhere refer to: inside the nodes only bases
    there."""
    held = [key for key in shards(tier, index) if key.stream is Stream.CONSTANT]
    assert {key.constants for key in shards(tier, index)} - {None} <= set(held)
    tiers = [each for each in cluster.tiers_of(index) if each is not cluster.durable or tier is cluster.durable]
    everywhere = {key.constants for each in tiers for key in shards(each, index)}
    assert set(held) <= everywhere, "constants are kept for nothing"


def check_durable(cluster: Cluster, index: int, newest: int) -> None:
    durable = recorded(cluster.durable, index)
    check_constants(cluster, index, cluster.durable)
    bases = [key.first for key in durable if key.stream is Stream.BASE]
    kept = {base for base in bases if not cluster.keep_every or base % cluster.keep_every}
    assert len(kept) <= cluster.keep_last
    version = cluster.ranks[index].version
    if cluster.snapshots:
        newest_snapshots = [key for key in durable if key.stream is Stream.SNAPSHOT and key.first == newest + 1]
        assert len(newest_snapshots) == (1 if version > newest else 0), "each supersedes the last"
        assert all(key.last == version for key in newest_snapshots), "a rack failure now costs nothing"
    else:
        covered = {v for key in durable if key.stream is Stream.DIFFERENTIAL for v in key.versions}
        assert set(range(newest + 1, version + 1)) <= covered, "a rack failure now costs nothing"


@pytest.mark.parametrize("mode", ["a shared tier", "no shared tier", "ranks on other nodes"])
def test_a_crash_loop_fills_no_memory(mode: str) -> None:
    play_each(lambda seed: crash_again_and_again(cluster_of(seed, **MODES[mode])), (1,))


def crash_again_and_again(cluster: Cluster) -> None:
    """Fifty crashes in a row, before, within and after the opening base, while no durable tier takes anything."""
    for _ in range(3 * cluster.base_every):
        cluster.step()
        cluster.act()
    come_to_rest(cluster)
    cluster.outage, cluster.opening_fails = True, 0.3
    cluster.failures = ["software"]  # of two nodes that fail one after the other nothing is promised
    trained = cluster.trained_to
    for _ in range(50):
        for _ in range(cluster.random.randrange(4)):
            cluster.act()
        cluster.fail("software")
        for node in cluster.nodes:
            for held in (node.memory, node.kept):
                owners = [key.rank for key in shards(held) if key.stream is Stream.BASE]
                assert all(owners.count(rank) <= BASES_MAX for rank in owners), f"{len(owners)} bases in one memory"
                assert len(shards(held)) <= (2 * cluster.base_every + BASES_MAX) * 2 * cluster.per_node
    cluster.outage = False
    assert cluster.trained_to >= trained or cluster.moves
    converge_whole(cluster)

"""The invariants hold whatever a user composes: policies that thin out a tier, and that keep little."""

from __future__ import annotations

import random

import pytest

from tests.simulation.cluster import Cluster
from tests.simulation.seeds import play_each
from tests.simulation.test_policies_under_failures import MODES, cluster_of, come_to_rest, run
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import BasesOnly, EveryNth, KeepEvery, KeepLast
from tiercheck.policy.watermark import Retention

undrained = Placement.undrained
TESTED = ["a shared tier", "a shared tier, snapshots", "a shared tier, failing saves", "several ranks a node", "damage"]


def composed(seed: int, mode: str) -> Cluster:
    cluster = cluster_of(seed, **MODES[mode])
    draw = random.Random(f"{seed} {mode}")
    tier = cluster.roles[-1].name
    nth = EveryNth(tier, draw.choice([2, 3, 4]))
    policy = draw.choice([BasesOnly(tier), nth, nth & BasesOnly(tier), nth & EveryNth(cluster.roles[1].name, 2)])
    cluster.placement = Placement(cluster.placement.batch, policy, cluster.base_every)
    kept = draw.choice([KeepEvery(cluster.base_every * 2), KeepLast(1), KeepLast(3)])
    cluster.retention = Retention(kept, cluster.placement)
    cluster.keep_last, cluster.keep_every = 1, 0
    return cluster


def converge(cluster: Cluster) -> None:
    """Training goes on within the memory there is, and everything comes to rest."""
    cluster.saves_fail = False
    cluster.opening_fails = cluster.step_fails = 0.0
    for _ in range(6 * cluster.base_every):
        cluster.step()  # no more bases than admission counts on, and none waits in vain
    come_to_rest(cluster)
    cluster.make_room()
    come_to_rest(cluster)
    assert cluster.trained_to == cluster.ranks[0].version
    mark = cluster.watermark()
    assert mark is not None
    assert mark.generation == cluster.generation, "a base of the generation is committed, however thin the tier is"
    cluster.fail("software")
    come_to_rest(cluster)


@pytest.mark.parametrize("mode", TESTED)
def test_invariants_hold_whatever_a_user_composes(mode: str) -> None:
    play_each(lambda seed: run(composed(seed, mode), converge), range(1, 5))


def test_a_mover_that_waits_for_what_a_tier_is_not_to_have_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Placement()
    monkeypatch.setattr(Placement, "undrained", lambda self, seen: undrained(plain, seen))
    with pytest.raises(AssertionError, match="waits for room for a base, and nothing makes any"):
        for seed in range(5):
            run(composed(seed, "a shared tier"), converge)

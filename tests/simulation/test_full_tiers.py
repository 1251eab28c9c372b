"""A durable tier that is full for a while, and has no more room afterwards than admission asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.cluster import Cluster
from tests.simulation.seeds import play_each
from tests.simulation.surveys import shards
from tests.simulation.test_policies_under_failures import SEEDS, cluster_of, converge_whole
from tests.simulation.tiers import Tier
from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.first_tier import RECORDS_BESIDE
from tiercheck.policy.observation import Observation
from tiercheck.policy.placement import Transfer
from tiercheck.policy.policies import KeepLast
from tiercheck.policy.watermark import Retention
from tiercheck.types import Survives

BASE_SIZE = 6
"""Of a base, where each version in a differential takes one."""
IN_VAIN_MAX = 50


class Full(Exception):
    """The durable tier has no room."""


class SmallStore(Cluster):
    """The durable tier has the room that it needs while all goes well. What others fill of it is ``filled``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.filled, self.in_vain = 0, 0
        self.refused: set[int] = set()
        super().__init__(*arguments, **options)
        # The retention that admission counts on: of three bases one is being copied.
        self.keep_last, self.keep_every = 2, 0
        self.placement = replace(self.placement, interval=self.base_every)
        self.retention = Retention(KeepLast(2), self.placement)
        beside = RECORDS_BESIDE + self.placement.batch
        # The opening base of a restart lies between two that are due.
        self.room = self.world * (4 * BASE_SIZE + 3 * self.base_every + beside)

    def observe(self, index: int) -> Observation:
        short = frozenset({len(self.roles) - 1} if index in self.refused else ())
        return replace(super().observe(index), short_of_room=short)

    def do_transfer(self, tiers: list[Tier], transfer: Transfer) -> None:
        if self.roles[transfer.target_tier].survives is Survives.RACK:
            if self.filled + sum(map(size, shards(self.durable))) + size(transfer.target) > self.room:
                self.refused.add(transfer.target.rank)
                raise Full
            if transfer.target.stream is Stream.DIFFERENTIAL:
                self.check_it_leads_on(transfer.target)
        super().do_transfer(tiers, transfer)

    def check_it_leads_on(self, key: ShardKey) -> None:
        """What the tier gets after it was full can be replayed there."""
        if key.rank not in self.refused:
            return
        own = [each for each in shards(self.durable, key.rank) if each.generation == key.generation]
        bases = {each.first for each in own if each.stream is Stream.BASE}
        there = {version for each in own if each.stream is Stream.DIFFERENTIAL for version in each.versions}
        assert not {key.first - 1}.isdisjoint(bases | there), f"{key} leads on from nothing"

    def one_fails(self) -> bool:
        """Saves fail for want of room alone, and training goes on."""
        return False

    def act(self, *, closing: bool = False) -> bool:
        try:
            acted = super().act(closing=closing)
        except Full:
            self.in_vain += 1
            return self.in_vain < IN_VAIN_MAX
        self.in_vain = 0
        return acted


def size(key: ShardKey) -> int:
    return {Stream.BASE: BASE_SIZE, Stream.DIFFERENTIAL: len(key.versions)}.get(key.stream, 0)


def outlast(cluster: SmallStore, *, restarts: bool) -> None:
    for _ in range(3 * cluster.base_every):
        cluster.step()
        while cluster.act():
            pass
    cluster.opening_fails = cluster.step_fails = 0.0
    cluster.filled = cluster.room
    for _ in range(12 * cluster.base_every):
        cluster.step()
        for _ in range(4):
            cluster.act()
    cluster.filled = cluster.in_vain = 0
    if restarts:
        cluster.fail("software")
    for _ in range(10 * cluster.base_every):
        cluster.step()
        for _ in range(4):
            cluster.act()
    converge_whole(cluster)


@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("mode", [{}, {"folds": True}], ids=["captured", "folded"])
def test_a_job_goes_on_when_the_durable_tier_has_room_again(mode: dict[str, Any], restarts: bool) -> None:
    def play(seed: int) -> None:
        cluster = cluster_of(seed, SmallStore, saves_fail=True, has_constants=False, **mode)
        assert isinstance(cluster, SmallStore)
        outlast(cluster, restarts=restarts)

    play_each(play, SEEDS)

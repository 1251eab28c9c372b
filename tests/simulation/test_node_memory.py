"""Hosts come back in another order, under other names, or one of them does not: the job goes on from memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from tests.simulation import virtual_time
from tests.simulation.life import CONFIG, Cluster, Process, ranks_in
from tests.simulation.test_whole_lives import at, outlives_a_node, trained
from tiercheck.keys import Stream

WORLD = 3
LAST = 14
WITH_AGENTS = replace(CONFIG, mover="agent", base_every=4)
ORDERS = list(permutations(range(WORLD)))
TIERS = pytest.mark.parametrize("has_store", [False, True], ids=["memory", "memory and store"])


def cluster_of(seed: int, has_store: bool) -> Cluster:
    return Cluster(seed, WORLD, WITH_AGENTS, has_store=has_store, has_neighbours=True)


def promised(processes: list[Process]) -> int:
    return min(process.completed for process in processes)


def sources(processes: list[Process]) -> set[str]:
    """The tiers that any rank was restored from."""
    jobs = [process.job for process in processes if process.job and process.job.recovery]
    return {tier for job in jobs for _, tier in job.recovery.sources}  # type: ignore[union-attr]  # looked at above


async def end_of(cluster: Cluster) -> None:
    """Train to the end, and compare every bit with a run that nothing happened to; nobody's memory is left over."""
    processes = await cluster.start(LAST)
    assert [process.state.bits for process in processes] == [trained(rank, LAST).bits for rank in range(WORLD)]
    for rank in range(WORLD):
        assert ranks_in(cluster.memory(rank)) <= {rank}, "what ranks have left elsewhere is reclaimed"
        assert ranks_in(cluster.kept(rank), but=Stream.CONSTANT) <= {(rank - 1) % WORLD}, "constants go later"


async def comes_back(order: tuple[int, ...], *, has_store: bool, renamed: bool) -> None:
    """All of the memory is there, and nothing is lost: not even what had not left its host."""
    cluster = cluster_of(1, has_store)
    try:
        before = await cluster.start(LAST, at(6))
        cluster.asked.clear()
        cluster.hosts = [cluster.hosts[each] for each in order]
        if renamed:
            cluster.names = {host: f"other-{host}" for host in cluster.hosts}
        after = await cluster.start(LAST, at(10))
        assert cluster.recovered[-1] >= promised(before)
        assert "shared" not in sources(after)
        moved = list(order) != [0, 1, 2]
        assert sorted(cluster.asked) == (list(range(WORLD)) if moved else []), "in its place nobody is asked"
        await end_of(cluster)
        assert cluster.recovered[-1] >= promised(after)
    finally:
        cluster.forget()


@TIERS
def test_hosts_in_any_order_and_under_other_names_lose_nothing(has_store: bool) -> None:
    for number, order in enumerate(ORDERS):
        virtual_time.run(comes_back(order, has_store=has_store, renamed=number % 2 == 1))


async def is_replaced(order: tuple[int, ...], gone: int, *, has_store: bool) -> None:
    """A host does not come back, another one takes its place, and all are in another order."""
    cluster = cluster_of(2, has_store)
    try:
        before = await cluster.start(LAST, at(7))
        kept = outlives_a_node(cluster, before)
        cluster.lose_node(gone)
        cluster.hosts[gone] = WORLD
        cluster.hosts = [cluster.hosts[each] for each in order]
        after = await cluster.start(LAST, at(10))
        assert cluster.recovered[-1] >= kept
        await end_of(cluster)
        assert cluster.recovered[-1] >= promised(after)
    finally:
        cluster.forget()


@TIERS
def test_a_host_that_is_replaced_costs_what_only_it_had(has_store: bool) -> None:
    for number, order in enumerate(ORDERS):
        virtual_time.run(is_replaced(order, number % WORLD, has_store=has_store))

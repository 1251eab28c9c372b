"""Which reports are copied, count, and go; and that the best versions stay whole."""

from __future__ import annotations

from tests.unit.policy.test_placement import base, batch, committed, seen
from tiercheck.keys import CommitKey, Key, MetricKey
from tiercheck.policy.metrics import metrics_of, to_report
from tiercheck.policy.observation import Observation
from tiercheck.policy.policies import KeepBest, KeepLast, Metric
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.watermark import Retention

SHARED: list[Key] = [
    *(key for version in (0, 10, 20, 30, 40) for key in committed(version)),
    *(batch(first, first + 4) for first in range(1, 41, 5)),
]


def loss(version: int, value: float, generation: int = 1) -> MetricKey:
    return MetricKey(generation, version, "loss", value)


def test_reports_are_put_into_shared_tiers_by_rank_0_alone() -> None:
    memory = [loss(3, 0.5), loss(8, 0.25)]
    assert to_report(seen(memory, [loss(3, 0.5)]), 1) == [loss(8, 0.25)]
    assert to_report(seen(memory), 0) == []
    assert to_report(seen(memory, rank=1, world=2), 1) == []


def test_of_a_version_that_was_trained_twice_the_newer_report_counts() -> None:
    lineage = Lineage.of([Branch(1, 0, 0, 1, "a"), Branch(2, 1, 5, 1, "b")])
    plain = seen([], [loss(4, 0.5), loss(6, 0.1), loss(6, 0.75, 2)])
    observation = Observation(plain.roles, plain.contents, 0, 1, 2, lineage)
    assert metrics_of(observation, observation.contents[1], 0) == (Metric(4, "loss", 0.5), Metric(6, "loss", 0.75))


def test_the_best_version_stays_with_its_base_and_what_leads_from_there_to_it() -> None:
    retention = Retention(KeepLast(1) | KeepBest("loss", 1))
    observation = seen([], [*SHARED, loss(17, 0.1), loss(25, 0.2), loss(33, 0.3)])
    gone = retention.reclaimable(observation)[1]
    left = set(SHARED).difference(gone)
    assert {key for key in left if isinstance(key, CommitKey)} == {CommitKey(1, 10), CommitKey(1, 40)}
    assert {base(10), batch(11, 15), batch(16, 20)} <= left
    assert not left & {batch(6, 10), batch(21, 25), batch(36, 40), base(0), base(20)}
    assert {loss(25, 0.2), loss(33, 0.3)} <= set(gone), "reports of versions that are gone"
    assert loss(17, 0.1) not in gone


def test_a_better_version_takes_the_place_of_the_best() -> None:
    retention = Retention(KeepLast(1) | KeepBest("loss", 1))
    gone = retention.reclaimable(seen([], [*SHARED, loss(10, 0.1), loss(20, 0.05)]))[1]
    assert base(10) in gone
    assert base(20) not in gone


def test_a_report_leaves_memory_when_the_shared_tier_has_it_or_is_not_to_have_it() -> None:
    retention = Retention(KeepLast(1))
    memory = [base(40), loss(5, 0.1), loss(40, 0.2), loss(41, 0.3)]
    observation = seen(memory, [*SHARED, loss(40, 0.2)])
    assert retention.reports(observation, 1) == [loss(41, 0.3)], "version 5 is gone"
    assert retention.reclaimable(observation)[0] == [loss(5, 0.1), loss(40, 0.2)]


def test_of_what_leads_to_the_best_version_nothing_goes_and_nothing_else_stays() -> None:
    retention = Retention(KeepLast(1) | KeepBest("loss", 1))
    straddling: list[Key] = [
        *(key for version in (0, 20, 40) for key in committed(version)),
        *(batch(first, first + 4) for first in range(3, 40, 5)),
    ]
    gone = retention.reclaimable(seen([], [*straddling, loss(23, 0.1)]))[1]
    assert not {base(20), batch(18, 22), batch(23, 27)} & set(gone), "the best version begins a batch"
    assert batch(28, 32) in gone
    gone = retention.reclaimable(seen([], [*straddling, loss(20, 0.1)]))[1]
    assert base(20) not in gone
    assert batch(18, 22) in gone, "a base needs no differential"


def test_before_anything_is_committed_every_report_counts() -> None:
    memory = [base(0), loss(0, 0.5)]
    assert Retention().reports(seen(memory), 1) == [loss(0, 0.5)]
    assert Retention().reclaimable(seen(memory))[0] == []

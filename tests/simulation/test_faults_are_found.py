"""The simulator's own test: each fault that the policies once had is put back, and some seed shows it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import pytest

from tests.simulation.cluster import Cluster
from tests.simulation.test_policies_under_failures import MODES, cluster_of, crash_again_and_again, run
from tiercheck.keys import CommitKey, Key
from tiercheck.policy import watermark
from tiercheck.policy.observation import Copy, Observation, Role
from tiercheck.policy.recovery import opening
from tiercheck.policy.recovery.agreement import NO_MARK, agreed
from tiercheck.policy.recovery.consensus import Reachable, RecoveryPoint, admitted
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.recovery.opening import Anew, Reach
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, Retention
from tiercheck.recovery.finding import refusals
from tiercheck.recovery.finding.past import Past

SEEDS = range(15)
"""Of which one at least must show the fault. What takes a rarer schedule has a seed of its own."""

Patch = pytest.MonkeyPatch


def finds(mode: str, play: Callable[[Cluster], None] = run, seeds: Iterable[int] = SEEDS) -> str:
    """What the first seed that finds a fault says of it. None does: the test fails. Bases refer to nothing here:
    another check would speak first."""
    for seed in seeds:
        try:
            play(cluster_of(seed, has_constants=False, **MODES[mode]))
        except AssertionError as error:
            return str(error)
    pytest.fail("no seed has shown the fault")


# Without a shared tier


def by_its_own_lights(self: Retention, seen: Observation, role: Role, way: RecoveryPoint | None) -> list[Key]:
    bases = seen.contents[role.index].bases(seen.rank)[-BASES_IN_VOLATILE_TIERS:]
    if len(bases) < BASES_IN_VOLATILE_TIERS or bases[-1].generation != seen.generation:
        return []
    oldest = (bases[0].generation, bases[0].first)
    return [key for key in seen.own(role) if (key.generation, key.last) <= oldest and key != bases[0]]


def test_each_rank_deletes_by_its_own_lights(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Retention, "_unshared", by_its_own_lights)
    assert "cost more" in finds("no shared tier")


def least_of_all(ranks: Sequence[Reach], reached: int | None) -> Anew:
    """What the failure of the most important node would leave, and of none else."""
    if reached is None:
        return Anew(NO_MARK, ())
    mark = agreed([rank.twice for rank in ranks])
    anyhow = [rank.anyhow for rank in ranks]
    left = [version for rank in ranks if (version := agreed([*anyhow, rank.lasting])) != NO_MARK]
    return Anew(mark, (reached, min(left, default=reached) if mark == NO_MARK else mark))


def test_of_what_nodes_failures_would_leave_the_oldest_alone_is_kept(monkeypatch: Patch) -> None:
    monkeypatch.setattr("tests.simulation.cluster.anew", least_of_all)
    assert "cost more" in finds("no shared tier", seeds=[106])
    assert "cost more" in finds("ranks on other nodes, no shared tier", seeds=[122])


# What a start deletes


def test_what_a_recovery_supersedes_is_left_in_memory(monkeypatch: Patch) -> None:
    monkeypatch.setattr(opening, "superseded_at_opening", lambda *seen: [])
    assert "bases" in finds("a shared tier", crash_again_and_again)
    assert "bases" in finds("no shared tier", crash_again_and_again)


def test_what_starts_without_a_past_have_captured_is_left_in_memory(monkeypatch: Patch) -> None:
    clear = Cluster.clear_tiers
    monkeypatch.setattr(
        Cluster, "clear_tiers", lambda self, found, reached: None if reached is None else clear(self, found, reached)
    )
    assert "bases" in finds("no shared tier", seeds=[123])


# Where ranks meet


def at_the_least_of_the_newest(ranks: Iterable[Reachable], lineage: Lineage) -> int | None:
    reaches = [admitted(reach, lineage) for reach in ranks]
    return min(reach[-1][1] for reach in reaches) if all(reaches) else None


def test_a_gap_on_one_rank_sends_all_back(monkeypatch: Patch) -> None:
    monkeypatch.setattr("tiercheck.recovery.finding.past.meeting", at_the_least_of_the_newest)
    with pytest.raises(KeyError):
        finds("a shared tier, failing saves", seeds=[1])
    with pytest.raises(KeyError):
        finds("no shared tier, failing saves", seeds=[62])


def test_a_generation_that_captured_nothing_cuts_its_parent(monkeypatch: Patch) -> None:
    def all_of_them(branches: Iterable[Branch], captured: Collection[int]) -> list[Branch]:
        return sorted(branches)

    monkeypatch.setattr("tiercheck.recovery.finding.past.bearing", all_of_them)
    assert "was promised" in finds("ranks on other nodes", seeds=[9])


def test_a_generation_that_captured_nothing_cuts_its_parent_while_a_tier_is_away(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Past, "_is_cut_short", lambda self, version: False)
    assert "was promised" in finds("several ranks a node", seeds=[107])


# Ranks on other nodes


def test_a_past_on_other_nodes_is_taken_for_a_new_job(monkeypatch: Patch) -> None:
    monkeypatch.setattr(refusals, "check_nothing_is_lost", lambda past, **options: None)
    assert "taken for a new job" in finds("ranks on other nodes, no shared tier")


def test_a_newer_past_on_other_nodes_is_passed_over(monkeypatch: Patch) -> None:
    monkeypatch.setattr(refusals, "check_places", lambda past: None)
    assert "lies on other ranks' nodes" in finds("ranks on other nodes, no shared tier")


def only_own(monkeypatch: Patch) -> None:
    real = opening.superseded_at_opening

    def own(held: Collection[Copy], rank: int, *seen: object) -> list[Copy]:
        return [source for source in real(held, rank, *seen) if source.key.rank == rank]  # type: ignore[arg-type]

    monkeypatch.setattr(opening, "superseded_at_opening", own)


MOVING = ["ranks on other nodes", "ranks on other nodes, no shared tier", "several ranks a node"]


@pytest.mark.parametrize("mode", MOVING)
def test_a_start_leaves_the_memory_of_ranks_that_moved_away(monkeypatch: Patch, mode: str) -> None:
    only_own(monkeypatch)
    assert "not freed" in finds(mode)


def test_movers_leave_the_memory_of_ranks_that_moved_away(monkeypatch: Patch) -> None:
    """What a start could not delete."""
    monkeypatch.setattr(watermark, "left_behind", lambda seen, role: [])
    assert "other ranks' objects are gone" in finds("several ranks a node", seeds=[42])


def test_nobody_frees_the_memory_of_ranks_that_moved_away(monkeypatch: Patch) -> None:
    """Neither at a start nor later, in neither memory."""
    only_own(monkeypatch)
    monkeypatch.setattr(watermark, "left_behind", lambda seen, role: [])
    monkeypatch.setattr(Cluster, "check_freed", lambda self: None)
    assert "other ranks' objects are gone" in finds("ranks on other nodes")


def test_movers_free_what_a_rank_rests_on_while_its_opening_base_is_on_its_way(monkeypatch: Patch) -> None:
    def settled(seen: Observation, mark: CommitKey | None, way: RecoveryPoint | None) -> bool:
        return (mark.generation if mark else way.generation if way else 0) == seen.generation

    monkeypatch.setattr(watermark, "_is_settled", settled)
    assert "cost more" in finds("several ranks a node, no shared tier", seeds=[22])


# Retention


def of_any_past(seen: Observation) -> CommitKey | None:
    commits = seen.contents[seen.durable.index].commits if seen.durable.shared else ()
    return commits[-1] if commits else None


def test_the_watermark_counts_commits_of_another_future(monkeypatch: Patch) -> None:
    monkeypatch.setattr(watermark, "watermark", of_any_past)
    assert "the watermark lies in another future" in finds("damage", seeds=[8])

"""What is deleted from outside: what was said, no more, and whatever interrupts it nothing that was to stay."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiercheck
from tests.archived import FIRST_LIFE, LAST, WORLD, Left, bits, live
from tests.training import Training
from tiercheck.archive.change import deleting
from tiercheck.archive.change.removal import Removal
from tiercheck.archive.changeable import ChangeableArchive
from tiercheck.archive.inventory import Inventory
from tiercheck.errors import ConfigurationError, JobConflict, RecoveryError, TierError, Transient
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.keys import LineageKey
from tiercheck.policy.recovery.spans import Span
from tiercheck.runtime.process_lock import ProcessLock
from tiercheck.testing.faults import FaultPlan, FaultyDriver, Killed, Moment

BASES = (0, 4, 7, 8, 12)


def versions_in(spans: tuple[Span, ...]) -> set[int]:
    return {version for first, last in spans for version in range(first, last + 1)}


def files(root: Path) -> set[str]:
    found = (path for path in root.rglob("*") if path.is_file() and ".tiercheck" not in path.parts)
    return {str(path.relative_to(root)) for path in found}


def check_commits(inventory: Inventory) -> None:
    """No commit record speaks of a shard that is not there."""
    for tier in inventory.tiers:
        for key in tier.commits:
            assert all(key.shard(rank) in tier.objects for rank in range(WORLD)), key


def faulty(monkeypatch: pytest.MonkeyPatch, plan: FaultPlan) -> None:
    """Whatever deletes fails where the plan says, from here on."""
    monkeypatch.setattr(deleting, "Tier", lambda url: Tier(url, wrap=lambda driver: FaultyDriver(driver, plan)))


# Pruning


@pytest.mark.parametrize(
    ("keep", "stays"),
    [
        ({"keep_last": 1}, {12, 13}),
        ({"keep_last": 2}, set(range(8, 14))),
        ({"keep_every": 4}, {0, 4, 8, 12, 13}),
        ({"keep_versions": (5,)}, {4, 5, 6, 12, 13}),
        ({"keep_last": 1, "keep_every": 7, "keep_versions": (9,)}, {0, 7, 8, 9, 10, 12, 13}),
        ({"keep_last": 99}, set(range(14))),
    ],
)
def test_what_no_option_keeps_goes(keep: dict[str, Any], stays: set[int], left: Left) -> None:
    before = files(left.root)
    with tiercheck.open_to_change(left.url) as archive:
        planned = archive.prune(**keep, dry_run=True)
        assert files(left.root) == before
        assert versions_in(planned.versions) == stays
        assert versions_in(planned.lost) == set(range(14)) - stays
        assert planned.refused == ()
        done = archive.prune(**keep)
        assert done == planned
        assert versions_in(archive.versions) == stays
        assert before - files(left.root) == {str(key) for key in planned.gone[0]}
        assert archive.problems == ()
        assert archive.verify().healthy
        check_commits(archive.inventory)
        for version in stays:
            state = archive.rebuild(0, version).state
            assert bits({**state.masters(), **state.buffers()}) == left.weights[0, version]
        assert archive.prune(**keep, dry_run=True).objects == 0


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    last=st.integers(0, 4),
    every=st.integers(0, 5),
    versions=st.frozensets(st.integers(0, LAST), max_size=3),
    killed=st.floats(0, 1),
)
def test_wherever_pruning_is_killed_what_was_to_stay_is_there_and_the_next_run_ends_it(
    last: int,
    every: int,
    versions: frozenset[int],
    killed: float,
    finished: Left,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if not (last or every or versions):
        last = 1
    keep: dict[str, Any] = {"keep_last": last, "keep_every": every, "keep_versions": versions}
    root = tmp_path_factory.mktemp("pruned") / "run"
    shutil.copytree(finished.root, root)
    left = Left(root)
    with pytest.MonkeyPatch.context() as patch, tiercheck.open_to_change(left.url) as archive:
        planned = archive.prune(**keep, dry_run=True)
        points = delete_points(patch, finished, keep, tmp_path_factory.mktemp("whole") / "run")
        if points:
            faulty(patch, FaultPlan.kill_at(points[min(int(killed * len(points)), len(points) - 1)]))
            with pytest.raises(Killed):
                archive.prune(**keep)
        archive.look()
        check_commits(archive.inventory)
        assert versions_in(archive.versions) >= versions_in(planned.versions)
        assert archive.plan().version == LAST
        faulty(patch, FaultPlan())
        archive.prune(**keep)
        assert files(root) == files(finished.root) - {str(key) for key in planned.gone[0]}


def delete_points(patch: pytest.MonkeyPatch, finished: Left, keep: dict[str, Any], root: Path) -> list[int]:
    """The points of an undisturbed run in and around its calls that delete."""
    shutil.copytree(finished.root, root)
    faulty(patch, plan := FaultPlan())
    with tiercheck.open_to_change(Left(root).url) as archive:
        archive.prune(**keep)
    calls = [point for point in plan.points if point.call in ("delete", "list")]
    return [point.index for point in calls if point.moment is not Moment.SUSPENDED]


def test_a_deletion_that_ends_in_the_middle_of_a_call_is_ended_by_the_next_run(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object alone is a call, and the run is killed after each of them in turn."""
    monkeypatch.setattr(deleting, "KEYS_AT_ONCE", 1)
    with tiercheck.open_to_change(left.url) as archive:
        planned = archive.prune(keep_last=1, dry_run=True)
        for _ in range(planned.objects):
            faulty(monkeypatch, FaultPlan.fail_call("delete", Killed, moment=Moment.AFTER))
            with pytest.raises(Killed):
                archive.prune(keep_last=1)
            archive.look()
            check_commits(archive.inventory)
            assert versions_in(archive.versions) >= {12, 13}
        assert archive.prune(keep_last=1, dry_run=True).objects == 0
        assert versions_in(archive.versions) == {12, 13}


def test_nothing_is_pruned_if_what_stays_is_damaged(left: Left) -> None:
    """Else the last whole version would go, and a damaged one stay."""
    left.flip("r00001/g000002/base/000000000012*")
    before = files(left.root)
    with tiercheck.open_to_change(left.url) as archive:
        with pytest.raises(RecoveryError, match=r"what stays is not whole: .*r00001/g000002/base/0+12"):
            archive.prune(keep_last=1)
        archive.prune(keep_last=2, dry_run=True)
    assert files(left.root) == before


def test_pruning_asks_what_is_to_stay_and_keeps_only_what_there_is(left: Left) -> None:
    with tiercheck.open_to_change(left.url) as archive:
        with pytest.raises(ConfigurationError, match="nothing says what to keep"):
            archive.prune()
        with pytest.raises(ConfigurationError, match="version 99 is to be kept, and cannot be read"):
            archive.prune(keep_versions=(99,))
    with (
        tiercheck.open_to_change(f"nvme://{left.root.parent}") as archive,
        pytest.raises(ConfigurationError, match=r"nothing to prune: no job has an object in nvme://.*; check the URL"),
    ):
        archive.prune(keep_last=1)
    left.remove("job/lineage/g000002")
    with tiercheck.open_to_change(left.url) as archive, pytest.raises(RecoveryError, match="missing or damaged"):
        archive.prune(keep_last=1)


def test_a_job_that_runs_goes_on_after_it_was_pruned(name: str, tmp_path: Path) -> None:
    training = Training()
    url = f"nvme://{tmp_path}/run?survives=rack"
    with training.attach(Hierarchy.of(f"shm://{name}?size=16MiB", url), base_every=4, batch=2) as checkpointer:
        for version in range(1, 15):
            training.step(version)
            if version % 5 == 0:
                checkpointer.flush()
                with tiercheck.open_to_change(url) as archive:
                    archive.prune(keep_last=1)
                    with pytest.raises(ConfigurationError, match="--job-is-dead"):
                        archive.rm(job=True)
                    with pytest.raises(JobConflict, match=r"process .* of this node trains rank 0"):
                        archive.rm(job=True, job_is_dead=True)
        assert checkpointer.stats.failed_saves == 0
    with tiercheck.open(url) as archive:
        assert archive.plan().version == 14
        assert archive.verify().healthy


def test_a_generation_that_opens_meanwhile_stops_the_deletion(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiercheck.open_to_change(left.url) as archive:
        before = files(left.root)
        shutil.copy(left.root / "job/lineage/g000002", left.root / "job/lineage/g000003")
        with pytest.raises(JobConflict, match=r"generation 3 of the job has opened .*meanwhile: \d+ objects are left"):
            archive.prune(keep_last=1)
        assert files(left.root) == before | {str(LineageKey(3))}


def test_a_tier_that_deletes_nothing_is_named(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiercheck.open_to_change(left.url) as archive:
        faulty(monkeypatch, FaultPlan.fail_call("delete", lambda: Transient("it is away", tier="t"), times=9))
        with pytest.raises(TierError, match=r"it is away; (\d+) of \1 objects are left, and the same command goes on"):
            archive.prune(keep_last=1)


# Removing


def removed(left: Left, **what: Any) -> Removal:
    with tiercheck.open_to_change(left.url) as archive:
        done = archive.rm(**what)
        assert archive.problems == ()
        check_commits(archive.inventory)
        assert archive.versions == done.versions
        assert archive.verify().healthy
        return done


def test_a_base_goes_with_what_leads_nowhere_without_it(left: Left) -> None:
    with tiercheck.open_to_change(left.url) as archive:
        archive.prune(keep_every=4)  # so that no differentials lead over a base
    assert versions_in(removed(left, version=8).lost) == {8}
    assert not [name for name in files(left.root) if "g000002/base/000000000008" in name]
    assert versions_in(removed(left, version=12, job_is_dead=True).lost) == {12, 13}
    assert not [name for name in files(left.root) if "differential/000000000013" in name]


def test_a_base_that_others_do_without_takes_no_version_with_it(left: Left) -> None:
    done = removed(left, version=8)
    assert done.lost == ()
    assert {str(key) for key in done.gone[0]} >= {f"r0000{rank}/g000002/base/{8:012d}.safetensors" for rank in (0, 1)}


def test_a_generation_and_a_job_go_whole(left: Left) -> None:
    assert versions_in(removed(left, generation=1).lost) == set(range(FIRST_LIFE))
    (left.root / "notes.txt").write_text("not ours")
    with tiercheck.open_to_change(left.url) as archive:
        archive.rm(job=True, job_is_dead=True)
        assert archive.generations == ()
    assert files(left.root) == {"notes.txt"}


def test_after_its_newest_generation_was_removed_a_job_goes_on_from_the_one_before(left: Left, tmp_path: Path) -> None:
    assert versions_in(removed(left, generation=2, job_is_dead=True).lost) == set(range(FIRST_LIFE + 1, LAST + 1))
    live(left, f"again-{tmp_path.name}", LAST + 1)
    with tiercheck.open(left.url) as archive:
        branch = archive.generations[-1].branch
        assert branch is not None
        assert (branch.generation, branch.parent, branch.left_at) == (3, 1, FIRST_LIFE)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"version": 12}, r"which a recovery to version 1\d needs"),
        ({"generation": 2}, r"which a recovery to version 1\d needs"),
        ({"job": True}, "which a recovery to version 12 needs"),
    ],
)
def test_what_a_live_job_needs_is_refused_by_name(what: dict[str, Any], why: str, finished: Left) -> None:
    with (
        tiercheck.open_to_change(finished.url) as archive,
        pytest.raises(ConfigurationError, match=rf"{why}.* \(job_is_dead=True, or --job-is-dead\)"),
    ):
        archive.rm(**what, dry_run=True)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({}, "nothing says what to remove"),
        ({"version": 9}, "there is no base 9; .* there are bases 0, 4, 7, 8, 12"),
        ({"version": 4, "generation": 2}, "there is no base 4 of generation 2; .* there are bases 7, 8, 12"),
        ({"generation": 9}, "there is nothing of generation 9"),
        ({"job": True, "version": 4}, "choose one"),
    ],
)
def test_what_cannot_be_meant_is_refused(what: dict[str, Any], why: str, finished: Left) -> None:
    with tiercheck.open_to_change(finished.url) as archive, pytest.raises(ConfigurationError, match=why):
        archive.rm(**what, dry_run=True)


@pytest.mark.parametrize("what", [{"version": 4}, {"job": True, "job_is_dead": True}])
def test_nothing_is_removed_while_a_tier_cannot_be_asked(what: dict[str, Any], finished: Left, tmp_path: Path) -> None:
    with (
        tiercheck.open_to_change(finished.url, f"nvme://{tmp_path}/missing") as archive,
        pytest.raises(ConfigurationError, match=r"missing cannot be asked what it holds \(.*leave it out, or wait"),
    ):
        archive.rm(**what, dry_run=True)


def test_a_process_of_this_node_that_trains_keeps_its_job(finished: Left) -> None:
    lock = ProcessLock([f"nvme://{finished.root}"], 1)
    try:
        with (
            tiercheck.open_to_change(finished.url) as archive,
            pytest.raises(JobConflict, match=r"process \d+ of this node trains rank 1"),
        ):
            archive.rm(job=True, job_is_dead=True, dry_run=True)
    finally:
        lock.release()


@pytest.mark.parametrize("what", [{"version": 12}, {"generation": 2}, {"job": True}])
def test_wherever_a_removal_is_killed_the_next_one_ends_it(
    what: dict[str, Any], left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleting, "KEYS_AT_ONCE", 1)

    def remaining(archive: ChangeableArchive) -> int:
        try:
            return archive.rm(**what, job_is_dead=True, dry_run=True).objects
        except ConfigurationError:
            return 0

    with tiercheck.open_to_change(left.url) as archive:
        planned = archive.rm(**what, job_is_dead=True, dry_run=True)
        before = files(left.root)
        for _ in range(planned.objects):
            faulty(monkeypatch, FaultPlan.fail_call("delete", Killed, moment=Moment.AFTER))
            with pytest.raises(Killed):
                archive.rm(**what, job_is_dead=True)
            archive.look()
            check_commits(archive.inventory)
            if not remaining(archive):
                break
        assert before - files(left.root) == {str(key) for key in planned.gone[0]}

"""A copy is the job's past in another place, whole or refused, and goes on where it was interrupted."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

import tiercheck
from tests.archived import FIRST_LIFE, LAST, WORLD, Left, bits, live
from tiercheck.archive.change import copying
from tiercheck.archive.inventory import Inventory
from tiercheck.errors import (
    CapacityExceeded,
    ConfigurationError,
    JobConflict,
    RecoveryError,
    Transient,
)
from tiercheck.hierarchy import Tier
from tiercheck.testing.faults import FaultPlan, FaultyDriver, Killed, Moment
from tiercheck.tiers.s3.failures import Refused


def url(root: Path) -> str:
    return f"nvme://{root}?survives=rack"


def files(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file() and ".tiercheck" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def check_commits(inventory: Inventory) -> None:
    """No commit record speaks of a shard that is not there."""
    (tier,) = inventory.tiers
    for key in tier.commits:
        assert all(key.shard(rank) in tier.objects for rank in range(WORLD)), key


def test_everything_is_copied_and_recovers_there(finished: Left, tmp_path: Path) -> None:
    target = url(tmp_path / "copy")
    seen: list[tuple[int, int]] = []
    with tiercheck.open(finished.url) as archive:
        done = archive.copy(target, everything=True, progress=lambda done, total: seen.append((done, total)))
        assert (done.damaged, done.gone, done.versions, done.version) == ([], 0, archive.versions, None)
    assert seen[-1][0] == seen[-1][1] > 0
    kept = {name for name in files(finished.root) if not name.startswith("done/")}
    assert files(tmp_path / "copy") == {name: files(finished.root)[name] for name in kept}
    with tiercheck.open(target) as copy:
        assert copy.problems == ()
        assert copy.verify().healthy
        state = copy.rebuild(1, LAST).state
        assert bits({**state.masters(), **state.buffers()}) == finished.weights[1, LAST]


def test_a_job_goes_on_from_a_copy(finished: Left, tmp_path: Path) -> None:
    target = Left(tmp_path / "copy")
    with tiercheck.open(finished.url) as archive:
        archive.copy(target.url, everything=True)
    live(target, f"copy-{tmp_path.name}", LAST + 1)
    with tiercheck.open(target.url) as copy:
        newest = copy.generations[-1]
        assert newest.branch is not None
        assert (newest.branch.parent, newest.branch.left_at, copy.versions[-1][1]) == (2, LAST, LAST + 1)


@pytest.mark.parametrize("version", [5, LAST])
def test_one_version_is_copied_with_what_leads_to_it(version: int, finished: Left, tmp_path: Path) -> None:
    target = url(tmp_path / "copy")
    with tiercheck.open(finished.url) as archive:
        generation = 1 if version <= FIRST_LIFE else 2
        done = archive.copy(target, version, generation=generation)
        plans = archive.plan(version, generation=generation).plans
    sources = {str(source.key) for plan in plans for source in plan.sources}
    copied = files(tmp_path / "copy")
    assert {name for name in copied if name.startswith("r0")} == sources
    assert version in {v for first, last in done.versions for v in range(first, last + 1)}
    with tiercheck.open(target) as copy:
        assert copy.plan(version).version == version
        check_commits(copy.inventory)
        state = copy.rebuild(0, version).state
        assert bits({**state.masters(), **state.buffers()}) == finished.weights[0, version]


def test_what_is_there_is_not_sent_again(finished: Left, tmp_path: Path) -> None:
    target = url(tmp_path / "copy")
    with tiercheck.open(finished.url) as archive:
        first = archive.copy(target, LAST)
        again = archive.copy(target, LAST)
        assert (again.objects, again.nbytes, again.present) == (0, 0, first.objects)
        rest = archive.copy(target, everything=True)
        assert rest.present == first.objects
    with tiercheck.open(target) as copy:
        assert copy.verify().healthy


@pytest.mark.parametrize("damaged", ["cut", "rotten"])
def test_what_is_there_and_damaged_is_sent_again(damaged: str, finished: Left, tmp_path: Path) -> None:
    target = Left(tmp_path / "copy")
    with tiercheck.open(finished.url) as archive:
        first = archive.copy(target.url, everything=True)
        shard = next(target.root.glob("r00000/g000002/base/*"))
        if damaged == "cut":
            shard.write_bytes(shard.read_bytes()[:-1])
        else:
            target.flip(str(shard.relative_to(target.root)))
        mended = archive.copy(target.url, everything=True)
        assert (mended.objects, mended.present) == (1, first.objects - 1)
    with tiercheck.open(target.url) as copy:
        assert copy.verify().healthy


def faulty(monkeypatch: pytest.MonkeyPatch, plan: FaultPlan) -> None:
    """Targets fail where the plan says, from here on."""
    monkeypatch.setattr(copying, "Tier", lambda to: Tier(to, wrap=lambda driver: FaultyDriver(driver, plan)))


def test_wherever_a_copy_is_killed_nothing_older_is_recovered_and_the_next_one_ends_it(
    finished: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill around every few puts: a recovery from the target comes to the newest version, or is refused; no commit
    record is without its shards."""
    with tiercheck.open(finished.url) as archive:
        faulty(monkeypatch, whole := FaultPlan())
        archive.copy(url(tmp_path / "whole"), everything=True)
        points = [point.index for point in whole.points if point.call == "put" and point.moment is not Moment.SUSPENDED]
        reached = set()
        for index in {*points[::9], *points[-12:]}:
            root = tmp_path / f"killed-{index}"
            faulty(monkeypatch, FaultPlan.kill_at(index))
            with pytest.raises(Killed):
                archive.copy(url(root), everything=True)
            with tiercheck.open(url(root)) as copy:
                check_commits(copy.inventory)
                try:
                    reached.add(copy.plan().version)
                except RecoveryError:
                    reached.add(None)
            faulty(monkeypatch, FaultPlan())
            assert archive.copy(url(root), everything=True).versions == archive.versions
            assert files(root) == files(tmp_path / "whole")
        assert reached == {None, LAST}


def test_a_full_target_is_named_and_keeps_what_it_has(
    finished: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, FaultPlan.full(after_puts=5))
    with tiercheck.open(finished.url) as archive:
        with pytest.raises(CapacityExceeded, match="goes on from here") as error:
            archive.copy(url(tmp_path / "copy"), everything=True)
        assert str(tmp_path / "copy") in str(error.value)
        assert "\n" not in str(error.value)
        monkeypatch.undo()
        assert archive.copy(url(tmp_path / "copy"), everything=True).present == 5


def test_what_a_store_says_of_its_own_is_told_with_how_far_the_copy_came(
    finished: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(FaultyDriver):
        async def put(self, *arguments: Any, **named: Any) -> NoReturn:
            raise Refused("the key is disabled", code="KMS.DisabledException")

    monkeypatch.setattr(copying, "Tier", lambda to: Tier(to, wrap=Refusing))
    said = "the key is disabled; 0 objects are there, and the same copy goes on from here"
    with tiercheck.open(finished.url) as archive, pytest.raises(Refused, match=f"{said} .*copy.*object") as error:
        archive.copy(url(tmp_path / "copy"))
    assert error.value.code == "KMS.DisabledException"


def test_a_torn_shard_is_taken_from_another_tier_or_refused(left: Left, finished: Left, tmp_path: Path) -> None:
    left.flip(f"r00001/g000002/differential/{LAST:012d}-*")
    with tiercheck.open(left.url) as archive:
        with pytest.raises(RecoveryError, match=r"differential/0+13-0+13.* no tier holds it whole"):
            archive.copy(url(tmp_path / "refused"), LAST)
        done = archive.copy(url(tmp_path / "rest"), everything=True)
        assert [each[:24] for each in done.damaged] == ["r00001/g000002/different"]
        assert done.versions[-1][1] == LAST - 1
    with tiercheck.open(left.url, f"nvme://{finished.root}") as both:
        assert both.copy(url(tmp_path / "mended"), LAST).damaged == []


def test_no_commit_record_follows_a_base_that_was_left_out(left: Left, tmp_path: Path) -> None:
    left.flip("r00001/g000002/base/*")
    with tiercheck.open(left.url) as archive:
        archive.copy(url(tmp_path / "rest"), everything=True)
    with tiercheck.open(url(tmp_path / "rest")) as copy:
        check_commits(copy.inventory)


def test_a_target_of_another_job_is_refused(finished: Left, left: Left, tmp_path: Path) -> None:
    other = Left(tmp_path / "other")
    live(other, f"other-{tmp_path.name}", 2)
    before = files(other.root)
    with tiercheck.open(finished.url) as archive:
        with pytest.raises(JobConflict, match="holds another job: generation 1 is"):
            archive.copy(other.url, everything=True)
        with pytest.raises(ConfigurationError, match="onto itself"):
            archive.copy(finished.url)
        with pytest.raises(ConfigurationError, match="one of both"):
            archive.copy(other.url, 5, everything=True)
        with pytest.raises(RecoveryError, match="version 99 cannot be read"):
            archive.copy(other.url, 99)
    assert files(other.root) == before


def test_a_silent_target_is_named_when_the_deadline_has_passed(
    finished: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(FaultyDriver):
        async def put(self, *arguments: Any, **named: Any) -> NoReturn:
            while True:
                await asyncio.Event().wait()

    monkeypatch.setattr(copying, "Tier", lambda to: Tier(to, wrap=Silent))
    with (
        tiercheck.open(finished.url, deadline_s=1.0) as archive,
        pytest.raises(Transient, match=r"was not stored within .*copy"),
    ):
        archive.copy(url(tmp_path / "copy"))


def test_what_a_live_job_deletes_meanwhile_is_told(left: Left, tmp_path: Path) -> None:
    with tiercheck.open(left.url) as archive:
        shutil.rmtree(left.root / "r00000/g000001/differential")
        assert archive.copy(url(tmp_path / "copy"), everything=True).gone > 0
        with pytest.raises(RecoveryError, match="deleted meanwhile"):
            archive.copy(url(tmp_path / "other"), 5, generation=1)

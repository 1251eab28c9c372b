"""What is read of tiers from outside: by the rule of recovery, and without a trace."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiercheck
from tests.archived import FIRST_LIFE, LAST, WORLD, Left, bits
from tests.training import Training
from tiercheck.archive import archive as archive_module
from tiercheck.archive import tiers
from tiercheck.archive.tiers import TierContents
from tiercheck.errors import Closed, ConfigurationError, NotFound, RecoveryError, Transient, Unauthorized, Unsupported
from tiercheck.hierarchy import Hierarchy, OpenTier
from tiercheck.keys import Stream
from tiercheck.runtime import waiting
from tiercheck.tiers.posix.directories.local import ObjectDirectory


def fingerprint(root: Path) -> dict[str, tuple[int, int, int, bytes]]:
    found = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (status.st_ino, status.st_mtime_ns, status.st_mode, content)
    return found


def test_generations_versions_and_bytes_are_listed(finished: Left) -> None:
    with tiercheck.open(finished.url) as archive:
        first, second = archive.generations
        assert (first.number, first.until, second.until) == (1, FIRST_LIFE, None)
        assert second.branch is not None
        assert (second.branch.parent, second.branch.left_at, second.branch.world_size) == (1, FIRST_LIFE, WORLD)
        assert archive.versions == ((0, LAST),)
        bases = [each for each in second.stored if each.stream is Stream.BASE]
        assert all(held.ranks == (0, 1) and held.committed for each in bases for held in each.held)
        (tier,) = archive.inventory.tiers
        files = [path for path in finished.root.rglob("*") if path.is_file() and ".tiercheck" not in path.parts]
        assert tier.nbytes == sum(path.stat().st_size for path in files)
        assert all(held.written_s for generation in archive.generations for s in generation.stored for held in s.held)
        assert archive.problems == ()


def test_nothing_is_written_and_no_lock_is_taken(left: Left) -> None:
    lock = left.root / ".tiercheck" / "lock"
    before = fingerprint(left.root)
    descriptors = set(Path("/proc/self/fd").iterdir())
    with tiercheck.open(left.url) as archive:
        assert lock not in opened_since(descriptors)
        archive.plan()
        archive.show()
        archive.verify()
        archive.rebuild(0)
    assert fingerprint(left.root) == before


def opened_since(before: set[Path]) -> list[Path]:
    return [link.readlink() for link in set(Path("/proc/self/fd").iterdir()) - before if link.is_symlink()]


def test_a_live_job_is_seen_and_not_disturbed(name: str, tmp_path: Path) -> None:
    """Its node's memory and its directory are one view, which is newer than the directory alone."""
    training = Training()
    urls = f"shm://{name}", f"nvme://{tmp_path}/run?survives=rack"
    with training.attach(Hierarchy.of(f"{urls[0]}?size=16MiB", urls[1]), base_every=4, batch=3) as checkpointer:
        for version in range(1, 12):
            training.step(version)
            if version in (2, 6, 11):
                with tiercheck.open(*urls) as archive:
                    assert archive.plan().version == version
                    state = archive.rebuild(0).state.masters()
                    flat = torch.cat([each.flatten() for each in state.values()])
                    assert flat.numpy().tobytes() == training.states[version]
                    assert archive.verify().healthy
        assert checkpointer.stats.failed_saves == 0
    with tiercheck.open(urls[1]) as archive:
        assert archive.versions[-1][1] == 11


def test_what_a_live_job_deletes_while_it_is_read_is_looked_for_again(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    url = f"shm://{name}"
    with (
        training.attach(Hierarchy.of(f"{url}?size=16MiB", f"nvme://{tmp_path}/run?survives=rack"), base_every=4) as job,
    ):
        for version in range(1, 6):
            training.step(version)
        job.flush()
        with tiercheck.open(url) as archive:
            for version in range(6, 18):
                training.step(version)
            job.flush()  # the memory has let go of what was listed
            with pytest.raises(RecoveryError, match=r"version 5 cannot be read; there are .*: it was deleted mean"):
                archive.rebuild(0, 5)
            for version in range(18, 26):
                training.step(version)
            job.flush()
            state = archive.rebuild(0)
            flat = torch.cat([each.flatten() for each in state.state.masters().values()])
            assert (state.version, flat.numpy().tobytes()) == (25, training.states[25])
            assert any("version 17 was deleted while it was read" in each for each in caplog.messages)
            for version in range(26, 34):
                training.step(version)
            job.flush()
            assert archive.export(tmp_path / "model.safetensors").version == 33
            assert archive.copy(f"nvme://{tmp_path}/copied").version == 33
            assert archive.diff(33, 33).versions == (33, 33)
            for version in range(34, 50):
                training.step(version)
            job.flush()
            with pytest.raises(RecoveryError, match=r"version 33 cannot be read; there are .*: it was deleted mean"):
                archive.diff(33, 33)


def test_a_job_that_is_faster_than_its_reader_is_told_of(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiercheck.open(left.url) as archive:
        monkeypatch.setattr(archive, "_is_gone", lambda *_: True)
        left.flip("r00000/g000002/differential/000000000013-*")
        with pytest.raises(RecoveryError, match=f"version {LAST}: the job that goes on deletes each version before it"):
            archive.rebuild(0)


def test_a_directory_that_may_not_be_written_and_lacks_our_own_is_read(left: Left) -> None:
    shutil.rmtree(left.root / ".tiercheck")  # as a copy by another program lacks it
    with tiercheck.open(left.url) as archive:
        assert archive.versions[-1][1] == LAST
    assert not (left.root / ".tiercheck").exists()


def test_the_plan_is_recoverys_and_names_every_object(finished: Left) -> None:
    with tiercheck.open(finished.url) as archive:
        chosen = archive.plan()
        assert chosen.version == LAST
        for rank, plan in enumerate(chosen.plans):
            versions = [version for source in plan.batches for version in source.key.versions]
            assert versions == list(range(chosen.points[rank].anchor + 1, LAST + 1))
            assert all((finished.root / str(source.key)).is_file() for source in plan.sources)


def test_several_tiers_are_one_view(left: Left, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(left.root / "job", other / "job")
    shutil.move(left.root / "r00001", other / "r00001")
    with tiercheck.open(left.url) as half:
        assert half.versions == ()
        with pytest.raises(RecoveryError, match="no version can be read"):
            half.plan()
    with tiercheck.open(left.url, f"nvme://{other}") as archive:
        assert archive.versions[-1][1] == LAST
        assert archive.problems == ()
        assert {source.tier for plan in archive.plan().plans for source in plan.sources} == {0, 1}
        state = archive.rebuild(1)
        assert bits({**state.state.masters(), **state.state.buffers()}) == left.weights[1, LAST]


def test_a_version_is_chosen_by_number_and_as_of_a_generation(finished: Left) -> None:
    with tiercheck.open(finished.url) as archive:
        assert archive.plan(FIRST_LIFE, generation=1).points[0].generation == 1
        assert archive.plan(LAST - 1).version == LAST - 1
        with pytest.raises(RecoveryError, match=rf"version {LAST + 1} cannot be read; there are .*{LAST}"):
            archive.plan(LAST + 1)
        with pytest.raises(RecoveryError, match=r"no generation 9 here .* there are 1, 2"):
            archive.plan(1, generation=9)


def test_what_is_damaged_or_foreign_is_told_of_and_not_tripped_over(left: Left) -> None:
    (left.root / "notes.txt").write_text("not ours")
    record = left.root / "job/lineage/g000002"
    record.write_bytes(record.read_bytes()[:20])
    with tiercheck.open(left.url) as archive:
        assert any("1 objects in nvme are not TierCheck's: notes.txt" in each for each in archive.problems)
        assert any("job/lineage/g000002 in nvme is damaged" in each for each in archive.problems)
        assert archive.generations[-1].branch is None
        # As a recovery does: without the record nobody knows what the newest generation belongs to.
        with pytest.raises(RecoveryError, match="record job/lineage/g000002 is missing or damaged"):
            archive.plan()
        assert archive.plan(FIRST_LIFE).points[0].generation == 1


@pytest.fixture
def hung(left: Left, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A mount that hangs: calls of this name do not return, whoever gives up on them."""
    comes_back = threading.Event()

    def hang(name: str) -> None:
        real = getattr(ObjectDirectory, name)

        def call(directory: ObjectDirectory, *arguments: Any) -> Any:
            if directory.root == left.root:
                comes_back.wait(60)
            return real(directory, *arguments)

        monkeypatch.setattr(ObjectDirectory, name, call)

    monkeypatch.setattr(archive_module, "CLOSE_S", 0.2)
    monkeypatch.setattr(tiers, "CLOSE_S", 0.2)
    monkeypatch.setattr(waiting, "WITHDRAWAL_S", 0.1)
    yield hang
    comes_back.set()


def test_a_mount_that_hangs_is_told_of_and_the_others_are_shown(
    hung: Callable[[str], None], left: Left, finished: Left
) -> None:
    hung("prepare_to_read")
    with tiercheck.open(left.url, finished.url, deadline_s=2) as archive:
        away, shown = archive.inventory.tiers
        assert away.away is not None
        assert "could not be opened within 2 s" in away.away
        assert (shown.away, archive.versions[-1][1]) == (None, LAST)
    with pytest.raises(Transient, match=r"could not be opened within 2 s.*" + str(left.root)):
        tiercheck.open(left.url, deadline_s=2)


def test_a_mount_that_hangs_while_it_is_verified_is_waited_for_once(hung: Callable[[str], None], left: Left) -> None:
    with tiercheck.open(left.url, deadline_s=2) as archive:
        hung("open_object")
        found = archive.verify()
        assert {each.unread for each in found.damaged} == {True}
        assert len(found.damaged) == found.objects > 8
        assert "the tier did not answer within 2" in found.damaged[0].reason
        assert not found.healthy


def test_a_tier_that_is_away_is_told_of_and_the_others_are_shown(finished: Left, tmp_path: Path) -> None:
    with tiercheck.open(finished.url, f"nvme://{tmp_path}/missing") as archive:
        assert archive.versions[-1][1] == LAST
        assert any("nvme-2" in each and "there is no directory" in each for each in archive.problems)
        found = archive.verify()
        assert (found.lost, found.away, found.healthy) == ((), ("nvme-2",), False)
    with pytest.raises(NotFound, match="there is no directory"):
        tiercheck.open(f"nvme://{tmp_path}/missing")
    with pytest.raises(ConfigurationError):
        tiercheck.open("nvme:///a/b?colour=red")


def test_tiers_none_of_which_can_be_listed_are_an_error(finished: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a place that this user may not read would look like an empty one."""

    async def listed(tier: OpenTier) -> TierContents:
        raise Unauthorized("it refuses this user", tier=tier.driver.url)

    monkeypatch.setattr(tiers, "_listed", listed)
    with pytest.raises(Unauthorized, match=r"it refuses this user .*nvme"):
        tiercheck.open(finished.url)


def test_a_closed_archive_says_so(finished: Left) -> None:
    archive = tiercheck.open(finished.url)
    archive.close()
    archive.close()
    with pytest.raises(Closed, match="open it again"):
        archive.look()


def test_an_empty_place_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with tiercheck.open(f"nvme://{tmp_path}/empty") as archive:
        assert (archive.versions, archive.generations, archive.problems) == ((), (), ())
        with pytest.raises(RecoveryError, match="there is no shard of any rank"):
            archive.plan()
        assert archive.verify().healthy


def test_a_rank_that_the_version_does_not_have_is_refused(finished: Left) -> None:
    with tiercheck.open(finished.url) as archive, pytest.raises(RecoveryError, match="of 2 ranks; there is no rank 2"):
        archive.show(rank=2)
    for rank in (2, -1):
        with tiercheck.open(finished.url) as archive, pytest.raises(RecoveryError, match=f"there is no rank {rank}"):
            archive.rebuild(rank)


def test_whatever_would_write_is_refused(finished: Left) -> None:
    with tiercheck.open(finished.url) as archive:
        driver = archive._hierarchy.tiers[0].driver
        with pytest.raises(Unsupported, match="opened to read"):
            archive._call(driver.delete(["r00000/x"]))
        with pytest.raises(Unsupported, match="opened to read"):
            archive._call(driver.put("x", [b"y"]))

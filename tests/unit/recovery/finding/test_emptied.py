"""A shared tier that is empty, and was not, is never taken for a new one while some memory tells of it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.training import Training, life, memory
from tiercheck.checkpointer import Checkpointer
from tiercheck.errors import RecoveryError, SaveError
from tiercheck.hierarchy import Hierarchy
from tiercheck.tiers.registry import make_driver

REFUSED = r"tier nvme has no record of this job, though this node's memory says .* is not mounted, or was emptied"


def trained(tiers: Hierarchy, first: int, last: int) -> Training:
    training = Training()
    with life(training.attach(tiers, base_every=4)):
        assert training.checkpointer is not None
        assert training.checkpointer.version == first - 1
        training.states[first - 1] = training.parameters()
        for version in range(first, last + 1):
            training.step(version)
    return training


def contents(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("r0*/**/*") if each.is_file()}


def test_an_emptied_store_is_refused_and_nothing_is_put_there(tmp_path: Path) -> None:
    store, first = tmp_path / "store", memory()
    tiers = Hierarchy.of(first, f"nvme://{store}?survives=rack")
    before = trained(tiers, 1, 6)
    store.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(RecoveryError, match=REFUSED):
            Training().attach(tiers)
    assert contents(store) == {}
    # Mounted again, it serves, and so does memory.
    for each in sorted(store.rglob("*"), reverse=True):
        each.rmdir() if each.is_dir() else each.unlink()
    store.rmdir()
    (tmp_path / "away").rename(store)
    after = trained(tiers, 7, 8)
    assert after.states[6] == before.states[6]


def test_a_store_that_was_emptied_on_purpose_gets_another_place(tmp_path: Path) -> None:
    first = memory()
    before = trained(Hierarchy.of(first, f"nvme://{tmp_path}/one?survives=rack"), 1, 6)
    trained(Hierarchy.of(first, f"nvme://{tmp_path}/two?survives=rack"), 7, 9)
    alone = Training()
    alone.attach(Hierarchy.of(memory(), f"nvme://{tmp_path}/two?survives=rack")).abort()
    assert alone.parameters() != before.states[6]
    assert contents(tmp_path / "two")


def test_a_store_that_was_away_from_the_first_start_on_is_new_to_the_job(tmp_path: Path) -> None:
    """A file is in the way of its directory, so that it could not be opened before."""
    first = memory()
    before = trained(Hierarchy.of(first), 1, 2)
    (tmp_path / "store").write_bytes(b"in the way")
    tiers = Hierarchy.of(first, f"nvme://{tmp_path}/store?survives=rack")
    training = Training()
    checkpointer = training.attach(tiers, deadline_s=4.0)
    assert training.parameters() == before.states[2]
    training.step(3)
    checkpointer.abort()
    (tmp_path / "store").unlink()
    trained(tiers, 4, 5)
    assert contents(tmp_path / "store")


def test_a_store_that_was_away_and_is_empty_then_is_refused(tmp_path: Path) -> None:
    """Also while the job runs, and at the start after the one for which it was away."""
    store, first = tmp_path / "store", memory()
    tiers = Hierarchy.of(first, f"nvme://{store}?survives=rack")
    before = trained(tiers, 1, 6)
    store.rename(tmp_path / "away")
    store.write_bytes(b"in the way")
    training = Training()
    checkpointer = training.attach(tiers, base_every=4, deadline_s=4.0)
    assert training.parameters() == before.states[6]
    store.unlink()
    for version in (7, 8):
        training.step(version)
    with pytest.raises(SaveError, match="it has no record of this job, though this node's memory says"):
        checkpointer.flush()
    checkpointer.abort()
    assert contents(store) == {}
    with pytest.raises(RecoveryError, match=REFUSED):
        Training().attach(tiers)
    shutil.rmtree(store)
    (tmp_path / "away").rename(store)
    after = trained(tiers, 9, 10)
    assert after.states[8] == training.parameters()


async def remove(url: str, prefix: str) -> int:
    """Behind the job's back. Returns how many objects."""
    async with make_driver(url) as driver:
        found = [info.key async for info in driver.list(prefix)]
        await driver.delete(found)
    return len(found)


def flushed(store: str, deadline_s: float) -> tuple[Training, Checkpointer]:
    """A job that goes on, of which the store has everything so far."""
    training = Training()
    checkpointer = training.attach(Hierarchy.of(memory(), store), base_every=2, deadline_s=deadline_s)
    for version in range(1, 5):
        training.step(version)
    checkpointer.flush()
    return training, checkpointer


def test_a_store_that_is_emptied_while_the_job_runs_is_an_error_and_nothing_more_is_put_there(tmp_path: Path) -> None:
    store = f"nvme://{tmp_path}/store?survives=rack"
    _, checkpointer = flushed(store, 4.0)
    assert asyncio.run(remove(store, "")) > 5
    with pytest.raises(SaveError, match="it no longer has what this job has saved there: it was emptied"):
        checkpointer.flush()
    checkpointer.abort()
    assert asyncio.run(remove(store, "")) == 0


def test_a_record_that_somebody_has_removed_is_put_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a rule of a bucket may, that removes what is oldest: nobody could read what is there without it."""
    store = f"nvme://{tmp_path}/store?survives=rack"
    training, checkpointer = flushed(store, 10.0)
    assert asyncio.run(remove(store, "job/lineage/")) == 1
    training.step(5)
    checkpointer.close()
    assert "somebody has removed job/lineage/g000001 from the tier nvme" in caplog.text
    alone = Training()
    alone.attach(Hierarchy.of(memory(), store)).abort()
    assert alone.parameters() == training.states[5]


def test_a_start_without_the_store_names_the_versions_that_memory_loses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, first = tmp_path / "store", memory()
    tiers = Hierarchy.of(first, f"nvme://{store}?survives=rack")
    trained(tiers, 1, 2)
    store.rename(tmp_path / "away")
    store.write_bytes(b"in the way")
    training = Training()
    checkpointer = training.attach(tiers, base_every=4, deadline_s=4.0)
    for version in range(3, 8):
        training.step(version)
    checkpointer.abort()
    assert "are deleted from memory" not in caplog.text
    Training().attach(tiers, deadline_s=4.0).abort()
    told = "are deleted from memory: no start can go back to them, unless nvme, which could not be asked, has them"
    assert f"versions 0..3 {told}" in caplog.text


def test_a_job_whose_memory_is_gone_knows_of_no_store(tmp_path: Path) -> None:
    """Nothing tells: that is what mount= is for."""
    tiers = Hierarchy.of(memory(), f"nvme://{tmp_path}/store?survives=rack")
    trained(tiers, 1, 2)
    assert trained(Hierarchy.of(memory(), f"nvme://{tmp_path}/other?survives=rack"), 1, 1)

"""Garbage is what nobody holds, and nothing else."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import NoReturn

import pytest

from tests.archived import Left
from tiercheck.archive.change import leftovers
from tiercheck.archive.change.leftovers import FoundLeftover, collect
from tiercheck.errors import ConfigurationError, DeadlineExceeded, NotFound
from tiercheck.tiers.posix.directories.object_files import HOST
from tiercheck.tiers.posix.files import try_lock, unlock_and_close
from tiercheck.tiers.shm.namespaces import (
    NamespaceKind,
    hold_namespace,
    namespace_path,
    release_namespace,
    remove_unheld,
)

HOUR = 3600.0


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """A place for namespaces of this test alone."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def made(name: str, mount: Path, kind: NamespaceKind = NamespaceKind.OWN) -> Path:
    root = namespace_path(name, mount)
    release_namespace(hold_namespace(root, kind))
    (root / "object").write_bytes(b"x" * 100)
    return root


def by_name(found: tuple[FoundLeftover, ...]) -> dict[str, FoundLeftover]:
    return {each.left.name: each for each in found}


def test_memory_that_nobody_holds_goes_and_what_a_process_holds_stays(mount: Path) -> None:
    dead, kept, held = made("dead", mount), made("kept", mount, NamespaceKind.NEIGHBOURS), made("held", mount)
    fd = hold_namespace(held)
    try:
        dry = by_name(collect(older_than_s=0, dry_run=True, mount=mount))
        assert {name: each.stays for name, each in dry.items()} == {
            "dead": None,
            "held": "a process has it open",
            "kept": None,
        }
        assert dry["dead"].left.nbytes >= 100  # type: ignore[operator]  # it is told
        assert (dry["dead"].left.what, dry["kept"].left.what) == ("memory of a job", "copies kept for neighbours")
        assert dead.exists() and kept.exists()
        done = by_name(collect(older_than_s=0, mount=mount))
        assert {name for name, each in done.items() if each.removed} == {"dead", "kept"}
        assert (dead.exists(), kept.exists(), held.exists()) == (False, False, True)
        assert (held / "object").exists()
    finally:
        release_namespace(fd)


def test_memory_of_a_job_that_has_just_failed_stays(mount: Path) -> None:
    root = made("failed", mount)
    (each,) = collect(older_than_s=HOUR, mount=mount)
    assert (each.removed, each.left.age_s < HOUR) == (False, True)
    assert each.stays == "changed in the last 1 h: a job may come back for it"
    assert root.exists()


def test_what_is_opened_between_the_look_and_the_removal_stays(mount: Path) -> None:
    """And nobody is asked to let go of it."""
    root = made("taken", mount)
    fd = hold_namespace(root)
    try:
        assert remove_unheld("taken", 0, mount) is False
        assert not (root / ".tiercheck" / "leave").exists()
    finally:
        release_namespace(fd)
    assert remove_unheld("taken", HOUR, mount) is False, "it has changed meanwhile"
    assert remove_unheld("taken", 0, mount) is True
    assert remove_unheld("taken", 0, mount) is True, "it is gone"


def temporary(left: Left, host: str, age_s: float) -> Path:
    path = left.root / ".tiercheck" / "tmp" / f"{host}-1-{os.urandom(4).hex()}"
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_temporary_files_of_dead_writers_go(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.tiers.posix.directories.debris.DEBRIS_AGE_S", 0.0)
    dead, foreign = temporary(left, HOST, 0), temporary(left, "elsewhere", 0)
    alive = temporary(left, HOST, 0)
    fd = os.open(alive, os.O_RDWR)
    assert try_lock(fd)
    try:
        (dry,) = collect(left.url, dry_run=True)
        assert (dry.left.what, dry.left.name, dry.left.nbytes) == ("temporary file", f".tiercheck/tmp/{dead.name}", 4)
        assert dead.exists()
        (done,) = collect(left.url)
        assert (done.removed, done.where.partition("?")[0]) == (True, f"nvme://{left.root}")
        assert (dead.exists(), alive.exists(), foreign.exists()) == (False, True, True)
        assert collect(left.url) == ()
    finally:
        unlock_and_close(fd)


def test_a_file_whose_writer_may_have_yet_to_lock_it_is_not_looked_at(left: Left) -> None:
    temporary(left, HOST, 0)
    assert collect(left.url, dry_run=True) == ()


def test_a_place_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no directory"):
        collect(f"nvme://{tmp_path}/missing")
    with pytest.raises(ConfigurationError):
        collect("nothing")
    assert not (tmp_path / "missing").exists()


def test_a_password_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object, **__: object) -> NoReturn:
        while True:
            await asyncio.Event().wait()

    monkeypatch.setattr(leftovers, "of_tier", silent)
    with pytest.raises(DeadlineExceeded, match=r"looking for leftovers in fsspec\+sftp://\*\*\*@host/run") as error:
        collect("fsspec+sftp://user:hunter2@host/run?fs.password=hunter2", deadline_s=0.01)
    assert "hunter2" not in str(error.value)


def test_a_directory_without_our_own_has_no_leftovers(left: Left) -> None:
    shutil.rmtree(left.root / ".tiercheck")
    assert collect(left.url, dry_run=True) == ()

"""Races under faults on every driver, with real processes and servers that are killed: nothing is lost.

A second of them here, or until each driver has met faults; ``make soak`` goes on for half an hour.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak import supervise
from benchmarks.soak.limited import LimitedDirectory
from benchmarks.soak.stores import STORES, Store, Wrong
from benchmarks.soak.supervise import Account, soak

pytestmark = pytest.mark.cluster

SECONDS = 1
SOAK_S_MAX = 280
ENOUGH_OPERATIONS = 50
ROOT = Path(__file__).absolute().parents[3]


@pytest.mark.timeout(600)
def test_races_under_faults_lose_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks", "soak", "--minutes", str(SECONDS / 60)]
    soaking = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, progress = soaking.communicate(timeout=SOAK_S_MAX)
    except subprocess.TimeoutExpired:
        soaking.terminate()  # it takes down its servers and mounts
        out, progress = soaking.communicate(timeout=SOAK_S_MAX)
    told = f"{out}\n{progress}"  # the seed is in it
    accounts = {line["soak"]: line for line in map(json.loads, out.splitlines())}
    assert set(accounts) == set(STORES), told
    assert soaking.returncode == 0, told
    ran = {name: line for name, line in accounts.items() if "skipped" not in line}
    assert {"memory", "shm", "nvme", "lustre", "wrappers", "peer"} <= set(ran), told
    if os.environ.get("CI"):
        assert ran == accounts, told
    for name, line in ran.items():
        assert line["lost"] == 0, told
        assert line["operations"] > ENOUGH_OPERATIONS, f"{name} was hardly tried: {told}"
        assert line["turned_out_new"] + line["turned_out_old"] > 0, f"{name} met no fault: {told}"
        if name != "memory":
            assert line["faults"]["process killed"] > 0, told
            assert line["opens"] > 2, f"{name}: no worker came back: {told}"


def soak_files(
    root: Path,
    wrongs: tuple[Wrong, ...] = (),
    *,
    url: str | None = None,
    seconds: float = 30.0,
    stopping: threading.Event | None = None,
) -> Account:
    @contextlib.contextmanager
    def store() -> Iterator[Store]:
        yield Store(url or f"nvme://{root}/tier", wrongs=wrongs)

    return soak("files", store, seconds=seconds, seed=3, stopping=stopping or threading.Event())


def some_objects(root: Path) -> list[Path]:
    """The objects' files, once the workers have made a few."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        # A folder may go while one looks: os.walk passes over it, Path.rglob does not.
        found = sorted(Path(at, name) for at, _, names in os.walk(root / "tier" / "soak") for name in names)
        if len(found) > 8:
            return found
        time.sleep(0.01)
    raise AssertionError("the workers made no objects in 30 s")


def test_what_somebody_else_removes_is_a_loss(tmp_path: Path) -> None:
    stopping = threading.Event()

    def remove_some(chance: random.Random) -> None:
        objects = some_objects(tmp_path)
        for path in chance.sample(objects, len(objects) // 2):
            path.unlink(missing_ok=True)
        stopping.set()

    account = soak_files(tmp_path, (Wrong("vandal", remove_some, lambda: None, 0.1),), stopping=stopping)
    assert account.faults["vandal"] > 0
    assert "an object is gone" in {loss["lost"] for loss in account.losses}
    line = account.line()
    assert line["lost"] == len(account.losses) > 0
    assert line["seed"] == 3
    assert line["losses"]


def test_what_somebody_else_changes_is_a_loss(tmp_path: Path) -> None:
    stopping = threading.Event()

    def damage_some(chance: random.Random) -> None:
        for path in some_objects(tmp_path)[::2]:
            with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                file.write(b"!")
        stopping.set()

    account = soak_files(tmp_path, (Wrong("vandal", damage_some, lambda: None, 0.1),), stopping=stopping)
    assert account.faults["vandal"] > 0
    assert "an object is damaged" in {loss["lost"] for loss in account.losses}


def test_workers_that_cannot_work_are_told(tmp_path: Path) -> None:
    account = soak_files(tmp_path, url="nvme://relative", seconds=20)
    told = [loss for loss in account.losses if loss["lost"] == "a worker ended by itself"]
    assert told
    assert "absolute directory" in told[0]["text"]
    assert account.seconds < 20, "a soak without workers ends"


def test_a_worker_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "END_S_MAX", 1.0)
    monkeypatch.setattr(supervise, "STACKS_S", 0.1)

    def stop_workers(chance: random.Random) -> None:
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        for child in children:
            if b"benchmarks.soak.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGSTOP)
        monkeypatch.setattr(supervise, "STALL_S_MAX", 1.0)  # before, a busy machine may make them wait longer

    account = soak_files(tmp_path, (Wrong("stopped", stop_workers, lambda: None, 0.1),), seconds=40)
    assert account.faults["stopped"] > 0
    told = {loss["lost"] for loss in account.losses}
    assert {"a worker hangs", "a worker does not end"} <= told
    assert account.seconds < 40


def test_a_limited_directory_is_full_and_free_again() -> None:
    for kind in ("tmpfs", "ext4"):
        with LimitedDirectory(kind, 16 << 20) as room:
            if not room.limited:
                pytest.skip(room.why)
            (room.path / "before").write_bytes(b"x")
            room.fill(0)
            with pytest.raises(OSError, match="No space left") as raised:
                (room.path / "object").write_bytes(bytes(1 << 20))
            assert raised.value.errno == errno.ENOSPC
            room.free()
            room.free()
            (room.path / "object").write_bytes(bytes(1 << 20))
            path = room.path
        assert not path.exists()

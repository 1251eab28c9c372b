"""One live process per tier and rank on a node, however it comes to the tier."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from tiercheck.errors import ConfigurationError, JobConflict
from tiercheck.runtime import process_lock
from tiercheck.runtime.process_lock import ProcessLock, holder_of

HOLD = """
import sys
from tiercheck.runtime.process_lock import ProcessLock
lock = ProcessLock(sys.argv[1:], 0)
print("held", flush=True)
input()
"""


@pytest.fixture
def url() -> str:
    return f"shm://claimed-{uuid.uuid4().hex}"


def test_a_process_with_another_temporary_directory_is_refused_too(url: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert holder_of(url, 0) == str(other.pid)
        with pytest.raises(JobConflict, match=rf"another job on this node \(process {other.pid}\) is using {url}"):
            ProcessLock([url], 0)
        other.kill()
    assert holder_of(url, 0) is None
    ProcessLock([url], 0).release()  # what a process that was killed has left is in nobody's way
    assert not list(tmp_path.iterdir())


def test_a_directory_is_one_whatever_path_leads_there(tmp_path: Path) -> None:
    (tmp_path / "a place").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a place")
    lock = ProcessLock([f"nvme://{tmp_path}/a%20place/run?survives=rack"], 0)
    with pytest.raises(JobConflict, match=r"this process is using nvme://.*/link/run for rank 0 already"):
        ProcessLock([f"nvme://{tmp_path}/link/run"], 0)
    ProcessLock([f"nvme://{tmp_path}/link/run"], 1).release()
    with pytest.raises(JobConflict, match=r"this process is using lustre://.*/link/run/ for rank 0 already"):
        ProcessLock([f"lustre://{tmp_path}/link/run/"], 0)
    ProcessLock([f"s3://bucket{tmp_path}/link/run"], 0).release()
    lock.release()
    ProcessLock([f"nvme://{tmp_path}/link/run"], 0).release()


def test_a_bucket_is_one_with_a_slash_behind_it_and_without() -> None:
    name = f"s3://claimed-{uuid.uuid4().hex}/run"
    lock = ProcessLock([f"{name}?region=here"], 0)
    assert holder_of(f"{name}/", 0) == str(os.getpid())
    assert holder_of(f"{name}-2", 0) is None
    lock.release()


def test_it_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str) -> None:
    monkeypatch.setattr(process_lock, "SHARED_MEMORY", tmp_path)
    lock = ProcessLock([url, "nvme:///somewhere"], 3)
    (directory,) = tmp_path.iterdir()
    assert len(list(directory.iterdir())) == 2
    lock.release()
    lock.release()
    assert not list(directory.iterdir())


def test_who_finds_the_file_of_a_lock_that_was_just_given_back_makes_another(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """Two processes that each have a file of the name locked would both take the tier for theirs."""
    first = [ProcessLock([url], 0)]
    lock_file = process_lock.fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        while first:
            first.pop().release()  # after this one has opened the file, and before it has locked it
        lock_file(descriptor, operation)

    monkeypatch.setattr(process_lock.fcntl, "flock", flock)
    lock = ProcessLock([url], 0)
    with pytest.raises(JobConflict):
        ProcessLock([url], 0)
    lock.release()


def test_a_forked_child_does_not_hold_its_parent_s(url: str) -> None:
    lock = ProcessLock([url], 0)
    ready, started = os.pipe()
    child = os.fork()
    if not child:
        os.write(started, b"x")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        with pytest.raises(JobConflict):
            ProcessLock([url], 0)
        lock.release()
        ProcessLock([url], 0).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(started)


def test_without_a_place_for_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(process_lock, "SHARED_MEMORY", tmp_path / "file")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match=r"is locked by a file in .*/file, which failed: .* can write to"):
        ProcessLock([url], 0)


def test_a_file_system_that_does_not_answer_holds_up_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It resumes from memory: a lock is named by the path as it is given then."""
    leave = threading.Event()
    monkeypatch.setattr(process_lock, "ANSWER_S", 0.05)
    monkeypatch.setattr("os.path.realpath", lambda path: leave.wait(30) and path)
    try:
        lock = ProcessLock([f"nvme://{tmp_path}/run/"], 0)
        assert f"{tmp_path}/run/ does not answer" in caplog.text
        with pytest.raises(JobConflict, match="this process is using"):
            ProcessLock([f"nvme://{tmp_path}/./run"], 0)
        lock.release()
    finally:
        leave.set()


def test_another_start_is_refused_whatever_numbers_its_ranks_have(url: str) -> None:
    """The first job has rank 1 on this node, and the second one rank 0."""
    first = [ProcessLock([url], rank, "first") for rank in (1, 2)]
    with pytest.raises(
        JobConflict, match=rf"another job on this node \(process {os.getpid()}, of other ranks\).*{url}"
    ):
        ProcessLock([url], 0, "second")
    assert holder_of(url, 0) is None, "nothing is locked"
    first[0].release()
    with pytest.raises(JobConflict):
        ProcessLock([url], 0, "second")
    ProcessLock([url], 3, "first").release()
    first[1].release()
    ProcessLock([url], 0, "second").release()
    assert not list(process_lock._directory().glob(process_lock._name(url, "job"))), "nothing is left"


def test_one_of_two_starts_at_a_time_gets_the_tier(url: str) -> None:
    """Ranks of both, all at once and again and again: never two jobs, and never none."""
    for _ in range(50):
        ends: list[tuple[str, ProcessLock | JobConflict]] = []
        ready = threading.Barrier(6)

        def start(rank: int, name: str, ready: threading.Barrier = ready, ends: list[Any] = ends) -> None:
            ready.wait()
            try:
                ends.append((name, ProcessLock([url], rank, name)))
            except JobConflict as error:
                ends.append((name, error))

        threads = [threading.Thread(target=start, args=(n, ("first", "second")[n % 2])) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        got = [(name, each) for name, each in ends if isinstance(each, ProcessLock)]
        assert len(ends) == 6
        assert len({name for name, _ in got}) == 1
        assert len(got) == 3
        for _, lock in got:
            lock.release()


def test_a_start_is_let_in_though_memory_is_full(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back for what fills it."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    locks = [ProcessLock([url], rank, "first") for rank in (0, 1)]
    for lock in locks:
        lock.release()

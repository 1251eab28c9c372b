"""Threads for calls that may never return."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest

from tiercheck.runtime.daemon_threads import DaemonThreads
from tiercheck.tiers.posix import file_driver
from tiercheck.tiers.posix.nvme import NvmeDriver
from tiercheck.tiers.posix.transfer import Blocks

DEADLINE_S = 30.0


def test_no_more_are_at_work_than_were_asked_for_and_all_is_done() -> None:
    threads = DaemonThreads(3, "some")
    guard, names = threading.Lock(), set[str]()
    together = threading.Barrier(3)

    def note(number: int) -> int:
        if number < 3:
            together.wait(DEADLINE_S)
        with guard:
            names.add(threading.current_thread().name)
        return number

    futures = [threads.submit(lambda number=number: note(number)) for number in range(50)]  # type: ignore[misc]
    assert [each.result(DEADLINE_S) for each in futures] == list(range(50))
    assert names == {"some_0", "some_1", "some_2"}
    threads.end()
    threads.end()
    threads.ended.result(DEADLINE_S)
    with pytest.raises(RuntimeError, match="have ended"):
        threads.submit(int)


def test_one_thread_serves_calls_that_come_one_after_the_other() -> None:
    threads = DaemonThreads(4, "one")
    names = set[str]()
    for _ in range(20):
        threads.submit(lambda: names.add(threading.current_thread().name)).result(DEADLINE_S)
        assert threads._idle.acquire(timeout=DEADLINE_S), "the thread waits for the next"
        threads._idle.release()
    threads.end()
    assert names == {"one_0"}


def test_an_error_is_the_callers_and_a_cancelled_call_is_not_begun() -> None:
    threads = DaemonThreads(1, "errors")
    leave, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert leave.wait(DEADLINE_S)

    held = threads.submit(hold)
    assert begun.wait(DEADLINE_S)
    never = threads.submit(lambda: pytest.fail("was cancelled"))
    assert never.cancel()
    failing = threads.submit(lambda: 1 // 0)
    leave.set()
    assert wait([held, failing], DEADLINE_S).not_done == set()
    assert isinstance(failing.exception(), ZeroDivisionError)
    threads.end()
    threads.ended.result(DEADLINE_S)


def test_they_end_at_once_if_none_was_needed() -> None:
    threads = DaemonThreads(1, "none")
    threads.end()
    threads.ended.result(0)


HANGS = """
import asyncio, os, sys, threading
from tiercheck.tiers.posix import file_driver
from tiercheck.tiers.registry import make_driver

file_driver.ENDING_S = 0.2
hung, never = threading.Event(), threading.Event()
fsync = os.fsync

def hangs(fd):
    if threading.current_thread().name.startswith("tiercheck"):
        hung.set()
        never.wait()
    fsync(fd)

async def main():
    driver = make_driver(sys.argv[1])
    await driver.open()
    os.fsync = hangs
    put = asyncio.ensure_future(driver.put("key", [b"content"]))
    await asyncio.to_thread(hung.wait)
    await driver.close()
    assert not put.done()
    print("closed", flush=True)
    os.fsync = fsync
    loop = asyncio.get_running_loop()
    loop.stop()

loop = asyncio.new_event_loop()
loop.create_task(main())
loop.run_forever()
"""


async def test_a_driver_that_closed_beside_a_slow_call_leaves_no_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_driver, "ENDING_S", 0.05)
    before = set(threading.enumerate())
    inside, leave = threading.Event(), threading.Event()
    driver = NvmeDriver(tmp_path, io="buffered")
    await driver.open()

    def slow(_: object) -> None:
        inside.set()
        assert leave.wait(DEADLINE_S)

    driver.directory.transfer = Blocks(block_bytes=1 << 20, depth=4, direct=False)
    driver.directory.transfer._threads.share(range(8), lambda _: None)
    call = asyncio.ensure_future(driver.run(slow))
    assert await asyncio.to_thread(inside.wait, DEADLINE_S)
    await driver.close()
    leave.set()
    await call
    for each in set(threading.enumerate()) - before:
        if each.name.startswith("tiercheck"):
            await asyncio.to_thread(each.join, DEADLINE_S)
            assert not each.is_alive(), each.name


@pytest.mark.parametrize("scheme", ["nvme", "lustre"])
def test_a_process_ends_whose_file_system_hangs(tmp_path_factory: pytest.TempPathFactory, scheme: str) -> None:
    command = [sys.executable, "-c", HANGS, f"{scheme}://{tmp_path_factory.mktemp('hung')}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "closed" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr

"""A launch that fails says how in its log."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.forks import Forks, tail

pytestmark = pytest.mark.cluster

CRASHES = "import os; os.kill(os.getpid(), 11)"
HANGS = """
import threading
def waits_for_nobody():
    threading.Event().wait()
waits_for_nobody()
"""


@pytest.mark.parametrize(
    ("program", "deadline_s", "code", "words"),
    [
        ("import sys; sys.exit(3)", 60.0, 3, ["rank 0 ended with exit status 3"]),
        (CRASHES, 60.0, -signal.SIGSEGV, ["Segmentation fault", "line 1 in <module>", "rank 0 ended by SIGSEGV"]),
        (
            HANGS,
            10.0,
            -signal.SIGABRT,
            ["in waits_for_nobody", "rank 0 ended by SIGABRT, killed at the deadline of 10 s"],
        ),
    ],
)
def test_how_it_ended(
    forks: Forks, tmp_path: Path, program: str, deadline_s: float, code: int, words: list[str]
) -> None:
    found, log = forks.run_script(program, folder=tmp_path, deadline_s=deadline_s)
    assert found == code
    assert all(each in log for each in words), log
    assert log == tail(tmp_path / "script.log")


def test_the_one_that_failed_comes_first(forks: Forks, tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(
        f"""
import os
try:
    os.mkdir({str(tmp_path / "once")!r})
except FileExistsError:
    import time
    time.sleep(60)
os.kill(os.getpid(), 11)
"""
    )
    codes = forks.run(str(script), ranks=2, log=log)
    assert sorted(codes) == [-signal.SIGSEGV, -signal.SIGKILL]
    first, second = codes.index(-signal.SIGSEGV), codes.index(-signal.SIGKILL)
    said = f"rank {first} ended by SIGSEGV; rank {second} ended by SIGKILL, killed since another one had failed"
    assert said in tail(log)


def test_one_that_succeeds_says_nothing(forks: Forks, tmp_path: Path) -> None:
    assert forks.run_script("", folder=tmp_path) == (0, "")

"""What the process that folds may use."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tiercheck.config import THREADS_MAX
from tiercheck.errors import ConfigurationError
from tiercheck.folding.settings import FoldSettings

NODE = set(range(64))


@pytest.mark.parametrize(
    ("threads", "cpus", "count", "chosen"),
    [
        (None, "", 8, NODE),
        (3, "", 3, NODE),
        (None, "0-3,8", 1, {0, 1, 2, 3, 8}),
        (4, "16-31", 4, set(range(16, 32))),
    ],
    ids=str,
)
def test_folds_take_an_eighth_of_the_processors_or_what_they_are_given(
    threads: int | None, cpus: str, count: int, chosen: set[int]
) -> None:
    assert FoldSettings.of(threads, cpus, allowed=NODE) == FoldSettings(count, tuple(sorted(chosen)), nice=10)
    assert FoldSettings.of(None, "", allowed={5}).threads == 1
    assert FoldSettings.of(None, "", 0, allowed=NODE, ranks=1) == FoldSettings(1, tuple(NODE), nice=0)


@pytest.mark.parametrize(
    ("threads", "cpus", "nice", "why"),
    [
        (0, "", None, "at least 1"),
        (None, "3-1", None, "a list such as 0-3,8"),
        (None, "all", None, "a list such as 0-3,8"),
        (None, "62-65", None, r"may not use \(\[64, 65\]\)"),
        (None, "", -5, "at least 0 and at most 19, not -5"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(threads: int | None, cpus: str, nice: int | None, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        FoldSettings.of(threads, cpus, nice, allowed=NODE)


TAKES_EFFECT = """
import json, logging, os, sys, threading
from tiercheck.folding.settings import FoldSettings
logging.basicConfig(stream=sys.stderr)
settings = FoldSettings(1, tuple(json.loads(sys.argv[1])), int(sys.argv[2]))
settings.bind()
settings.stand_back()
seen = []
def look():
    seen.append([sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)])
thread = threading.Thread(target=look)
thread.start()
thread.join()
look()
print(json.dumps(seen))
"""


def after(cpus: list[int], nice: int) -> tuple[list[list[object]], str]:
    """Affinity, niceness and scheduling of a thread that a process starts afterwards, and of itself; and its log."""
    command = [sys.executable, "-c", TAKES_EFFECT, json.dumps(cpus), str(nice)]
    # In a session of its own, as the process that folds is: it may lower its session's claim, too.
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, start_new_session=True)
    return json.loads(done.stdout), done.stderr


def test_they_bind_the_process_and_have_it_stand_back() -> None:
    own = max(os.sched_getaffinity(0))
    nice = max(13, os.getpriority(os.PRIO_PROCESS, 0))
    assert after([own], nice) == ([[[own], nice, os.SCHED_BATCH]] * 2, "")


def test_processors_that_the_system_refuses_do_no_harm() -> None:
    (found, _), said = after([THREADS_MAX], 11)
    assert found[0] == sorted(os.sched_getaffinity(0))
    assert found[1] == max(11, os.getpriority(os.PRIO_PROCESS, 0))
    assert f"folds are not bound to the processors [{THREADS_MAX}]" in said
    assert "--fold-cpus" in said

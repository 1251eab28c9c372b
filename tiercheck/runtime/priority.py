"""Standing back: an agent, a process that folds, or a thread that makes memory ready must not take from the trainers
what they need, and must not starve either, since what waits for it in the end is a trainer.

Measured under six busy processes a core, on the time to bring 45 MiB to disk: nice 10 takes about ten times as long
as no lowering at all, nice 19 fifty to a hundred times. So nice 10, in the batch class, which never interrupts
others. ``nice`` only ranks processes within one group of the scheduler: a container or a service. If each session is a
group of its own (``sched_autogroup_enabled``, sched(7)), a process's nice value says nothing to other sessions, so the
session's nice value is lowered too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

__all__ = ["NICE", "ends_first_without_memory", "stand_back", "standing_back"]

T = TypeVar("T")

NICE = 10
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_LOWEST_OF_BEST_EFFORT = 2 << 13 | 7
"""The idle class would wait for as long as a trainer reads its data."""


def stand_back(nice: int = NICE) -> str:
    """Lower this process's claim to processor and disk, for its main thread and those it starts from now on.

    Returns what was had, for the log. What the system refuses is named there and does no harm.
    """
    steps: list[tuple[str, Callable[[], object]]] = [
        (f"nice {nice}", partial(_nice, nice)),
        *([(f"session nice {nice}", partial(_nice_session, nice))] if os.getsid(0) == os.getpid() else []),
        ("batch scheduling", lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))),
        ("lowest disk priority", _lower_disk),
    ]
    had, refused = [], []
    for name, step in steps:
        try:
            step()
            had.append(name)
        except OSError as error:
            refused.append(f"{name} ({error.strerror})")
    return ", ".join(had) + (f"; refused: {', '.join(refused)}" if refused else "")


def standing_back(work: Callable[[], T], name: str) -> T:
    """What ``work`` returns or raises, in a thread of that name which has less claim to the processors. The caller's
    own could not have it back: that takes a privilege."""
    with ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_nice_if_allowed) as alone:
        return alone.submit(work).result()


def ends_first_without_memory() -> None:
    """Have the system end this process before all others if it runs out of memory. If it refuses, that does no
    harm."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # proc_pid_oom_score_adj(5)


def _nice(nice: int) -> None:
    # Whoever runs it may have lowered it further already.
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))


def _nice_if_allowed() -> None:
    with suppress(OSError):
        _nice(NICE)


def _nice_session(nice: int) -> None:
    group = Path("/proc/self/autogroup")
    now = int(group.read_text().rpartition(" ")[2])
    group.write_text(str(max(nice, now)))


def _lower_disk() -> None:
    number = _SYS_IOPRIO_SET.get(os.uname().machine)
    if number is None:
        raise OSError(0, f"not known on {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_LOWEST_OF_BEST_EFFORT) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

"""Standing back: the agent must not take from the trainers what they need.

Idle scheduling (``SCHED_IDLE``) was weighed and left: under two busy trainers on two cores it gets next to nothing,
and what waits for it is the trainer itself. Nice 19 in the batch class gets about a sixtieth of a busy core, and all
of an idle one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["stand_back"]

NICE = 19
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_IDLE = 3 << 13


def stand_back() -> str:
    """Lower this process's claim to processor and disk, for its main thread and those it starts from now on.

    Returns what was had, for the log. What the system refuses is named there and does no harm.
    """
    steps: list[tuple[str, Callable[[], object]]] = [
        ("nice 19", lambda: os.setpriority(os.PRIO_PROCESS, 0, NICE)),
        ("batch scheduling", lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))),
        # With automatic groups, a session is a group, and only its own value counts against other sessions.
        ("nice group", lambda: Path("/proc/self/autogroup").write_text(str(NICE))),
        ("idle disk priority", _idle_disk),
    ]
    had, refused = [], []
    for name, step in steps:
        try:
            step()
            had.append(name)
        except OSError as error:
            refused.append(f"{name} ({error.strerror})")
    return ", ".join(had) + (f"; refused: {', '.join(refused)}" if refused else "")


def _idle_disk() -> None:
    number = _SYS_IOPRIO_SET.get(os.uname().machine)
    if number is None:
        raise OSError(0, f"not known on {os.uname().machine}")
    if ctypes.CDLL(None, use_errno=True).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

"""The end of the process waits for the threads that bring obstore's results.

A result is handed to the event loop by a thread of the Rust runtime, which then needs the GIL once more, to let go of
Python's objects. An interpreter that is ending by then refuses it, and the refusal aborts the whole process, whose work
was done (pyo3-async-runtimes, issue 40). So whoever has been inside Python without being one of Python's own threads is
let out first.
"""

from __future__ import annotations

import sys
import threading
import time

__all__ = ["let_foreign_threads_out"]

DEADLINE_S = 1.0
"""Beyond it the process ends as it would have: a thread that stays may belong to somebody else."""
TURN_S = 0.001
LOOKS = 3
"""In a row that must find nobody: a thread that waits to let go of an object cannot be seen, and needs a turn."""


def let_foreign_threads_out(deadline_s: float = DEADLINE_S) -> bool:
    """Give the GIL away until no thread that Python did not start runs Python code; whether that was reached."""
    deadline = time.monotonic() + deadline_s
    clear = 0
    while clear < LOOKS:
        if time.monotonic() > deadline:
            return False
        time.sleep(TURN_S)
        clear = 0 if foreign_threads() else clear + 1
    return True


def foreign_threads() -> set[int]:
    """Those that run Python code and were not started by it, also where they have asked who they are."""
    own = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    return {thread for thread in sys._current_frames() if thread not in own}

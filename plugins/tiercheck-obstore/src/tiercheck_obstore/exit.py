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


def let_foreign_threads_out(deadline_s: float = DEADLINE_S) -> bool:
    """Give the GIL away until no thread that Python did not start runs Python code; whether that was reached."""
    deadline = time.monotonic() + deadline_s
    while sys._current_frames().keys() - {thread.ident for thread in threading.enumerate()}:
        if time.monotonic() > deadline:
            return False
        time.sleep(TURN_S)
    return True

"""The ``tiercheck`` command. The extra ``cli`` brings what it needs; the library works without."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

from tiercheck.cli.ending import end_interrupted

__all__ = ["main", "script"]

STUCK_S = 1.0


def main() -> None:
    """Run the command line. If the extra ``cli`` is not installed, one line says so, and the exit code is 2."""
    try:
        from tiercheck.cli.commands import run
    except KeyboardInterrupt:
        end_interrupted(128 + signal.SIGINT, sys.argv[1:])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("rich", "typer"):
            raise
        print(f"error: the tiercheck command needs {missing}: pip install 'tiercheck[cli]'", file=sys.stderr)
        sys.exit(2)
    run()


def script() -> None:
    """:func:`main` as a process of its own, which ends when the command does."""
    try:
        main()
    except SystemExit as ended:
        leave_stuck_threads(ended.code)
        raise


def leave_stuck_threads(code: object) -> None:
    """End the process if a thread that works for a tier does not end: the interpreter would wait for it, and a call to
    a mount that hangs does not return."""
    until = time.monotonic() + STUCK_S
    for thread in filter(is_pooled, threading.enumerate()):
        thread.join(max(0.0, until - time.monotonic()))
    if not any(map(is_pooled, threading.enumerate())):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def is_pooled(thread: threading.Thread) -> bool:
    return thread.name.startswith(("tiercheck", "asyncio_", "ThreadPoolExecutor"))

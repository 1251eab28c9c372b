"""Processes that SIGKILL ends at a point of one's choosing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path

__all__ = ["die_before_event", "lives_through"]

EVENTS = ("open", "os.", "fcntl.", "mmap.", "shutil.")


def die_before_event(number: int, counted: Path | None = None) -> None:
    """SIGKILL to this process before its ``number``-th audited call that has to do with files. ``counted``: a file that
    gets a byte for each of them."""
    left = [number]
    descriptor = None if counted is None else os.open(counted, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event: str, args: object) -> None:
        if event.startswith(EVENTS) and event != "os.kill":
            left[0] -= 1
            if descriptor is not None:
                os.write(descriptor, b".")
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def lives_through(life: Callable[[], Coroutine[object, object, None]]) -> bool:
    """Whether a process forked for it comes to the end of ``life()``; else it was killed. That it fails is an error."""
    child = os.fork()
    if not child:
        code = 1
        try:
            asyncio.run(life())
            code = 0
        except BaseException:  # the child must not return into the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, "the process failed instead of being killed"
        return True
    assert os.WTERMSIG(status) == signal.SIGKILL
    return False

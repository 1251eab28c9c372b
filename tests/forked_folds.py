"""Processes that fold, forked from the process that has everything imported (:mod:`tests.forks`).

An interpreter that imports torch, and the compiler that torch's first optimizer imports, needs six seconds of a core.
An agent that finds ``tests/servers/eager`` on its path and ``TESTS_FORKS`` in its environment has its fold processes
forked instead: each runs the same program, from ``tiercheck.folding``'s ``main`` on. The tests of the processes
themselves (``tests/cluster/folds``, the demo from the command line, a trainer's own process) start real ones.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tiercheck.folding import launch

__all__ = ["take_effect"]


class ForkedProcess:
    """What is used of ``subprocess.Popen``."""

    def __init__(self, connection: socket.socket) -> None:
        self._answers = connection.makefile("r")
        self.pid = int(self._answers.readline())

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._answers], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return int(self._answers.readline())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def spawn(told: launch.Launch, environment: Mapping[str, str]) -> ForkedProcess:
    """In the place of the function that starts an interpreter."""
    path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
    request = {
        "address": os.environ["TESTS_FORKS"],
        "fold": msgspec.json.encode(told).decode(),
        "environment": {**environment, **launch.BESIDE, "PYTHONPATH": path},
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{request['address']}")
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [told.descriptor, sys.stderr.fileno()])
        return ForkedProcess(connection)


def take_effect() -> None:
    launch._spawn = spawn  # type: ignore[assignment]  # what is used of a process, it has

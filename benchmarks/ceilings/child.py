"""A helper process that prints one line when it is ready, and ends when its standard input does."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

__all__ = ["START_S", "Child"]

START_S = 60.0


class Child:
    """``python -m MODULE ARGUMENTS``; ``ready`` is the line that it printed."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.ready = ""

    @property
    def pid(self) -> int:
        return self._running().pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Errors: ``RuntimeError`` where it is not ready within a minute, or ends instead."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours, and its standard input ends with us
        )
        try:
            self.ready = self.read_line(START_S)
        except BaseException:
            self.kill()
            raise

    def read_line(self, deadline_s: float) -> str:
        """The next line of its standard output."""
        stdout = self._running().stdout
        assert stdout is not None
        line = b""
        until = time.monotonic() + deadline_s
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise RuntimeError(f"{' '.join(self._command)} said nothing for {deadline_s:.0f} s")
            piece = os.read(stdout.fileno(), 1)
            if not piece:
                raise RuntimeError(f"{' '.join(self._command)} ended with code {self._running().wait(10)}")
            line += piece
        return line.decode().strip()

    def has_said_something(self, wait_s: float) -> bool:
        """Whether :meth:`read_line` has something to read, or the process has ended; waits ``wait_s`` for it."""
        stdout = self._running().stdout
        assert stdout is not None
        return bool(select.select([stdout], [], [], wait_s)[0])

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        stdin = self._running().stdin
        assert stdin is not None
        stdin.write(f"{line}\n".encode())
        stdin.flush()

    def stop(self) -> None:
        """Let it end; kill it where it does not."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        process.stdout.close()
        self._process = None

    def kill(self) -> None:
        """SIGKILL."""
        process = self._process
        if process is not None:
            process.kill()
            self.stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{' '.join(self._command)} is not running")
        return self._process

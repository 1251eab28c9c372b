"""A server in a process of its own: started and waited for, killed, started again."""

from __future__ import annotations

import abc
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

__all__ = ["ServerProcess", "free_port"]

POLL_S = 0.02


class ServerProcess(abc.ABC):
    """``with Server(...) as server``. What is in ``folder`` stays over a restart, and with it the server's ``log``."""

    name: ClassVar[str]
    ready_s_max: ClassVar[float]
    variables: Mapping[str, str] = {}
    """What the server needs in its environment, beside what is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:  # noqa: B027  (many make everything at their start)
        """Put into ``folder`` what the server needs there, before its first start."""

    @abc.abstractmethod
    def command(self) -> Sequence[str | Path]:
        """The program, and what it is told."""

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Whether it serves. An ``OSError`` says that it does not yet."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            self.prepare()
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it serves. Errors: ``RuntimeError`` with the end of its log."""
        log = self.folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.variables},
                start_new_session=True,
            )
        deadline = time.monotonic() + self.ready_s_max
        while not self._serves():
            ended = self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                state = f"is not ready {self.ready_s_max:.0f} s after its start" if ended is None else f"ended: {ended}"
                self.kill()
                raise RuntimeError(f"{self.name} {state}; its log ends:\n{self.log_end()}")
            time.sleep(POLL_S)

    def log_end(self, lines: int = 20) -> str:
        """The last lines that it has logged."""
        return b"\n".join((self.folder / "log").read_bytes().splitlines()[-lines:]).decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL, as a power cut would. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        """Kill it where it runs, and start it on the same port and data."""
        self.kill()
        self.start()

    def _serves(self) -> bool:
        with contextlib.suppress(OSError):
            return self.is_ready()
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

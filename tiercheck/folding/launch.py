"""Starting the process that folds, and what ties the two together: a pair of sockets, and the owner's life."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from tiercheck.folding.messages import FRAME_BYTES_MAX
from tiercheck.folding.owner import FoldProcess, StartProcess
from tiercheck.folding.settings import FoldSettings, given_by
from tiercheck.runtime.waiting import settled

__all__ = ["Launch", "SocketChannel", "starts", "trainers_process"]

LENGTH_BYTES = 4
END_S_MAX = 5.0
BESIDE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Each fold is on one thread, and on no device."""


class Launch(Struct, frozen=True):
    """What the process is told on its command line."""

    descriptor: int
    """Its end of the channel."""
    owner: int
    """The process that it ends with."""
    settings: FoldSettings
    is_waited_for: bool = False
    """Training waits for it at the start: it stands back only when it has imported what replays."""


class SocketChannel:
    """See :class:`~tiercheck.folding.messages.Channel`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, message: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)

    async def receive(self) -> bytes:
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            if length <= FRAME_BYTES_MAX:
                return await self._reader.readexactly(length)
        except OSError as error:
            raise EOFError(str(error)) from error
        except asyncio.IncompleteReadError as error:  # an EOFError, too
            raise EOFError from error
        raise EOFError(f"a message of {length} bytes")

    def close(self) -> None:
        self._writer.close()


class _Child(SocketChannel):
    """See :class:`~tiercheck.folding.owner.StartedProcess`."""

    _process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self._process.pid

    async def end(self) -> str:
        self.close()
        return await asyncio.to_thread(self._reaped)

    def _reaped(self) -> str:
        """It ends by itself when the channel is closed, unless it hangs."""
        try:
            code = self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


def starts(settings: FoldSettings, environment: Mapping[str, str], *, is_waited_for: bool = False) -> StartProcess:
    """Starts the process in this environment, as a child of this one, which must live as long as it."""

    async def start() -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            child = await _Child.over(ours)
            launch = Launch(theirs.fileno(), os.getpid(), settings, is_waited_for)
            try:
                child._process = await settled(
                    asyncio.to_thread(partial(_spawn, launch, environment)),
                    undo=lambda process: asyncio.to_thread(_kill, process),
                )
            except BaseException:
                child.close()
                raise
        return child

    return start


def trainers_process(environment: Mapping[str, str], is_waited_for: bool = False) -> FoldProcess:
    """The process that folds for one trainer. What it may use is said by the environment; else it is one thread on the
    trainer's processors. ``is_waited_for``: training waits until it is ready. Errors: ``ConfigurationError``."""
    given = given_by(environment)
    own = os.sched_getaffinity(0)
    allowed = range(os.cpu_count() or 1) if given["fold_cpus"] else own  # a trainer may be bound to a few
    settings = FoldSettings.of(given["fold_threads"], given["fold_cpus"], given["fold_nice"], allowed=allowed, ranks=1)
    return FoldProcess(starts(settings, environment, is_waited_for=is_waited_for))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """One that nobody waits for any more, and that has begun nothing."""
    process.kill()
    process.wait()


def _spawn(launch: Launch, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # What this process can import the other must find too: a driver or an optimizer may come from anywhere on its path.
    if not sys.executable:
        raise FileNotFoundError("no Python interpreter is known to start it with (sys.executable is empty)")
    path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", "tiercheck.folding", msgspec.json.encode(launch).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**environment, **BESIDE, "PYTHONPATH": path},
        pass_fds=[launch.descriptor],
        start_new_session=True,  # a terminal's interrupt is for the trainer
    )

"""A peer server in a process of its own, which can be killed and restarted.

``python -m tests.servers.peer BIND PREFIX LIMITS [KEYS]`` serves namespaces in shared memory (``shm://PREFIX-NAME``,
which outlives the process) until it is killed; it says its endpoint on standard output. ``LIMITS`` are JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Self

from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.peer import PeerKeys, PeerLimits, PeerServer
from tiercheck.tiers.shm.driver import ShmDriver

__all__ = ["PeerProcess"]

ROOT = Path(__file__).absolute().parents[2]
READY_S = 20.0


class PeerProcess:
    """Use it as a context manager. The namespace ``NAME`` is the shared memory ``PREFIX-NAME``."""

    def __init__(
        self,
        prefix: str,
        *,
        keys: Path | None = None,
        host: str = "127.0.0.1",
        netns: str | None = None,
        socket: Path | None = None,
        **limits: int,
    ) -> None:
        """``socket`` instead of TCP; ``limits``: fields of :class:`PeerLimits`."""
        self.prefix = prefix
        self._socket = socket
        self._limits = limits
        self.endpoint = ""
        self._keys = keys
        self._host = host
        self._netns = netns
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """On the port that it had before, if any; returns once it serves."""
        port = self.endpoint.rpartition(":")[2] or "0"
        bind = f"tcp://{self._host}:{port}" if self._socket is None else f"ipc://{self._socket}"
        command = [sys.executable, "-m", "tests.servers.peer", bind, self.prefix, json.dumps(self._limits)]
        if self._keys is not None:
            command.append(str(self._keys))
        if self._netns is not None:
            command = ["nsenter", f"--net=/run/netns/{self._netns}", *command]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.endpoint = read_line(self._process.stdout)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(timeout=10)
            assert process.stdout is not None
            process.stdout.close()

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """SIGSTOP: the server is there, and says nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def read_line(stream: IO[bytes]) -> str:
    deadline = time.monotonic() + READY_S
    if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise TimeoutError(f"the peer server did not start within {READY_S} s")
    line = stream.readline().decode().strip()
    if not line:
        raise RuntimeError("the peer server ended before it served")
    return line


async def serve(bind: str, prefix: str, limits: PeerLimits, keys: PeerKeys | None) -> None:
    async def open_namespace(name: str) -> TierDriver:
        driver = ShmDriver(f"{prefix}-{name}")
        await driver.open()
        return driver

    async with PeerServer(open_namespace, bind=bind, keys=keys, limits=limits) as server:
        print(server.endpoint, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    _, given_bind, given_prefix, given_limits, *given_keys = sys.argv
    chosen = PeerLimits(**json.loads(given_limits))
    asyncio.run(serve(given_bind, given_prefix, chosen, PeerKeys.load(given_keys[0]) if given_keys else None))

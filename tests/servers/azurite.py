"""Azurite, Microsoft's emulator of Azure Blob Storage, on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.servers.programs import need
from tests.servers.sshd import free_port

__all__ = ["Azurite", "azurite"]

READY_S_MAX = 60.0
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Known to all: it is in the emulator's documentation."""


class Azurite:
    """``with Azurite(folder) as server``: what is in ``folder`` stays over a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._program = need("azurite-blob", package="azurite (npm)")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def connection_string(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{self.port}/{ACCOUNT};"
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        flags = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--blobHost", "127.0.0.1"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, *flags, "--blobPort", str(self.port), "--location", self.folder / "data"],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + READY_S_MAX
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                pass
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.kill()
                raise RuntimeError(f"azurite did not come up: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    with Azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server

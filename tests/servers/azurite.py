"""Azurite, Microsoft's emulator of Azure Blob Storage, on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.servers.process import ServerProcess, free_port
from tests.servers.programs import need

__all__ = ["Azurite", "azurite"]

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Known to all: it is in the emulator's documentation."""


class Azurite(ServerProcess):
    """``with Azurite(folder) as server``. ``keeps``: on the disk; else in its memory, which is soon lost and faster."""

    name = "Azurite"
    ready_s_max = 60.0

    def __init__(self, folder: Path, *, keeps: bool = True) -> None:
        super().__init__(folder)
        self._keeps = keeps
        self.port = free_port()
        self._program = need("azurite-blob", package="azurite (npm)")

    @property
    def connection_string(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{self.port}/{ACCOUNT};"
        )

    def command(self) -> Sequence[str | Path]:
        flags = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--blobHost", "127.0.0.1"]
        where = ["--location", self.folder / "data"] if self._keeps else ["--inMemoryPersistence"]
        return [self._program, *flags, "--blobPort", str(self.port), *where]

    def is_ready(self) -> bool:
        """Whether it takes connections."""
        socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        return True


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    with Azurite(tmp_path_factory.mktemp("azurite"), keeps=False) as server:
        yield server

"""A server whose clients send frames without an end: its memory stays bounded, and honest clients are served."""

from __future__ import annotations

import asyncio
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.servers.peer import PeerProcess
from tests.unit.tiers.peer.test_wire import GREETING, READY
from tiercheck.tiers.peer import PeerDriver
from tiercheck.tiers.shm.namespaces import remove_namespace

pytestmark = pytest.mark.cluster

FRAME_BYTES = 64
"""Of an empty frame, once it has been received; on the wire it is two bytes."""
PRIVATE_BYTES = 64 << 20
FLOOD_BYTES = 768 << 20
"""What all frames together would take in memory."""
BURST = (b"\x01\x00" * 8192, 8192 * FRAME_BYTES)
BURST_S = 0.008
"""So that the server has seconds to see it, however busy the machine is."""
CONNECTIONS = 4
FLOOD_S_MAX = 3.0


@pytest.fixture(params=["tcp", "socket"])
def server(request: pytest.FixtureRequest) -> Iterator[PeerProcess]:
    name = f"test-{secrets.token_hex(6)}"
    with tempfile.TemporaryDirectory(prefix="tc-") as folder:
        where = Path(folder) / "p.sock" if request.param == "socket" else None
        with PeerProcess(name, socket=where, private_bytes=PRIVATE_BYTES) as process:
            yield process
        remove_namespace(f"{name}-n")


def connected(endpoint: str) -> socket.socket:
    """A connection after ZMTP's handshake. Errors: ``OSError`` where it is refused."""
    if endpoint.startswith("ipc://"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(endpoint.removeprefix("ipc://"))
    else:
        host, _, port = endpoint.rpartition(":")
        connection = socket.create_connection((host, int(port)))
    connection.settimeout(0.5)
    connection.sendall(GREETING)
    seen = 0
    while seen < 64:
        seen += len(connection.recv(64 - seen) or refused())
    connection.sendall(READY[:1] + bytes([len(READY) - 2]) + READY[2:])
    if connection.recv(1) != b"\x04":
        refused()
    return connection


def refused() -> bytes:
    raise ConnectionRefusedError("the server has hung up")


def flood(endpoint: str, nbytes: int) -> None:
    """Empty frames of one message that never ends, over a new connection whenever one is cut."""
    until = time.monotonic() + FLOOD_S_MAX
    while nbytes > 0 and time.monotonic() < until:
        with suppress(OSError), connected(endpoint) as connection:
            while nbytes > 0:
                connection.sendall(BURST[0])
                nbytes -= BURST[1]
                time.sleep(BURST_S)


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


async def test_frames_without_an_end_take_bounded_memory(server: PeerProcess) -> None:
    before = peak_bytes(server.pid)
    floods = [
        threading.Thread(target=flood, args=(server.endpoint, FLOOD_BYTES // CONNECTIONS), daemon=True)
        for _ in range(CONNECTIONS)
    ]
    for each in floods:
        each.start()
    content = bytes(9 << 20)
    async with PeerDriver("n", server.endpoint, deadline_s=20) as honest:
        while any(each.is_alive() for each in floods):
            await honest.put("a", [content])
            assert await honest.get("a") == content
            await asyncio.sleep(0.01)
    grown = peak_bytes(server.pid) - before
    assert grown < FLOOD_BYTES // 2, f"it has grown by {grown >> 20} MiB"

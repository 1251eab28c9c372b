"""The thread that speaks with a peer outlives whatever the peer does."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from tiercheck.errors import CapacityExceeded, Transient
from tiercheck.tiers.peer import PeerKeys
from tiercheck.tiers.peer.address import has_ipv6_alone
from tiercheck.tiers.peer.client import link
from tiercheck.tiers.peer.driver import PeerDriver
from tiercheck.tiers.peer.messages import BeginPut, Failure, Hello, Info, PutState, Welcome, decode, encode


class Deaf:
    """Answers a put with an error, and then goes on saying what nobody has asked, but reads nothing more."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVHWM, 1)
        self._router.setsockopt(zmq.RCVBUF, 1 << 16)
        self._router.setsockopt(zmq.LINGER, 0)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ending.is_set():
            if not self._router.poll(50):
                continue
            peer, head, *_ = self._router.recv_multipart()
            number, message = decode(head)
            if isinstance(message, Hello):
                self._router.send_multipart([peer, encode(number, Welcome(7, 4 << 20))])
            elif isinstance(message, BeginPut):
                count = -(-message.nbytes // message.chunk_bytes)
                state = PutState(message.transfer, 7, 4, bytes((count + 7) // 8))
                self._router.send_multipart([peer, encode(number, state)])
                self._router.poll(20_000)  # a chunk has come; nobody reads it
                failure = Failure(message.transfer, "CapacityExceeded", "no room")
                self._router.send_multipart([peer, encode(number, failure)])
                self._say_on(peer, until=time.monotonic() + 2.0)

    def _say_on(self, peer: bytes, until: float) -> None:
        while time.monotonic() < until and not self._ending.wait(0.0002):
            with suppress(zmq.ZMQError):  # the client has hung up
                self._router.send_multipart([peer, encode(0, Info(1, "x"))], zmq.NOBLOCK)

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._router.close()
        self._context.term()


@pytest.fixture
def deaf() -> Iterator[Deaf]:
    peer = Deaf()
    yield peer
    peer.close()


async def test_a_peer_that_talks_and_does_not_read_ends_one_put(deaf: Deaf) -> None:
    """What was to be sent is let go by breaking the connection, just when something else arrives on it."""
    async with PeerDriver("run", f"127.0.0.1:{deaf.port}", deadline_s=3.0) as driver:
        with pytest.raises(CapacityExceeded, match="no room"):
            await driver.put("a", [bytearray(40 << 20)])
        with pytest.raises(Transient):  # it answers no question; the driver is not closed
            await driver.stat("a")


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that is stopped: its kernel lets others connect, and nobody answers them."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_a_server_that_is_stopped_is_not_one_without_keys(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_MS", 100)
    monkeypatch.setattr(link, "SILENT_S", 0.09)
    keys = PeerKeys.generate(tmp_path / "keys")
    with pytest.raises(Transient, match="lets us connect and says nothing more"):
        await PeerDriver("run", silent, keys=keys, deadline_s=2.0).open()


async def test_without_descriptors_opening_fails_and_the_process_goes_on(silent: str) -> None:
    """ZeroMQ would abort it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    for left in (1, 4, 20, 30):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(last + 1 + left, hard), hard))
        taken: list[int] = []
        try:
            with suppress(OSError):
                while len(taken) < last:  # numbers below the last that nobody has
                    taken.append(os.open(os.devnull, os.O_RDONLY))
                    if taken[-1] > last:
                        os.close(taken.pop())
                        break
            with pytest.raises(Transient, match="too few file descriptors left"):
                await PeerDriver("run", silent, deadline_s=1.0).open()
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("at", "families", "expected"),
    [
        ("name:1", [socket.AF_INET6], True),
        ("name:1", [socket.AF_INET6, socket.AF_INET], False),
        ("name:1", [socket.AF_INET], False),
        ("name:1", [], False),
        ("[::1]:1", None, True),
        ("ipc:///run/x.sock", None, False),
    ],
)
async def test_a_name_that_has_addresses_of_ipv6_alone(
    at: str, families: list[int] | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(host: str, *_: object, **__: object) -> list[Any]:
        assert families is not None and host == "name"
        if not families:
            raise socket.gaierror("no such host")
        return [(family, socket.SOCK_STREAM, 6, "", ("", 0)) for family in families]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert await has_ipv6_alone(at, 5.0) is expected

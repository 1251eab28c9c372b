"""The thread that speaks with a peer outlives whatever the peer does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq

from tiercheck.errors import CapacityExceeded, Transient
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

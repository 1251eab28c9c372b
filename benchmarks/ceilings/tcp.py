"""One plain TCP stream over loopback, from memory into memory; run as a program it is the server.

The server keeps a touched buffer of the object's size. ``p``: it receives that many bytes into the buffer and
answers with one byte. ``g``: it sends the buffer.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time

from benchmarks.ceilings.buffers import filled_buffer
from benchmarks.ceilings.child import Child

__all__ = ["PIECES", "TcpStream"]

PIECES = (256 << 10, 1 << 20, 4 << 20, 1 << 40)
"""Bytes a system call is asked to move; the last one is: all of them."""
DEADLINE_S = 120.0


class TcpStream:
    """The client, with the server in a process of its own. ``source`` and ``into`` are the driver's own buffers."""

    def __init__(self, source: memoryview, into: memoryview) -> None:
        self._source = source
        self._into = into
        self._child = Child("benchmarks.ceilings.tcp", str(source.nbytes))
        self._socket: socket.socket | None = None
        self.piece_bytes = PIECES[-1]

    async def __aenter__(self) -> TcpStream:
        await asyncio.to_thread(self._child.start)
        try:
            self._socket = socket.create_connection(("127.0.0.1", int(self._child.ready)), timeout=DEADLINE_S)
        except BaseException:
            self._child.kill()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._socket is not None:
            self._socket.close()
        await asyncio.to_thread(self._child.stop)

    async def calibrate(self, repetitions: int = 2) -> None:
        """Find the bytes a call with which a put and a get together take the shortest time."""
        taken: dict[int, float] = {}
        for piece in PIECES:
            self.piece_bytes = piece
            taken[piece] = min([await self.put() + await self.get() for _ in range(repetitions)])
        self.piece_bytes = min(taken, key=taken.__getitem__)

    async def put(self) -> float:
        """Seconds until the server has all of ``source`` in its memory, and has said so."""
        return await asyncio.to_thread(self._put)

    async def get(self) -> float:
        """Seconds until all of the server's buffer is in ``into``."""
        return await asyncio.to_thread(self._get)

    def shape(self) -> dict[str, int]:
        """What the calibration chose."""
        return {"piece_bytes": min(self.piece_bytes, self._source.nbytes)}

    def _put(self) -> float:
        stream = self._connected()
        begun = time.perf_counter()
        stream.sendall(request(b"p", self.piece_bytes))
        send(stream, self._source, self.piece_bytes)
        if stream.recv(1) != b"k":
            raise ConnectionError("the raw TCP server is gone")
        return time.perf_counter() - begun

    def _get(self) -> float:
        stream = self._connected()
        begun = time.perf_counter()
        stream.sendall(request(b"g", self.piece_bytes))
        receive(stream, self._into, self.piece_bytes)
        return time.perf_counter() - begun

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise RuntimeError("the stream is not open")
        return self._socket


def request(kind: bytes, piece_bytes: int) -> bytes:
    return kind + piece_bytes.to_bytes(8, "little")


def send(stream: socket.socket, content: memoryview, piece_bytes: int) -> None:
    for start in range(0, content.nbytes, piece_bytes):
        stream.sendall(content[start : start + piece_bytes])


def receive(stream: socket.socket, into: memoryview, piece_bytes: int) -> None:
    left = into
    while left.nbytes:
        received = stream.recv_into(left, min(left.nbytes, piece_bytes))
        if not received:
            raise ConnectionError("the other end of the raw TCP stream is gone")
        left = left[received:]


def serve(nbytes: int) -> None:
    buffer = filled_buffer(nbytes)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        listening.settimeout(DEADLINE_S)
        stream, _ = listening.accept()
        with stream:
            while head := stream.recv(9, socket.MSG_WAITALL):
                piece_bytes = int.from_bytes(head[1:], "little")
                if head[:1] == b"p":
                    receive(stream, buffer, piece_bytes)
                    stream.sendall(b"k")
                else:
                    send(stream, buffer, piece_bytes)


if __name__ == "__main__":
    serve(int(sys.argv[1]))

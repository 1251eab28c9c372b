"""Plain libzmq with CURVE over loopback: DEALER to ROUTER, frames of one size; run as a program it is the server.

``p``: the client sends the object's frames, the server copies each to its place in a touched buffer and answers.
``g``: the other way round. The copy is part of it, since libzmq receives into memory of its own and the driver,
too, must have the bytes in one piece in the end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
from typing import Any

import zmq

from benchmarks.ceilings.buffers import filled_buffer
from benchmarks.ceilings.child import Child

__all__ = ["CurveStream"]

FRAMES = (256 << 10, 1 << 20, 4 << 20)
CONNECTIONS = (1, 2)
DEADLINE_MS = 120_000


class CurveStream:
    """The client, with the server in a process of its own.

    With several connections each carries its own contiguous part of the object, at the same time as the others.
    """

    def __init__(self, source: memoryview, into: memoryview) -> None:
        self._source = source
        self._into = into
        self._child = Child("benchmarks.ceilings.curve", str(source.nbytes), str(max(CONNECTIONS)))
        self._context = zmq.Context(io_threads=max(CONNECTIONS))
        self._sockets: list[zmq.Socket[bytes]] = []
        self.frame_bytes = FRAMES[0]
        self.connections = 1

    async def __aenter__(self) -> CurveStream:
        await asyncio.to_thread(self._child.start)
        try:
            server = json.loads(self._child.ready)
            public, secret = zmq.curve_keypair()
            for port in server["ports"]:
                client = self._context.socket(zmq.DEALER)
                prepare(client)
                client.curve_serverkey = server["key"].encode()
                client.curve_publickey, client.curve_secretkey = public, secret
                client.connect(f"tcp://127.0.0.1:{port}")
                self._sockets.append(client)
        except BaseException:
            self._child.kill()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._context.destroy(linger=0)
        await asyncio.to_thread(self._child.stop)

    async def calibrate(self, repetitions: int = 2) -> None:
        """Find the frame and the connections with which a put and a get together take the shortest time."""
        taken: dict[tuple[int, int], float] = {}
        for shape in itertools.product(FRAMES, CONNECTIONS):
            self.frame_bytes, self.connections = shape
            taken[shape] = min([await self.put() + await self.get() for _ in range(repetitions)])
        self.frame_bytes, self.connections = min(taken, key=taken.__getitem__)

    async def put(self) -> float:
        """Seconds until the server has all of ``source`` in its buffer, and has said so."""
        return await asyncio.to_thread(self._each, send_part, b"p", self._source)

    async def get(self) -> float:
        """Seconds until all of the server's buffer is in ``into``."""
        return await asyncio.to_thread(self._each, receive_part, b"g", self._into)

    def shape(self) -> dict[str, int]:
        """What the calibration chose."""
        return {"frame_bytes": self.frame_bytes, "connections": self.connections}

    def _each(self, move: Any, kind: bytes, buffer: memoryview) -> float:
        begun = time.perf_counter()
        jobs = []
        for index in range(self.connections):
            part = part_of(buffer, index, self.connections)
            head = json.dumps([kind.decode(), self.frame_bytes, index, self.connections]).encode()
            jobs.append(Job(move, self._sockets[index], head, part, self.frame_bytes))
        for job in jobs:
            job.join_or_raise()
        return time.perf_counter() - begun


class Job(threading.Thread):
    """One connection's part, whose error is raised where it is waited for."""

    def __init__(self, move: Any, *arguments: Any) -> None:
        super().__init__(daemon=True)
        self._move = move
        self._arguments = arguments
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._move(*self._arguments)
        except BaseException as error:  # noqa: BLE001  (raised again below)
            self._error = error

    def join_or_raise(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


def prepare(end: zmq.Socket[bytes]) -> None:
    end.linger = 0
    end.sndhwm = end.rcvhwm = 16
    end.sndtimeo = end.rcvtimeo = DEADLINE_MS


def part_of(buffer: memoryview, index: int, parts: int) -> memoryview:
    step = -(-buffer.nbytes // parts)
    return buffer[index * step : (index + 1) * step]


def send_frames(end: zmq.Socket[bytes], head: list[bytes], part: memoryview, frame_bytes: int) -> None:
    for start in range(0, part.nbytes, frame_bytes):
        end.send_multipart([*head, part[start : start + frame_bytes]], copy=False)


def receive_frames(end: zmq.Socket[bytes], part: memoryview) -> None:
    filled = 0
    while filled < part.nbytes:
        frame = end.recv_multipart(copy=False)[-1].buffer
        part[filled : filled + frame.nbytes] = frame
        filled += frame.nbytes


def send_part(end: zmq.Socket[bytes], head: bytes, part: memoryview, frame_bytes: int) -> None:
    end.send(head)
    send_frames(end, [], part, frame_bytes)
    if end.recv() != b"k":
        raise ConnectionError("the raw CURVE server answered something else")


def receive_part(end: zmq.Socket[bytes], head: bytes, part: memoryview, frame_bytes: int) -> None:
    end.send(head)
    receive_frames(end, part)


def serve(nbytes: int, connections: int) -> None:
    buffer = filled_buffer(nbytes)
    context = zmq.Context(io_threads=connections)
    public, secret = zmq.curve_keypair()
    ports = []
    for _ in range(connections):
        end = context.socket(zmq.ROUTER)
        prepare(end)
        end.router_mandatory = True  # else a ROUTER drops what its client is too slow for
        end.curve_server = True
        end.curve_secretkey, end.curve_publickey = secret, public
        ports.append(end.bind_to_random_port("tcp://127.0.0.1"))
        threading.Thread(target=serve_one, args=(end, buffer), daemon=True).start()
    print(json.dumps({"ports": ports, "key": public.decode()}), flush=True)
    sys.stdin.read()
    # The threads wait in libzmq for ever: the process ends without them.


def serve_one(end: zmq.Socket[bytes], buffer: memoryview) -> None:
    end.rcvtimeo = -1
    while True:
        client, head = end.recv_multipart()
        kind, frame_bytes, index, parts = json.loads(head)
        part = part_of(buffer, index, parts)
        if kind == "p":
            receive_frames(end, part)
            end.send_multipart([client, b"k"])
        else:
            send_frames(end, [client], part, frame_bytes)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))

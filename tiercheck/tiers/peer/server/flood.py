"""Cuts connections that send more than is ever read from them.

ZeroMQ bounds a frame's size and the number of messages that wait, but not the frames of one message: it collects them
until the last has come, and a client that never sends the last one would fill the memory. An empty frame is 2 bytes on
the wire and 64 in memory. So two things are watched: the kernel's count of what each connection has received (over
TCP), against what was handled; and the memory of the whole process. When that has grown too much, every connection
goes of which no message was handled lately: it is in the middle of one, or idle, and its client comes back.

The process may need more memory for work of its own. What its connections cannot hold, by the kernel's counts, is no
growth of theirs.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiercheck.tiers.peer.address import is_socket

__all__ = ["FloodWatch"]

FRAME_OVERHEAD_BYTES = 64
"""More than ZMTP and CURVE add to a frame."""
FRAME_HEAD_BYTES_MIN = 2
HELD_PER_BYTE = 32
"""What is received takes no more memory than this: an empty frame, of which 2 bytes are sent, takes 64."""
HEARTBEAT_BYTES_PER_S = 1024
LATELY_S = 0.25
"""A client that is at work has whole messages handled more often than that."""
SETTLE_S = 2.0
"""How long the memory of connections that were cut may take to be free."""
STATM = Path("/proc/self/statm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
BYTES_RECEIVED_OFFSET = 128
"""Of ``tcpi_bytes_received`` in Linux's ``struct tcp_info`` (since 4.1)."""


@dataclass
class _Connection:
    handled: int
    """Bytes, their overhead overrated."""
    handled_least: int
    """The same, underrated."""
    swept: float
    heard: float
    """When a message of it was handled last."""


class FloodWatch:
    """``unread_bytes_max``: what a connection may have sent that was not handled yet. ``private_bytes_max``: what the
    process's memory may grow by, above the least that it needs for itself. ``endpoint``: the server's."""

    def __init__(
        self,
        endpoint: str,
        unread_bytes_max: int,
        private_bytes_max: int,
        private_bytes: Callable[[], int] = lambda: private_bytes(),
    ) -> None:
        self._endpoint = endpoint
        self._port = None if is_socket(endpoint) else int(endpoint.rpartition(":")[2])
        self._unread_bytes_max = unread_bytes_max
        self._private_bytes_max = private_bytes_max
        self._private_bytes = private_bytes
        self._least_bytes: float | None = None
        self._full_since: float | None = None
        self._connections: dict[int, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def full(self) -> bool:
        """Whether the process's memory has grown too much: then nobody new is let in."""
        return self._full_since is not None

    def accepted(self, fd: int) -> None:
        now = time.monotonic()
        self._connections[fd] = _Connection(0, 0, now, now)

    def disconnected(self, fd: int) -> None:
        self._connections.pop(fd, None)

    def handled(self, fd: int, frames: int, nbytes: int) -> None:
        """A message that came over ``fd`` was taken off the queue."""
        connection = self._connections.get(fd)
        if connection is not None:
            connection.handled += nbytes + frames * FRAME_OVERHEAD_BYTES
            connection.handled_least += nbytes + frames * FRAME_HEAD_BYTES_MIN
            connection.heard = time.monotonic()

    def sweep(self) -> int:
        """Cut those over the bounds; returns how many. Those that are gone are forgotten.

        A connection that breaks at once may be reported as gone before it is reported as there: ZeroMQ accepts it in
        one thread and serves it in another. It would be counted for ever.
        """
        cut = 0
        now = time.monotonic()
        held = self._private_bytes()  # first: what comes meanwhile must not pass for the process's own
        theirs: float = 0
        for fd, connection in list(self._connections.items()):
            try:
                received = self._received_bytes(fd)
            except OSError:
                self.disconnected(fd)
                continue
            if received is None:
                theirs = math.inf
                continue
            theirs += HELD_PER_BYTE * max(0, received - connection.handled_least)
            connection.handled += int((now - connection.swept) * HEARTBEAT_BYTES_PER_S) + 1
            connection.swept = now
            # No credit is kept for what the overhead was overrated by.
            connection.handled = min(connection.handled, received)
            if received - connection.handled > self._unread_bytes_max:
                cut += self.cut(fd)
        return cut + self._make_room(now, held, theirs)

    def _make_room(self, now: float, held: int, theirs: float) -> int:
        """Cut whoever may hold the memory, if it has become too much. ``theirs``: what the connections may hold."""
        if self._least_bytes is None or held < self._least_bytes:
            self._least_bytes = held
        self._least_bytes = max(self._least_bytes, held - theirs)
        if held - self._least_bytes <= self._private_bytes_max:
            self._full_since = None
            return 0
        if self._full_since is None:
            self._full_since = now
        elif now - self._full_since > SETTLE_S:
            # What has not gone with them is not theirs: this is what the process needs, from now on.
            self._least_bytes, self._full_since = held, None
            return 0
        return sum(self.cut(fd) for fd, each in list(self._connections.items()) if now - each.heard > LATELY_S)

    def _received_bytes(self, fd: int) -> int | None:
        """``None`` if the kernel does not count.

        Errors: ``OSError`` if ``fd`` is no connection of ours any more: it may have been closed, and opened as
        another.
        """
        with duplicate(fd) as connection:
            if not self._is_ours(connection):
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            if connection.family == socket.AF_UNIX:
                return None
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED_OFFSET + 8)
        if len(info) < BYTES_RECEIVED_OFFSET + 8:
            return None  # before Linux 4.1
        return int(struct.unpack_from("Q", info, BYTES_RECEIVED_OFFSET)[0])

    def cut(self, fd: int) -> int:
        """End the connection; returns 1, or 0 if it had gone by itself."""
        try:
            with duplicate(fd) as connection:
                if not self._is_ours(connection):
                    return 0
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return 0  # it went by itself
        return 1

    def _is_ours(self, connection: socket.socket) -> bool:
        if connection.type != socket.SOCK_STREAM:
            return False
        if connection.family == socket.AF_UNIX:
            return f"ipc://{connection.getsockname()}" == self._endpoint
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return bool(connection.getsockname()[1] == self._port)


def private_bytes() -> int:
    """The memory that this process holds for itself, without files and shared memory."""
    _, resident, shared, *_ = map(int, STATM.read_bytes().split())
    return (resident - shared) * PAGE_BYTES


def duplicate(fd: int) -> socket.socket:
    """A socket of our own over what ``fd`` is now. Errors: ``OSError`` if that is no socket, and nothing is left."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise

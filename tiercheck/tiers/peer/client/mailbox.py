"""Letters from any thread to a thread that waits in a poller."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

T = TypeVar("T")


class Mailbox(Generic[T]):
    """``post`` from anywhere; the owner polls ``fd`` for reading and then calls ``take``."""

    def __init__(self) -> None:
        self._letters: deque[T] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    @property
    def fd(self) -> int:
        return self._reader.fileno()

    def post(self, letter: T) -> None:
        self._letters.append(letter)
        # A full pair is one that wakes the owner already.
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"!")

    def take(self) -> list[T]:
        """What was posted, in order. Empties the pair first, so that no letter is overlooked."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        return [self._letters.popleft() for _ in range(len(self._letters))]

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

"""An answer's body, received where it is wanted.

The HTTP client copies a body twice before anyone can copy it to where it belongs. So once the client has parsed an
answer's head and holds back nothing of the body, the receiving side of its connection is borrowed: what arrives goes
straight to the caller's memory. With the last byte the connection goes back, and serves the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import aiohttp

__all__ = ["Incoming"]

PIECE_BYTES_MAX = 1 << 20
"""A piece is still in the processor's cache when it is looked at."""


class _Connection(NamedTuple):
    transport: asyncio.Transport
    owner: asyncio.Protocol
    """The HTTP client's side of it."""


class Incoming:
    """The body of ``response``, from its first byte on, in as many calls of :meth:`fill` as the caller likes.

    Whoever stops before the end closes the response, and the connection with it.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        encoded = {"Content-Encoding", "Transfer-Encoding"} & response.headers.keys()
        self._nbytes_left = 0 if encoded else response.content_length or 0
        """What is still to come as it is; zero also where only the client can tell what the body is."""
        self._connection: _Connection | None = None

    async def fill(self, target: memoryview, arrived: Callable[[int], None]) -> None:
        """Receive all of ``target``. ``arrived`` is told of each piece, once it is in its place, how many bytes it has.

        Errors: ``ConnectionError`` where the body ends early, and whatever the client raises. What ``arrived`` was told
        of is there all the same.
        """
        content = self._response.content
        at = 0
        while at < target.nbytes:
            nbytes_wanted = target.nbytes - at
            piece = content.read_nowait(nbytes_wanted)
            if not piece and (connection := self._borrowable()) is not None:
                nbytes = min(nbytes_wanted, self._nbytes_left)
                with target[at : at + nbytes] as place:
                    await self._receive(connection, place, arrived)
            else:
                piece = piece or await content.read(nbytes_wanted)
                if not piece:
                    raise ConnectionError(f"the answer ended {nbytes_wanted} bytes early")
                nbytes = len(piece)
                target[at : at + nbytes] = piece
                self._nbytes_left = max(0, self._nbytes_left - nbytes)
                arrived(nbytes)
            at += nbytes

    def _borrowable(self) -> _Connection | None:
        """The connection, where it brings all the rest: a client that holds some of the body has paused it."""
        if self._connection is None and self._nbytes_left and (lent := self._response.connection) is not None:
            transport, owner = lent.transport, lent.protocol
            if transport is not None and owner is not None and transport.is_reading():
                self._connection = _Connection(transport, owner)
        return self._connection if self._nbytes_left else None

    async def _receive(self, connection: _Connection, place: memoryview, arrived: Callable[[int], None]) -> None:
        receiver = _Receiver(connection, place, arrived)
        connection.transport.set_protocol(receiver)
        connection.transport.resume_reading()
        try:
            await receiver.full
        finally:
            receiver.give_back()
        self._nbytes_left -= place.nbytes
        if not self._nbytes_left:
            # The client has not seen the rest of this body; it parses the next answer anew, and needs to know the end.
            connection.transport.resume_reading()
            self._response.content.feed_eof()


class _Receiver(asyncio.BufferedProtocol):
    """Takes what arrives over ``connection`` until ``place`` is full, and not a byte more."""

    def __init__(self, connection: _Connection, place: memoryview, arrived: Callable[[int], None]) -> None:
        self._connection = connection
        self._place = place
        self._arrived = arrived
        self._at = 0
        self.full: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def give_back(self) -> None:
        """Not reading: who has more to receive says so, and else the client closes the connection."""
        if not self._connection.transport.is_closing():
            self._connection.transport.pause_reading()
        self._connection.transport.set_protocol(self._connection.owner)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._place[self._at : self._at + PIECE_BYTES_MAX]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        self._arrived(nbytes)
        if self._at == self._place.nbytes:
            self.give_back()
            self.full.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.owner.connection_lost(error)
        if not self.full.done():
            missing = self._place.nbytes - self._at
            self.full.set_exception(ConnectionError(f"the connection ended {missing} bytes early"))

    def pause_writing(self) -> None:
        self._connection.owner.pause_writing()

    def resume_writing(self) -> None:
        self._connection.owner.resume_writing()

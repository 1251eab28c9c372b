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
        encoded = "Content-Encoding" in response.headers
        self._nbytes_left = 0 if encoded else response.content_length or 0
        """What is still to come as it is; zero also where only the client can tell what the body is."""
        self._borrowed = False

    async def fill(self, target: memoryview, arrived: Callable[[int], None]) -> None:
        """Receive all of ``target``. ``arrived`` is told of each piece, once it is in its place, how many bytes it has.

        Errors: ``ConnectionError`` where the body ends early, what the client raises, and what ``arrived`` does. What
        it was told of before is there all the same.
        """
        content = self._response.content
        at = 0
        while at < target.nbytes:
            nbytes_wanted = target.nbytes - at
            piece = content.read_nowait(nbytes_wanted)
            if not piece and (connection := self._borrowable()) is not None:
                self._borrowed = True
                nbytes = min(nbytes_wanted, self._nbytes_left)
                with target[at : at + nbytes] as place:
                    await _Receiver(connection, place, arrived).run()
            else:
                piece = piece or await content.read(nbytes_wanted)
                if not piece:
                    raise ConnectionError(f"the answer ended {nbytes_wanted} bytes early")
                nbytes = len(piece)
                target[at : at + nbytes] = piece
                arrived(nbytes)
            at += nbytes
            self._nbytes_left = max(0, self._nbytes_left - nbytes)
            if self._borrowed and not self._nbytes_left:
                # The client has not seen all of this body; it parses the next answer anew, and needs its end only.
                content.feed_eof()

    def _borrowable(self) -> _Connection | None:
        """The connection, where it brings all the rest: a client that holds some of the body has paused it."""
        lent = self._response.connection
        if not self._nbytes_left or lent is None or lent.protocol is None:
            return None
        transport = lent.transport
        # Of a connection over TLS that is lost already, nobody who comes now would be told.
        if transport is None or transport.is_closing() or not transport.is_reading():
            return None
        return _Connection(transport, lent.protocol)


class _Receiver(asyncio.BufferedProtocol):
    """Takes what arrives over ``connection`` until ``place`` is full, and not a byte more."""

    def __init__(self, connection: _Connection, place: memoryview, arrived: Callable[[int], None]) -> None:
        self._connection = connection
        self._place = place
        self._arrived = arrived
        self._at = 0
        self._lent = place[:0]
        """What the transport receives into. It is released, and not left to the garbage collector: an error may keep
        the transport's frame alive, and with it memory that the caller would have back."""
        self._full: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        self._connection.transport.set_protocol(self)
        try:
            await self._full
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """What arrives from here on goes through the client again, which takes it for more of the body: rightly so."""
        self._connection.transport.set_protocol(self._connection.owner)

    def get_buffer(self, sizehint: int) -> memoryview:
        self._lent.release()
        self._lent = self._place[self._at : self._at + PIECE_BYTES_MAX]
        return self._lent

    def buffer_updated(self, nbytes: int) -> None:
        self._lent.release()
        if self._full.done():  # cancelled, and not yet given back
            return
        self._at += nbytes
        try:
            self._arrived(nbytes)
        except Exception as error:  # noqa: BLE001  the transport would log it, and close the connection
            self._give_back()
            self._full.set_exception(error)
            return
        if self._at == self._place.nbytes:
            self._give_back()
            self._full.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._lent.release()
        self._connection.owner.connection_lost(error)
        if not self._full.done():
            missing = self._place.nbytes - self._at
            self._full.set_exception(ConnectionError(f"the connection ended {missing} bytes early"))

    def pause_writing(self) -> None:
        self._connection.owner.pause_writing()

    def resume_writing(self) -> None:
        self._connection.owner.resume_writing()

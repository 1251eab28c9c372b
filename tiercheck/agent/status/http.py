"""A web server for a few pages, on the loopback address alone: GET, one request a connection, everything bounded."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping

from tiercheck.errors import ConfigurationError

__all__ = ["HttpServer", "View"]

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
HEAD_BYTES_MAX = 8 << 10
REQUEST_S_MAX = 5.0
ANSWER_S_MAX = 30.0
CONNECTIONS_MAX = 32
"""More at a time are closed at once."""
_REASONS = {
    **{200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"},
    **{408: "Request Timeout", 431: "Request Header Fields Too Large", 500: "Internal Server Error"},
}
# The page brings its style and script along, and fetches from nowhere else.
_HEADERS = (
    "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n"
    "Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'\r\n"
)

View = Callable[[], Awaitable[tuple[str, str]]]
"""Content type and content of a page."""


class Refused(Exception):
    """The request gets this status and nothing else."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HttpServer:
    """Serves each path of ``views``.

    The ``Host`` of a request must be this server's own: else a web page elsewhere could read it through the visitor's
    browser, under a name of its own that it has resolve to this machine (DNS rebinding).
    """

    def __init__(self, views: Mapping[str, View]) -> None:
        self._views = dict(views)
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Future[None]] = set()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/"

    @property
    def port(self) -> int:
        assert self._server is not None, "not started"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self, port: int = 0) -> None:
        """Listen (0: at any free port). Errors: ``ConfigurationError`` if the port cannot be had."""
        try:
            self._server = await asyncio.start_server(self._accept, HOST, port, limit=HEAD_BYTES_MAX)
        except OSError as error:
            raise ConfigurationError(
                f"the status page cannot have port {port} of {HOST}: {os.strerror(error.errno or 0)}; give another "
                f"--http-port, or 0 for any free one ('ss -ltnp sport = :{port}' names the process that has it)"
            ) from error

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for answering in self._answering:
            answering.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._answering) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        answering = asyncio.ensure_future(self._answer(reader, writer))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(await self._respond(reader))
            async with asyncio.timeout(ANSWER_S_MAX):
                await writer.drain()
        except (ConnectionError, TimeoutError):
            log.debug("a browser went away")
        finally:
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader) -> bytes:
        try:
            view, has_body = await self._read(reader)
            kind, content = await view()
        except Refused as refusal:
            return response(refusal.status, "text/plain; charset=utf-8", f"{refusal}\n")
        except Exception:
            # Whatever is wrong with a view: the one who asked is told, and the log has the rest.
            log.exception("a page failed")
            return response(500, "text/plain; charset=utf-8", "the page failed; the agent's log says why\n")
        return response(200, kind, content, has_body=has_body)

    async def _read(self, reader: asyncio.StreamReader) -> tuple[View, bool]:
        """The view asked for, and whether its content is wanted. Errors: :class:`Refused`."""
        try:
            async with asyncio.timeout(REQUEST_S_MAX):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except TimeoutError:
            raise Refused(408, f"no whole request within {REQUEST_S_MAX:g} s") from None
        except asyncio.LimitOverrunError:
            raise Refused(431, f"a request has at most {HEAD_BYTES_MAX} bytes") from None
        except asyncio.IncompleteReadError:
            raise Refused(400, "the request is not whole") from None
        first, *lines = head.split("\r\n")
        parts = first.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            raise Refused(400, "this is no HTTP request")
        method, target, _ = parts
        hosts = [value.strip() for name, _, value in (line.partition(":") for line in lines) if name.lower() == "host"]
        if len(hosts) != 1 or hosts[0].lower() not in (f"{HOST}:{self.port}", f"localhost:{self.port}"):
            raise Refused(403, f"this server is called {HOST}:{self.port}")
        if method not in ("GET", "HEAD"):
            raise Refused(405, "there is nothing here but to look at")
        view = self._views.get(target.partition("?")[0])
        if view is None:
            raise Refused(404, f"there are {', '.join(self._views)}")
        return view, method == "GET"


def response(status: int, kind: str, content: str, *, has_body: bool = True) -> bytes:
    body = content.encode()
    allow = "Allow: GET, HEAD\r\n" if status == 405 else ""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"{allow}{_HEADERS}Connection: close\r\n\r\n"
    )
    return head.encode() + (body if has_body else b"")

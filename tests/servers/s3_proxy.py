"""A proxy between an S3 client and its server that does what no healthy server does, where a test says so.

::

    with S3Proxy(server) as proxy:
        proxy.fail(503, "SlowDown", on=put, times=3)
        ...                                 # endpoint_url=proxy.endpoint_url
        assert len(proxy.seen) == ...
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import parse_qs, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from tests.servers.seaweed import Seaweed

__all__ = ["Answer", "Fault", "Request", "Reset", "S3Proxy", "is_operation"]

WAIT_S_MAX = 60.0


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes = field(repr=False)

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.target).query, keep_blank_values=True)

    @property
    def operation(self) -> str:
        """S3's name for what is asked, of those that a driver asks."""
        query = self.query
        if "uploads" in query:
            return "CreateMultipartUpload" if self.method == "POST" else "ListMultipartUploads"
        if "uploadId" in query:
            return {
                "PUT": "UploadPart",
                "POST": "CompleteMultipartUpload",
                "DELETE": "AbortMultipartUpload",
                "GET": "ListParts",
            }[self.method]
        if "delete" in query:
            return "DeleteObjects"
        if "list-type" in query:
            return "ListObjectsV2"
        return {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject"}.get(self.method, self.method)

    @property
    def path(self) -> str:
        return urlsplit(self.target).path


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)


class Reset(Exception):
    """Reset the connection, having sent ``sent`` bytes of the answer's head and body first."""

    def __init__(self, sent: bytes = b"") -> None:
        super().__init__(sent)
        self.sent = sent


@dataclass
class Fault:
    """What happens to the requests that ``on`` accepts, the first ``times`` of them."""

    on: Callable[[Request], bool]
    times: int
    before: Callable[[Request], Request | Answer | None] | None = None
    """Returns the request to forward, or the answer without forwarding it, or ``None`` for no answer, ever."""
    after: Callable[[Request, Answer], Answer] | None = None


class S3Proxy:
    """Forwards to ``server``, and fails where it was told to. ``seen`` holds the requests, in order of arrival."""

    def __init__(self, server: Seaweed) -> None:
        self._server = server
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="s3 proxy")
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        self.seen: list[Request] = []
        self.hasty: str | None = None
        """The operation that is answered with 412 before its body is asked for, where the client offers that."""
        self.knows_expect = True
        """A server of HTTP/1.0 does not: it waits for the body, and the client for the word to send it."""

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, operation: str) -> int:
        return sum(request.operation == operation for request in self.seen)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(WAIT_S_MAX):
            raise RuntimeError("the proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S_MAX)

    # What tests ask for.

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def fail(self, status: int, code: str, *, on: str, times: int = 1, extra: str = "") -> None:
        """Answer with an error of S3's, without the server knowing of the request."""
        answer = error(status, code, extra)
        self.add(Fault(is_operation(on), times, before=lambda _: answer))

    def reset(self, *, on: str, times: int = 1) -> None:
        """Break the connection before the server knows of the request."""

        def before(_: Request) -> Request:
            raise Reset

        self.add(Fault(is_operation(on), times, before=before))

    def lose_answer(self, *, on: str, times: int = 1) -> None:
        """Let the server act, and break the connection instead of answering."""

        def after(_: Request, answer: Answer) -> Answer:
            raise Reset

        self.add(Fault(is_operation(on), times, after=after))

    def stall(self, *, on: str, times: int = 1) -> None:
        """Never answer, and never close."""
        self.add(Fault(is_operation(on), times, before=lambda _: None))

    def truncate(self, nbytes: int, *, on: str = "GetObject", times: int = 1) -> None:
        """Send the head and the first ``nbytes`` of the body, then break the connection."""

        def after(_: Request, answer: Answer) -> Answer:
            raise Reset(head_of(answer) + answer.body[:nbytes])

        self.add(Fault(is_operation(on), times, after=after))

    def flip_answer(self, offset: int, *, on: str = "GetObject", times: int = 1) -> None:
        """Invert a bit of the answer's body."""
        self.add(
            Fault(is_operation(on), times, after=lambda _, answer: replace(answer, body=flip(answer.body, offset)))
        )

    def flip_request(self, offset: int, *, on: str, times: int = 1) -> None:
        """Invert a bit of the request's body, on its way to the server."""
        self.add(
            Fault(is_operation(on), times, before=lambda request: replace(request, body=flip(request.body, offset)))
        )

    def ignore_conditions(self) -> None:
        """Be a server that has never heard of ``If-Match`` and ``If-None-Match`` on a put."""
        self.add(
            Fault(
                lambda request: request.method == "PUT" and bool({"if-match", "if-none-match"} & set(request.headers)),
                2**62,
                before=lambda request: self._signed_anew(request, {"if-match", "if-none-match"}),
            )
        )

    def refuse_what_is_not_encrypted(self) -> None:
        """Be a bucket whose policy refuses each put that says nothing of encryption, or has no checksum."""
        wanted = {"x-amz-server-side-encryption", "x-amz-checksum-crc32c"}

        def before(request: Request) -> Request | Answer:
            if not wanted <= request.headers.keys():
                return error(403, "AccessDenied")
            return self._signed_anew(request, {"x-amz-server-side-encryption"})  # this server knows none

        self.add(Fault(is_operation("PutObject"), 2**62, before=before))

    def forget_checksum_types(self) -> None:
        """Be a server that knows no checksum but Content-MD5, on requests and on answers."""

        def before(request: Request) -> Request:
            return self._signed_anew(request, {name for name in request.headers if name.startswith("x-amz-checksum-")})

        self.add(
            Fault(
                lambda request: any(name.startswith("x-amz-checksum-") for name in request.headers),
                2**62,
                before=before,
            )
        )

    def _signed_anew(self, request: Request, without: set[str]) -> Request:
        """The request without some headers, which its signature covers."""
        dropped = without | {"authorization", "x-amz-date", "x-amz-content-sha256"}
        kept = {name: value for name, value in request.headers.items() if name not in dropped}
        signable = AWSRequest(request.method, f"http://{request.headers['host']}{request.target}", headers=kept)
        signable.context["client_config"] = Config(s3={"payload_signing_enabled": False})
        S3SigV4Auth(Credentials(self._server.access_key, self._server.secret_key), "s3", self._server.region).add_auth(
            signable
        )
        return replace(request, headers={name.lower(): value for name, value in signable.headers.items()})

    # The proxy itself.

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        listener = self._loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.port = listener.sockets[0].getsockname()[1]
        self._ready.set()
        try:
            self._loop.run_forever()
        finally:
            listener.close()
            for task in self._connections:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._connections, return_exceptions=True))
            self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while (head := await read_head(reader)) is not None:
                request = await self._body(head, reader, writer)
                self.seen.append(request)
                answer = await self._answer(request)
                writer.write(head_of(answer))
                if request.method != "HEAD":
                    writer.write(answer.body)
                await writer.drain()
        except Reset as reset:
            if reset.sent:
                writer.write(reset.sent)
                await writer.drain()
            # No lingering: the peer sees a reset, not an end.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away, or the server was killed: the client sees the same of us
        finally:
            self._connections.discard(task)
            writer.close()

    async def _body(self, head: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
        if head.headers.pop("expect", "").lower() == "100-continue":
            if self.hasty is not None and is_operation(self.hasty)(head):
                refusal = error(412, "PreconditionFailed")
                writer.write(head_of(refusal) + refusal.body)
                await writer.drain()
                raise ConnectionError("answered without asking for the body")
            if self.knows_expect:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return replace(head, body=await reader.readexactly(int(head.headers.get("content-length", "0"))))

    async def _answer(self, request: Request) -> Answer:
        fault = self._fault(request)
        if fault is not None and fault.before is not None:
            changed = fault.before(request)
            if isinstance(changed, Answer):
                return changed
            if changed is None:
                await asyncio.sleep(WAIT_S_MAX)
                raise Reset
            request = changed
        answer = await self._forward(request)
        return fault.after(request, answer) if fault is not None and fault.after is not None else answer

    def _fault(self, request: Request) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.times > 0 and fault.on(request):
                    fault.times -= 1
                    return fault
        return None

    async def _forward(self, request: Request) -> Answer:
        """To the server over a connection of its own; HTTP/1.0, so that the answer ends where the connection does."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            headers = {**request.headers, "content-length": str(len(request.body)), "connection": "close"}
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            writer.write(f"{request.method} {request.target} HTTP/1.0\r\n{head}\r\n".encode("latin-1") + request.body)
            await writer.drain()
            raw = await reader.read(-1)
        finally:
            writer.close()
        if not raw:
            raise Reset
        head_bytes, _, body = raw.partition(b"\r\n\r\n")
        status_line, *lines = head_bytes.decode("latin-1").split("\r\n")
        found = dict(line.split(": ", 1) for line in lines if ": " in line)
        kept = {name: value for name, value in found.items() if name.lower() not in ("connection", "transfer-encoding")}
        return Answer(int(status_line.split()[1]), kept, body)


async def read_head(reader: asyncio.StreamReader) -> Request | None:
    """A request without its body."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    request_line, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, target, _ = request_line.split(" ")
    return Request(method, target, headers, b"")


def error(status: int, code: str, extra: str = "") -> Answer:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>as the test wants</Message>{extra}</Error>'
    return Answer(status, {"Content-Type": "application/xml"}, body.encode())


def head_of(answer: Answer) -> bytes:
    headers = dict(answer.headers)
    if not any(name.lower() == "content-length" for name in headers):
        headers["Content-Length"] = str(len(answer.body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {answer.status} Answer\r\n{lines}\r\n".encode("latin-1")


def is_operation(name: str) -> Callable[[Request], bool]:
    return lambda request: request.operation == name


def flip(content: bytes, offset: int) -> bytes:
    changed = bytearray(content)
    changed[offset] ^= 1
    return bytes(changed)

"""Objects in a neighbour node's memory: ``peer://NAMESPACE?at=HOST:PORT``, or ``at=ipc:///PATH`` on this machine.

Options: ``server_key`` (64 hex digits; default: the one in ``keys``), ``keys`` (a directory; default: the environment
variable ``TIERCHECK_KEYS``; a socket takes none, and over TCP without them only a server for tests lets anybody in),
``own`` (``yes``: the node's own memory of that name, to be read, instead of what it keeps for neighbours),
``connections``, ``credit`` (bytes under way at once), ``deadline`` (seconds without progress before a call fails),
``survives``.
"""

from __future__ import annotations

import asyncio
import builtins
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

from tiercheck.errors import Closed, ConfigurationError, PreconditionFailed, TierError
from tiercheck.keys import validate_key
from tiercheck.runtime.turns import Turns, wanted_turns
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.peer.address import check_private_socket, has_ipv6_alone, is_socket, parse_at
from tiercheck.tiers.peer.client.content import PayloadChunks
from tiercheck.tiers.peer.client.get import Getting
from tiercheck.tiers.peer.client.link import Link
from tiercheck.tiers.peer.client.protocol import Call, ClientSettings, Operation
from tiercheck.tiers.peer.client.put import Putting
from tiercheck.tiers.peer.keys import KEYS_VARIABLE, PeerKeys, parse_public_key
from tiercheck.tiers.peer.messages import (
    COUNT_MAX,
    KEYS_MAX,
    BadFrame,
    Delete,
    Done,
    Hello,
    Info,
    ListPage,
    MeasureUsage,
    Message,
    Page,
    Stat,
    UsageIs,
    Welcome,
)
from tiercheck.tiers.peer.own_memory import is_own, own_memory
from tiercheck.tiers.peer.server.limits import CHUNK_BYTES, CHUNK_BYTES_MIN, CREDIT_BYTES, ENCRYPTED_CHUNK_BYTES
from tiercheck.tiers.peer.server.store import check_namespace
from tiercheck.tiers.url import TierURL, number_from, parse_yes, seconds_from, size_from
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives, Usage, is_unicode

__all__ = ["PeerDriver"]

CONNECTIONS = 1
CREDIT_BYTES_MAX = 4 << 30
DEADLINE_S = 30.0
CONNECT_S_MAX = 10.0
"""A peer that cannot be reached in that time is away: :meth:`PeerDriver.open` does not wait for its return."""
PREFIX_BYTES_MAX = 1024


T = TypeVar("T")


class PeerDriver(TierDriver):
    """The client of a :class:`~tiercheck.tiers.peer.PeerServer`, one namespace of it.

    Survives a failure of this node, the one that writes. Not mappable; puts are conditional if asked, atomically
    among all clients. A broken transfer goes on where it was, across reconnections, for as long as it moves on at
    least once every ``deadline_s`` seconds. ``CREATE`` and ``UPDATE`` are told apart from their own repetition; only
    where the server itself was restarted between storing and answering is the outcome unknown, which is
    ``Transient``.
    """

    def __init__(
        self,
        namespace: str,
        at: str,
        *,
        keys: PeerKeys | None = None,
        server_key: str | None = None,
        connections: int = CONNECTIONS,
        credit_bytes: int = CREDIT_BYTES,
        chunk_bytes: int | None = None,
        deadline_s: float = DEADLINE_S,
        survives: Survives = Survives.NODE,
        own: bool = False,
    ) -> None:
        self._namespace = own_memory(namespace) if own else namespace
        self._at = at
        self._keys = keys
        self._server_key = server_key or (keys.server_public if keys is not None else None)
        self._connections = connections
        self._credit_bytes = credit_bytes
        self._chunk_bytes = chunk_bytes or (CHUNK_BYTES if keys is None else ENCRYPTED_CHUNK_BYTES)
        self._deadline_s = deadline_s
        self._url = TierURL("peer", namespace, {"at": at, **({"own": "yes"} if own else {})}).text
        self._capabilities = Capabilities(
            survives=survives,
            conditional_put=True,
            part_bytes=self._chunk_bytes,
            parts_in_flight=max(1, credit_bytes // self._chunk_bytes),
        )
        self._link: Link | None = None

    @classmethod
    def from_url(cls, url: TierURL) -> PeerDriver:
        """Errors: ``ConfigurationError``, also without ``at`` and for keys that cannot be read."""
        options = url.reader()
        at = options.take("at", parse_at, None)
        server_key = options.take("server_key", parse_public_key, None)
        directory = options.take("keys", str, None)
        connections = options.take("connections", number_from(1, 16), CONNECTIONS)
        credit_bytes = options.take("credit", size_from(CHUNK_BYTES_MIN, CREDIT_BYTES_MAX), CREDIT_BYTES)
        deadline_s = options.take("deadline", seconds_from(0, 86400), DEADLINE_S)
        survives = options.take("survives", Survives.parse, Survives.NODE)
        own = options.take("own", parse_yes, False)
        options.finish()
        try:
            if is_own(check_namespace(url.location)):
                raise ValueError(f"names that begin with {own_memory('')!r} are taken: write own=yes")
        except ValueError as error:
            raise ConfigurationError(f"peer:// needs a namespace, as in peer://run?at=HOST:PORT: {error}") from None
        if at is None:
            raise ConfigurationError(
                f"{url.text} does not say where the peer is: a Checkpointer that opens a hierarchy fills its "
                f"address in; elsewhere give it, as in peer://{url.location}?at=HOST:PORT"
            )
        if is_socket(at):
            if server_key is not None or directory is not None:
                raise ConfigurationError(f"the socket of {url.text} proves the user by itself: take away its keys")
        else:
            directory = directory or os.environ.get(KEYS_VARIABLE)
        if server_key is not None and not directory:
            raise ConfigurationError(
                f"{url.text} names a server_key, but this client has no keys of its own: give keys=DIRECTORY or set "
                f"{KEYS_VARIABLE} (make them with: tiercheck keys DIRECTORY)"
            )
        return cls(
            url.location,
            at,
            keys=PeerKeys.load(directory) if directory else None,
            server_key=server_key,
            connections=connections,
            credit_bytes=credit_bytes,
            deadline_s=deadline_s,
            survives=survives,
            own=own,
        )

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def open(self) -> None:
        """Errors: ``Transient`` if the peer does not answer within the deadline (10 s at most);
        ``Unauthorized``, which says which key is missing, or that others could have made the peer's socket; what
        opening the namespace there raises.
        """
        if self._link is not None:
            raise RuntimeError(f"{self._url} is open already")
        if is_socket(self._at):
            try:
                check_private_socket(self._at)
            except TierError as error:
                error.tier = self._url
                raise
        connect_s = min(self._deadline_s, CONNECT_S_MAX)
        began = time.monotonic()
        ipv6 = await has_ipv6_alone(self._at, connect_s / 2)
        connect_s -= time.monotonic() - began
        settings = ClientSettings(self._at, self._chunk_bytes, self._credit_bytes, connect_s, ipv6=ipv6)
        link = self._link = Link(settings, connections=self._connections, keys=self._keys, server_key=self._server_key)
        try:
            welcome = await self._call(Call(Hello(self._namespace), reader(Welcome)), Welcome)
        except BaseException:
            await self.close()
            raise
        link.settle(
            incarnation=welcome.incarnation,
            chunk_bytes=min(self._chunk_bytes, welcome.chunk_bytes_max),
            deadline_s=self._deadline_s,
        )

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        validate_key(key)
        self._opened(key)
        if mode.etag is not None and not (is_unicode(mode.etag) and len(mode.etag.encode()) <= PREFIX_BYTES_MAX):
            raise PreconditionFailed("no object has such an etag", tier=self._url, key=key)
        chunks = PayloadChunks(payload)
        putting = Putting(self._namespace, key, chunks, mode, new_transfer)
        allowing: asyncio.Task[None] | None = None
        if (turns := wanted_turns()) is not None and chunks.nbytes > self._chunk_bytes:
            putting.allowed_nbytes = 0
            allowing = asyncio.create_task(self._allow(putting, chunks.nbytes, turns))
        try:
            return await self._call(putting, ObjectInfo)
        finally:
            if allowing is not None:
                allowing.cancel()
            chunks.release()

    async def _allow(self, putting: Putting, nbytes: int, turns: Turns) -> None:
        """Let the chunks of a put go in their turn."""
        try:
            for start in builtins.range(0, nbytes, self._chunk_bytes):
                stop = min(start + self._chunk_bytes, nbytes)
                await turns.turn(stop - start)
                putting.allowed_nbytes = stop
        finally:
            putting.allowed_nbytes = math.inf

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        validate_key(key)
        if into is not None and (into.readonly or into.format != "B" or into.ndim != 1 or not into.c_contiguous):
            raise ValueError("into must be a writable, contiguous memoryview of format B")
        if range is not None and range.stop > COUNT_MAX:
            raise ValueError(f"{range} reaches past the end of any object")
        return await self._call(Getting(self._namespace, key, range, into, new_transfer), memoryview)

    async def stat(self, key: str) -> ObjectInfo:
        validate_key(key)
        info = await self._call(Call(Stat(self._namespace, key), reader(Info), key), Info)
        return ObjectInfo(key, info.nbytes, info.etag)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        if len(prefix.encode(errors="replace")) > PREFIX_BYTES_MAX or not is_unicode(prefix):
            self._opened()
            return  # no key starts like that
        after = ""
        while True:
            page = await self._call(Call(ListPage(self._namespace, prefix, after), reader(Page)), Page)
            for key, nbytes, etag in page.entries:
                yield ObjectInfo(key, nbytes, etag)
            if not page.more:
                return
            after = page.entries[-1][0]

    async def delete(self, keys: Iterable[str]) -> None:
        checked = [validate_key(key) for key in keys]
        self._opened()
        for start in builtins.range(0, len(checked), KEYS_MAX):
            batch = tuple(checked[start : start + KEYS_MAX])
            await self._call(Call(Delete(new_transfer(), self._namespace, batch), reader(Done)), Done)

    async def usage(self) -> Usage:
        usage = await self._call(Call(MeasureUsage(self._namespace), reader(UsageIs)), UsageIs)
        return Usage(usage.used_bytes, usage.limit_bytes if usage.limited else None)

    def _opened(self, key: str | None = None) -> Link:
        if self._link is None:
            raise Closed("the driver is not open", tier=self._url, key=key)
        return self._link

    async def _call(self, operation: Operation, kind: type[T]) -> T:
        """The operation's result, its errors naming this tier."""
        try:
            result = await self._opened(operation.key).run(operation)
        except TierError as error:
            error.tier = self._url
            error.key = error.key or operation.key
            raise
        assert isinstance(result, kind)
        return result


def reader(kind: type[T]) -> Callable[[Message], T]:
    """Takes an answer for what it must be; another one is dropped, and the question asked again."""

    def read(message: Message) -> T:
        if not isinstance(message, kind):
            raise BadFrame("unasked", f"{type(message).__name__} is no answer to this")
        return message

    return read


def new_transfer() -> bytes:
    """An id that nobody guesses, and that comes once."""
    return secrets.token_bytes(16)

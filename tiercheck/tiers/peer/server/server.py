"""A peer server: objects of other nodes in this node's memory, served over ZeroMQ.

The protocol runs in one thread of the server's own, so that frames are checked and copied without holding up the
event loop; the namespaces' drivers run in the loop that started the server.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from tiercheck.errors import ConfigurationError, TierCheckError
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.peer.address import check_bind, endpoint_of, is_socket, peer_user
from tiercheck.tiers.peer.client.mailbox import Mailbox
from tiercheck.tiers.peer.keys import PeerKeys
from tiercheck.tiers.peer.messages import HEAD_BYTES_MAX
from tiercheck.tiers.peer.server.effects import Reply, Work
from tiercheck.tiers.peer.server.flood import FloodWatch
from tiercheck.tiers.peer.server.heap import keep_frame_memory
from tiercheck.tiers.peer.server.limits import (
    ENVELOPE_BYTES,
    LOOPBACK_RECEIVE_BYTES,
    LOOPBACK_SEND_BYTES,
    PeerLimits,
    PeerStatistics,
)
from tiercheck.tiers.peer.server.protocol import ServerProtocol
from tiercheck.tiers.peer.server.store import NamespaceStore, OpenOwn

__all__ = ["PeerServer"]

log = logging.getLogger(__name__)

IO_THREADS = 2
TICK_S = 0.25
HANDSHAKE_MS = 5000
"""A client that takes longer to greet is cut off."""
KEEPALIVE_S = 3
MESSAGES_AT_ONCE = 8
EVENTS_AT_ONCE = 256
MESSAGES_QUEUED_MAX = 8
QUEUED_BYTES_MAX = 16 << 20
"""Messages of one connection that wait to be handled, and their bytes; then its TCP window closes."""
SOCKET_BYTES_MAX = 32 << 20
LOOPBACK_SOCKET_BYTES_MAX = 4 * LOOPBACK_RECEIVE_BYTES
"""Bytes of one connection that lie in the kernel, with and without keys."""
SWEEP_S = 0.1
"""How often connections are looked at for floods."""
FRAMES_KEPT_MAX = 3
"""Of a message; none of the protocol's has more than two."""
FRAMES_MAX = 64
"""A message of more ends its connection: it takes as long to let go of as many messages."""
FRAMES_AT_ONCE = 4096
"""That many of such a message, and then the rest of the work is looked at."""
REPLIES_QUEUED_MAX = 256
"""Replies that wait for one connection; the next is dropped, and its client asks again."""
ZAP_ADDRESS = "inproc://zeromq.zap.01"
MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
MONITORED |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class PeerServer:
    """Serves the namespaces that ``open_namespace`` opens (once each; :meth:`close` closes them).

    It is given the namespace's name, and for clients of another owner than this server's ``OWNER/NAME``. ``may_name``
    says which keys objects may have here; others are ``Unauthorized``. ``open_own`` opens a namespace of the node's own
    memory, which clients of this server's owner may read; without it nobody may.

    ``bind``: ``tcp://HOST:PORT``, port 0 for a free one; or ``ipc:///PATH``, a socket in a directory of this user's
    alone, which lets nobody else in. With ``keys`` only clients whose public key is listed get in, and all traffic is
    encrypted. TCP without keys is for tests and benchmarks, and for a loopback address: every local user gets in.
    Runs inside the event loop that calls :meth:`start`; call :meth:`close` from the same one.
    """

    def __init__(
        self,
        open_namespace: Callable[[str], Awaitable[TierDriver]],
        *,
        bind: str = "tcp://127.0.0.1:0",
        keys: PeerKeys | None = None,
        limits: PeerLimits | None = None,
        may_name: Callable[[str], bool] = lambda _: True,
        open_own: OpenOwn | None = None,
    ) -> None:
        self._may_name = may_name
        self._open_own = open_own
        self._bind = check_bind(bind, with_keys=keys is not None)
        self._keys = keys
        self._limits = limits or PeerLimits()
        self._open_namespace = open_namespace
        self._running: _Running | None = None
        self._last = PeerStatistics()

    @property
    def endpoint(self) -> str:
        """``HOST:PORT`` with the port that was bound, or ``ipc:///PATH``. ``RuntimeError`` before :meth:`start`."""
        if self._running is None:
            raise RuntimeError("the peer server is not running")
        return self._running.endpoint

    @property
    def server_key(self) -> str | None:
        """The public key that clients must know the server by, 64 hex digits; ``None`` without keys."""
        return self._keys.server_public if self._keys else None

    @property
    def statistics(self) -> PeerStatistics:
        return self._running.statistics if self._running is not None else self._last

    def check(self) -> None:
        """Errors: what has ended the thread that serves, if anything has: then nobody is served any more."""
        if self._running is not None and (error := self._running.error) is not None:
            raise RuntimeError(f"the peer server at {self.endpoint} has stopped: {type(error).__name__}") from error

    async def start(self) -> None:
        """Bind and serve. Errors: ``ConfigurationError`` if the address cannot be bound; ``RuntimeError`` twice."""
        if self._running is not None:
            raise RuntimeError("the peer server is running already")
        store = NamespaceStore(self._open_namespace, self._limits, self._may_name, self._open_own)
        self._running = _Running(self._bind, self._keys, self._limits, store)
        if is_socket(self.endpoint):
            log.info("peer server at %s for this user", self.endpoint)
        elif self._keys is None:
            log.warning("peer server at %s without keys: every user of this machine gets in", self.endpoint)
        else:
            log.info("peer server at %s for %d listed clients", self.endpoint, len(self._keys.allowed))

    async def close(self) -> None:
        """Stop serving and close the drivers. What was not published is dropped. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            self._last = replace(running.statistics, clients=0, bytes_in_flight=0, transfers=0)
            await running.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class _Running:
    """From bind to close: the thread with its sockets, and the tasks in the loop."""

    def __init__(self, bind: str, keys: PeerKeys | None, limits: PeerLimits, store: NamespaceStore) -> None:
        self.error: Exception | None = None
        """What has ended the thread before its time."""
        self._keys = keys
        self._limits = limits
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._mailbox: Mailbox[tuple[int, object] | None] = Mailbox()
        self._protocol = ServerProtocol(limits, secrets.randbits(63))
        self._shell_dropped: dict[str, int] = {}
        self._copies: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        """Of each client, in the order in which they are sent."""
        self._skipping = False
        """Whether a message of too many frames is let go of, and nothing else can be read before."""
        keep_frame_memory()
        self._context = zmq.Context(io_threads=IO_THREADS)
        # Bound before the router is, so that no connection is taken unasked.
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.bind(ZAP_ADDRESS)
        self._router = self._make_router(bind)
        self._monitor = self._router.get_monitor_socket(MONITORED)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._close_sockets()
            fix = ""
            if error.errno == errno.EADDRINUSE:
                port = bind.rpartition(":")[2]
                fix = f"; give another port, or 0 for any free one ('ss -ltnp sport = :{port}' names who has it)"
            raise ConfigurationError(f"the peer server cannot bind {bind}: {error.strerror}{fix}") from error
        self.endpoint = endpoint_of(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        socket_bytes_max = LOOPBACK_SOCKET_BYTES_MAX if keys is None else SOCKET_BYTES_MAX
        # One more is half read.
        unread_bytes_max = (messages_queued_max(limits) + 1) * limits.chunk_bytes + socket_bytes_max
        self._watched = FloodWatch(self.endpoint, unread_bytes_max, limits.private_bytes)
        self._thread = threading.Thread(target=self._serve, name=f"tiercheck peer server {self.endpoint}", daemon=True)
        self._thread.start()

    def _make_router(self, bind: str) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        if self._keys is None:
            router.setsockopt(zmq.SNDBUF, LOOPBACK_SEND_BYTES)
            router.setsockopt(zmq.RCVBUF, LOOPBACK_RECEIVE_BYTES)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, max(self._limits.chunk_bytes, HEAD_BYTES_MAX) + ENVELOPE_BYTES)
        router.setsockopt(zmq.RCVHWM, messages_queued_max(self._limits))
        router.setsockopt(zmq.SNDHWM, REPLIES_QUEUED_MAX)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        # No heartbeats: libzmq aborts the process if one finds a connection broken whose input waits to be read.
        router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
        router.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
        router.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        router.setsockopt(zmq.ZAP_DOMAIN, b"tiercheck")
        if "[" in bind:
            router.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(self._keys.server_secret))
            router.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(self._keys.server_public))
        return router

    # In the event loop.

    @property
    def statistics(self) -> PeerStatistics:
        counted = self._protocol.statistics(len(self._watched))
        return replace(counted, dropped=MappingProxyType({**counted.dropped, **self._shell_dropped}))

    async def close(self) -> None:
        self._mailbox.post(None)
        await asyncio.to_thread(self._thread.join)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._mailbox.close()
        await self._store.close()

    def _spawn(self, work: Work) -> None:
        task = self._loop.create_task(self._do(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, work: Work) -> None:
        outcome: object
        try:
            outcome = await self._store.do(work.task)
        except (TierCheckError, ValueError) as error:
            outcome = error
        except Exception as error:
            log.exception("peer server at %s: %s failed", self.endpoint, type(work.task).__name__)
            outcome = error
        self._mailbox.post((work.number, outcome))

    # In the thread.

    def _serve(self) -> None:
        poller = zmq.Poller()
        for reader in (self._zap, self._monitor, self._mailbox.fd):
            poller.register(reader, zmq.POLLIN)
        next_tick = time.monotonic() + TICK_S
        next_sweep = 0.0
        reading = False
        try:
            while True:
                if reading == self._protocol.saturated:
                    reading = not reading
                    poller.register(self._router, zmq.POLLIN if reading else 0)
                ready = dict(
                    poller.poll(
                        math.ceil(
                            max(0.0, (next_tick if not len(self._watched) else next_sweep) - time.monotonic()) * 1000
                        )
                    )
                )
                if self._monitor in ready:
                    self._watch()
                if self._zap in ready:
                    self._admit()
                if self._mailbox.fd in ready:
                    for letter in self._mailbox.take():
                        if letter is None:
                            return
                        self._act(self._protocol.done(*letter, time.monotonic()))
                if self._router in ready:
                    self._receive()
                now = time.monotonic()
                if now >= next_sweep:
                    next_sweep = now + SWEEP_S
                    self._sweep()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._act(self._protocol.tick(now))
                self._count_sent_copies()
        except Exception as error:
            log.exception("the peer server at %s stopped", self.endpoint)
            self.error = error
        finally:
            self._close_sockets()

    def _receive(self) -> None:
        """A few messages, so that neither a busy client nor the loop's answers have to wait long."""
        for _ in range(MESSAGES_AT_ONCE):
            if self._protocol.saturated or not self._skipped():
                return
            try:
                peer = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames = self._rest_of_message(peer.more)
            owner = self._owner(frames[0]) if frames else None
            if owner is None or self._skipping:
                self._drop("malformed")
                continue
            buffers = [frame.buffer for frame in frames]
            self._act(self._protocol.receive(peer.bytes, buffers, time.monotonic(), owner))

    def _rest_of_message(self, more: bool) -> list[zmq.Frame]:
        """What follows the sender's name. One frame too many is enough to know what it is: the others are let go of,
        one by one. If there are far too many the connection ends, and they are skipped later."""
        kept: list[zmq.Frame] = []
        fd: int | None = None
        count = nbytes = 0
        while more and count < FRAMES_MAX:
            frame = self._router.recv(zmq.NOBLOCK, copy=False)  # a message is there as a whole, or not at all
            more = frame.more
            count, nbytes = count + 1, nbytes + len(frame)
            if len(kept) < FRAMES_KEPT_MAX:
                kept.append(frame)
                fd = frame.get(zmq.SRCFD) if fd is None else fd
        self._skipping = more
        if fd is not None:
            self._watched.handled(fd, count, nbytes)
            if more:
                self._watched.cut(fd)
                self._drop("flood")
        return kept

    def _skipped(self) -> bool:
        """Let go of more of a message with too many frames; whether all of them are gone."""
        for _ in range(FRAMES_AT_ONCE):
            if not self._skipping:
                break
            self._skipping = self._router.recv(zmq.NOBLOCK, copy=False).more
        return not self._skipping

    def _owner(self, frame: zmq.Frame) -> str | None:
        """Whose client has sent it, as :meth:`_admit` has said; empty for our own, and if there are no keys. ``None``
        for nobody's."""
        if self._keys is None:
            return ""
        try:
            owner = str(frame.get("User-Id"))
        except zmq.ZMQError:
            return None
        return "" if owner == self._keys.owner else owner

    def _act(self, effects: list[Reply | Work]) -> None:
        for effect in effects:
            if isinstance(effect, Work):
                self._loop.call_soon_threadsafe(self._spawn, effect)
            else:
                self._send(effect)

    def _send(self, reply: Reply) -> None:
        tracker: zmq.MessageTracker | None = None
        is_copy = reply.copied_bytes > 0
        try:
            self._router.send(reply.peer, zmq.NOBLOCK | zmq.SNDMORE)
            if reply.data is None:
                self._router.send(reply.head, zmq.NOBLOCK)
            else:
                self._router.send(reply.head, zmq.NOBLOCK | zmq.SNDMORE)
                tracker = self._router.send(reply.data, zmq.NOBLOCK, copy=False, track=is_copy)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._drop("reply not taken" if error.errno == zmq.EAGAIN else "client gone")
        if is_copy:
            if tracker is None:
                self._protocol.gets.copies.give_back(reply.peer, reply.copied_bytes)
            else:
                self._copies.setdefault(reply.peer, deque()).append((tracker, reply.copied_bytes))

    def _count_sent_copies(self) -> None:
        for client, copies in list(self._copies.items()):
            while copies and copies[0][0].done:
                self._protocol.gets.copies.give_back(client, copies.popleft()[1])
            if not copies:
                del self._copies[client]

    def _admit(self) -> None:
        """Answer libzmq's question whether a connection may be (RFC 27, ZAP)."""
        frames = self._zap.recv_multipart()
        envelope, request = frames[: frames.index(b"") + 1], frames[frames.index(b"") + 1 :]
        status, reason, owner = b"400", b"not listed", b""
        if self._crowded():
            status, reason = b"500", b"too many connections"
            self._drop("too many connections")
        elif self._watched.full:
            status, reason = b"500", b"no memory"
            self._drop("no memory")
        elif is_socket(self.endpoint):
            if peer_user(request[3].decode(errors="replace")) == os.geteuid():
                status, reason = b"200", b"this user"
            else:
                self._drop("another user")
        elif self._keys is None:
            status, reason = b"200", b"loopback"
        elif len(request) == 7 and request[5] == b"CURVE" and request[6].hex() in self._keys.allowed:
            status, reason, owner = b"200", b"listed", self._keys.allowed[request[6].hex()].encode()
        else:
            self._drop("not listed")
        self._zap.send_multipart([*envelope, b"1.0", request[1], status, reason, owner, b""])

    def _crowded(self) -> bool:
        """Whether the connections, the one that asks among them, are too many. Those that are gone do not count."""
        if len(self._watched) > self._limits.connections:
            self._watch()
            self._sweep()
        return len(self._watched) > self._limits.connections

    def _watch(self) -> None:
        """Learn which connections came and went until now."""
        for _ in range(EVENTS_AT_ONCE):
            if not self._monitor.poll(0):
                return
            message = recv_monitor_message(self._monitor)
            if message["event"] == zmq.EVENT_ACCEPTED:
                self._watched.accepted(message["value"])
            elif message["event"] == zmq.EVENT_DISCONNECTED:
                self._watched.disconnected(message["value"])
            else:
                self._drop("handshake")

    def _sweep(self) -> None:
        for _ in range(self._watched.sweep()):
            self._drop("flood")

    def _drop(self, reason: str) -> None:
        self._shell_dropped[reason] = self._shell_dropped.get(reason, 0) + 1

    def _close_sockets(self) -> None:
        self._router.disable_monitor()
        for socket in (self._monitor, self._router, self._zap):
            socket.close(linger=0)
        self._context.term()


def messages_queued_max(limits: PeerLimits) -> int:
    return max(1, min(MESSAGES_QUEUED_MAX, QUEUED_BYTES_MAX // limits.chunk_bytes))

"""The client's sockets, and the thread that drives them.

One thread a driver: it runs :class:`~tiercheck.tiers.peer.client.protocol.ClientProtocol` on what arrives, and hands
results to the event loop. Chunks are sent without a copy; an operation is reported only once ZeroMQ has let go of every
buffer that it sent, and where a peer stops reading, its connections are broken for that.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import zmq
from zmq.utils.monitor import recv_monitor_message

from tiercheck.errors import Closed, Transient
from tiercheck.runtime.chance import CHANCE
from tiercheck.tiers.peer.address import is_socket, zmq_address
from tiercheck.tiers.peer.client.mailbox import Mailbox
from tiercheck.tiers.peer.client.protocol import ClientProtocol, ClientSettings, Effect, Finish, Operation, Reset, Send
from tiercheck.tiers.peer.keys import PeerKeys
from tiercheck.tiers.peer.server.heap import keep_frame_memory
from tiercheck.tiers.peer.server.limits import CHUNK_BYTES_MAX, ENVELOPE_BYTES, LOOPBACK_SEND_BYTES

__all__ = ["Link"]

log = logging.getLogger(__name__)

TICK_S = 0.1
DRAIN_POLL_S = 0.001
DRAIN_S = 1.0
"""How long buffers may stay with ZeroMQ after their operation is over."""
DESCRIPTORS_OF_LINK = 24
DESCRIPTORS_OF_CONNECTION = 8
"""What ZeroMQ opens for a context, with four threads, and for a socket with its monitor: at most."""
FRAMES_AT_ONCE = 16
IO_THREADS_MAX = 4
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 2,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 6000,
}
"""A host that is not there is noticed within eight seconds, in the middle of a message within six."""
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
HANDSHAKE_MS = 5000
SILENT_S = 0.9 * HANDSHAKE_MS / 1000
"""A handshake that took so long was not refused."""
REFUSALS_MAX = 3
"""Handshakes that end without a reason, one after the other, before the peer counts as one that refuses us."""
MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
MONITORED |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CONNECTED
TURNED_AWAY_S = (1.0, 3.0)
"""ZeroMQ does not come back by itself to a peer that turned it away. The peer may let us in later; whoever else it
turned away shall not come at the same time."""
BUSY = 500
"""The status of a peer that turns everybody away for now (RFC 27)."""
ARRIVALS_QUEUED_MAX = 64
SENDS_QUEUED_MAX = 64

Done = Callable[[object], None]


@dataclass
class Connection:
    """One socket. ``link`` is the number of the connection that is up, or ``None``."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    link: int | None = None
    connected_at: float = 0.0
    backlog: deque[Send] = field(default_factory=deque)
    again_at: float = math.inf
    """When to connect again, after the peer has turned this one away."""


@dataclass
class Draining:
    """An operation that is over, but for buffers that ZeroMQ still has."""

    result: object
    until: float


class Link:
    """Runs operations on one peer. ``server_key`` (64 hex digits) goes with ``keys``; without both there is no CURVE.

    Made and used in one event loop; :meth:`close` stops the thread. Errors: ``Transient`` if the process has no
    descriptors left for it.
    """

    def __init__(
        self, settings: ClientSettings, *, connections: int, keys: PeerKeys | None, server_key: str | None
    ) -> None:
        check_descriptors(DESCRIPTORS_OF_LINK + DESCRIPTORS_OF_CONNECTION * connections)
        self._settings = settings
        self._keys = keys
        self._server_key = server_key
        self._loop = asyncio.get_running_loop()
        self._mailbox: Mailbox[tuple[int, Operation | None] | None] = Mailbox()
        self._futures: dict[int, asyncio.Future[object]] = {}
        self._numbers = 0
        self._stopped = False
        self._is_to_reset = False
        self._protocol = ClientProtocol(settings)
        self._next_link = 0
        self._refusals = 0
        self._sent: dict[int, deque[tuple[zmq.MessageTracker, memoryview]]] = {}
        self._draining: dict[int, Draining] = {}
        keep_frame_memory()
        self._context = zmq.Context(io_threads=max(1, min(connections, IO_THREADS_MAX)))
        self._poller = zmq.Poller()
        self._poller.register(self._mailbox.fd, zmq.POLLIN)
        self._io_threads = max(1, min(connections, IO_THREADS_MAX))
        self._connections = [self._connect(turn) for turn in range(connections)]
        self._thread = threading.Thread(target=self._run, name=f"tiercheck peer {settings.peer}", daemon=True)
        self._thread.start()

    # In the event loop.

    async def run(self, operation: Operation) -> object:
        """The operation's result. A cancelled call waits until no buffer of it is in use.

        It also waits for the peer's word that it has no effect to come. If that does not come within ``ABORT_S``,
        its connections are broken, so that nothing of it is sent any more; but what the peer's kernel has received by
        then, an object of a single chunk or the last chunk of a larger one, may still be stored once the peer goes on.

        Errors: the operation's.
        """
        if self._stopped:
            raise Closed("the driver is not open", key=operation.key)
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[object] = self._loop.create_future()
        self._futures[number] = future
        self._mailbox.post((number, operation))
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            self._mailbox.post((number, None))
            while not future.done():
                # A second cancellation cannot hurry the thread; the first is raised below.
                try:
                    await asyncio.wait({future})
                except asyncio.CancelledError:
                    continue
            raise
        result = future.result()
        if isinstance(result, BaseException):
            raise result
        return result

    def settle(self, *, incarnation: int, chunk_bytes: int, deadline_s: float) -> None:
        """What is known once the peer has answered; for operations that begin from now on."""
        self._protocol.caller.incarnation = incarnation
        self._protocol.caller.settings = replace(
            self._protocol.caller.settings, chunk_bytes=chunk_bytes, deadline_s=deadline_s
        )

    async def close(self) -> None:
        """End all operations with ``Closed`` and the thread with them. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._mailbox.post(None)
            await asyncio.to_thread(self._thread.join)
            self._mailbox.close()

    def _deliver(self, number: int, result: object) -> None:
        future = self._futures.pop(number, None)  # closing reports what is left once more
        if future is not None and not future.done():
            future.set_result(result)

    # In the thread.

    def _connect(self, turn: int) -> Connection:
        socket = self._context.socket(zmq.DEALER)
        # A thread each: encryption, if there is any, is what limits a connection.
        socket.setsockopt(zmq.AFFINITY, 1 << turn % self._io_threads)
        socket.setsockopt(zmq.LINGER, 0)
        if self._keys is None and not is_socket(self._settings.peer):
            socket.setsockopt(zmq.SNDBUF, LOOPBACK_SEND_BYTES)
        # Queue nothing for a connection that is not there: what to do then is the protocol's decision.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, CHUNK_BYTES_MAX + ENVELOPE_BYTES)
        socket.setsockopt(zmq.RCVHWM, ARRIVALS_QUEUED_MAX)
        socket.setsockopt(zmq.SNDHWM, SENDS_QUEUED_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if not is_socket(self._settings.peer):
            # The kernels find out whether the other one is there. ZeroMQ's own heartbeats would do as well, but a
            # server with keys that was stopped for a while aborts when it goes on (libzmq 4.3.5): it answers one on a
            # connection that has gone.
            for option, value in KEEPALIVE.items():
                socket.setsockopt(option, value)
        if self._settings.ipv6:
            socket.setsockopt(zmq.IPV6, 1)
        if self._keys is not None and self._server_key is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(self._server_key))
            socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(self._keys.client_public))
            socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(self._keys.client_secret))
        monitor = socket.get_monitor_socket(MONITORED)
        socket.connect(zmq_address(self._settings.peer))
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return Connection(socket, monitor)

    def _run(self) -> None:
        stopping = False
        next_tick = time.monotonic()
        try:
            while not (stopping and not self._draining):
                wait_s = DRAIN_POLL_S if self._draining else max(0.0, next_tick - time.monotonic())
                ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
                if self._mailbox.fd in ready:
                    stopping = self._read_mail() or stopping
                for connection in list(self._connections):
                    if connection.monitor in ready:
                        self._watch(connection)
                    if connection.socket in ready:
                        self._receive(connection)
                    if connection.backlog:
                        self._flush(connection)
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._act(self._protocol.tick(now))
                    self._connect_again(now)
                if self._draining:
                    self._drain(now)
                if self._is_to_reset:  # here, where nobody is at a connection
                    self._is_to_reset = False
                    self._reset()
        except Exception:
            log.exception("the connection to peer %s stopped", self._settings.peer)
            raise
        finally:
            self._stopped = True
            for connection in self._connections:
                self._disconnect(connection)
            self._context.term()
            self._end_all()

    def _read_mail(self) -> bool:
        """Whether the thread is to stop."""
        now = time.monotonic()
        stop = False
        for letter in self._mailbox.take():
            if letter is None:
                stop = True
                self._act(self._protocol.close(Closed("the driver was closed")))
                continue
            number, operation = letter
            if operation is None:
                self._act(self._protocol.cancel(number, now))
            else:
                self._sent[number] = deque()
                self._act(self._protocol.begin(operation, number, now))
        return stop

    def _receive(self, connection: Connection) -> None:
        for _ in range(FRAMES_AT_ONCE):
            try:
                frames = connection.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if connection.link is None:
                self._up(connection)  # its monitor is late
            assert connection.link is not None
            buffers = [frame.buffer for frame in frames]
            self._act(self._protocol.receive(connection.link, buffers, time.monotonic()))

    def _watch(self, connection: Connection) -> None:
        message = recv_monitor_message(connection.monitor)
        event = message["event"]
        now = time.monotonic()
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if connection.link is None:
                self._up(connection)
        elif event == zmq.EVENT_DISCONNECTED:
            self._down(connection)
        elif event == zmq.EVENT_CONNECTED:
            connection.connected_at = now
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and now - connection.connected_at >= SILENT_S:
            self._protocol.turned_away("lets us connect and says nothing more: is it stopped, or held up?")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._refusals += 1
            if self._refusals >= REFUSALS_MAX and self._keys is not None:
                self._refused("hangs up: it has no keys, or server_key (or server.public in the keys) is not its key")
        else:
            connection.again_at = now + CHANCE.uniform(*TURNED_AWAY_S)
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and message["value"] == BUSY:
                self._protocol.turned_away("has as many connections as it takes")
            elif is_socket(self._settings.peer):
                self._refused("serves another user")
            elif self._keys is None:
                self._refused("wants keys; give keys=DIRECTORY or set TIERCHECK_KEYS")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refused("has no keys, or is no peer server; take away keys= and TIERCHECK_KEYS, or give it keys")
            else:
                self._refused("does not let this client in; add its client.public to the peer's clients.allowed")

    def _refused(self, reason: str) -> None:
        self._act(self._protocol.refused(f"peer {self._settings.peer} {reason}", time.monotonic()))

    def _connect_again(self, now: float) -> None:
        for connection in self._connections:
            if now >= connection.again_at:
                connection.again_at = math.inf
                self._protocol.connecting()
                endpoint = zmq_address(self._settings.peer)
                try:
                    connection.socket.disconnect(endpoint)  # it would not connect twice to one endpoint
                except zmq.ZMQError as error:
                    if error.errno != errno.ENOENT:
                        raise
                connection.socket.connect(endpoint)

    def _up(self, connection: Connection) -> None:
        self._refusals = 0
        connection.again_at = math.inf
        self._next_link += 1
        connection.link = self._next_link
        self._act(self._protocol.connected(connection.link, time.monotonic()))

    def _down(self, connection: Connection) -> None:
        link, connection.link = connection.link, None
        for send in connection.backlog:
            release(send.data)
        connection.backlog.clear()
        if link is not None:
            self._act(self._protocol.disconnected(link, time.monotonic()))

    def _act(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Finish):
                self._draining[effect.number] = Draining(effect.result, time.monotonic() + DRAIN_S)
            else:
                assert isinstance(effect, Reset)
                self._is_to_reset = True
        if self._draining:
            self._drain(time.monotonic())

    def _send(self, send: Send) -> None:
        for connection in self._connections:
            if connection.link == send.link:
                connection.backlog.append(send)
                self._flush(connection)
                return
        release(send.data)  # the link is gone; the protocol learns of it by its own event

    def _flush(self, connection: Connection) -> None:
        while connection.backlog:
            send = connection.backlog[0]
            if send.data is not None and send.number not in self._sent:
                release(send.data)  # its operation is over
                connection.backlog.popleft()
                continue
            try:
                if send.data is None:
                    connection.socket.send(send.head, zmq.NOBLOCK)
                else:
                    connection.socket.send(send.head, zmq.NOBLOCK | zmq.SNDMORE)
                    tracker = connection.socket.send(send.data, zmq.NOBLOCK, copy=False, track=True)
                    self._keep(send.number, tracker, send.data)
            except zmq.Again:
                self._poller.register(connection.socket, zmq.POLLIN | zmq.POLLOUT)
                return
            connection.backlog.popleft()
        self._poller.register(connection.socket, zmq.POLLIN)

    def _keep(self, number: int, tracker: zmq.MessageTracker, data: memoryview) -> None:
        sent = self._sent[number]
        sent.append((tracker, data))
        self._prune(sent)

    @staticmethod
    def _prune(sent: deque[tuple[zmq.MessageTracker, memoryview]]) -> None:
        while sent and sent[0][0].done:
            release(sent.popleft()[1])

    def _drain(self, now: float) -> None:
        """Report what is over and has all its buffers back."""
        late = False
        for number, draining in list(self._draining.items()):
            for connection in self._connections:
                for send in [item for item in connection.backlog if item.number == number and item.data is not None]:
                    connection.backlog.remove(send)
                    release(send.data)
            sent = self._sent[number]
            self._prune(sent)
            if not sent:
                del self._draining[number], self._sent[number]
                self._report(number, draining.result)
            elif now >= draining.until:
                draining.until = now + DRAIN_S
                late = True
        if late:
            self._is_to_reset = True

    def _report(self, number: int, result: object) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, number, result)
        except RuntimeError:
            log.debug("the event loop of a driver for peer %s was closed before the driver was", self._settings.peer)

    def _reset(self) -> None:
        """Break the connections; ZeroMQ lets go of everything that was to be sent, and new ones are made."""
        old, self._connections = self._connections, []
        for connection in old:
            self._disconnect(connection)
        self._connections = [self._connect(turn) for turn in range(len(old))]
        for connection in old:
            self._down(connection)

    def _disconnect(self, connection: Connection) -> None:
        self._poller.unregister(connection.socket)
        self._poller.unregister(connection.monitor)
        connection.socket.disable_monitor()
        connection.monitor.close(linger=0)
        connection.socket.close(linger=0)

    def _end_all(self) -> None:
        """The thread ends: nobody may be left waiting, whatever ended it."""
        error = Closed(f"the connection to peer {self._settings.peer} was closed")
        for number in list(self._futures):
            for _, data in self._sent.pop(number, ()):
                release(data)
            self._report(number, error)


def check_descriptors(count: int) -> None:
    """That so many can be opened: ZeroMQ ends the whole process if it gets none. Errors: ``Transient``."""
    with ExitStack() as closing:
        try:
            for _ in range(count):
                closing.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise Transient(
                f"this process has too few file descriptors left for a connection to a peer ({error.strerror}): raise "
                "'ulimit -n'"
            ) from error


def release(data: memoryview | None) -> None:
    if data is not None:
        data.release()

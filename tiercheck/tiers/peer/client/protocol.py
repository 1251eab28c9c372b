"""The client's protocol without I/O: operations, frames, connections and time in; messages and results out.

Connections come and go, each under a *link* number that is used once. ZeroMQ may lose what was under way on a
connection that breaks, without a word, so every message is answered, and what is not answered is asked about:

* a call is made again;
* a put begins again under its id, and the answer says which chunks the server has. What was sent over the link of
  that answer, before the question, and is not there, is lost and is sent again;
* a get begins again under its id, and what was asked for over that link before is asked for again.

Each operation ends with a result, an error of the server's, or, when nothing has moved for ``deadline_s``, with
``Transient``.
"""

from __future__ import annotations

import abc
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tiercheck import errors
from tiercheck.errors import TierError, Transient, Unauthorized
from tiercheck.runtime.backoff import Backoff
from tiercheck.tiers.peer.messages import BadFrame, Failure, Message, decode, encode
from tiercheck.types import Buffer

__all__ = ["Call", "Caller", "ClientProtocol", "ClientSettings", "Finish", "Operation", "Reset", "Send", "error_of"]

log = logging.getLogger(__name__)

UNKNOWN_OBSTACLE = "is its agent running, and the network up?"
ABORT_S = 3.0
"""How long a cancelled put waits for the server's word that it is dropped."""


@dataclass(frozen=True)
class ClientSettings:
    """``peer``: its address, also for messages. ``resend_s``: without an answer for that long, ask again. ``ipv6``: it
    has no address of IPv4."""

    peer: str
    chunk_bytes: int
    credit_bytes: int
    deadline_s: float
    resend_s: float = 2.0
    ipv6: bool = False


@dataclass(frozen=True)
class Send:
    """A message over ``link``; ``data`` belongs to the sender's operation ``number`` until it was sent."""

    link: int
    number: int
    head: bytes
    data: memoryview | None = None


@dataclass(frozen=True)
class Finish:
    """The operation's result, or the exception it ends with."""

    number: int
    result: object


@dataclass(frozen=True)
class Reset:
    """Break every connection: something sent must not arrive any more."""


Effect = Send | Finish | Reset


class Operation(abc.ABC):
    """One thing asked of the peer. Subclasses answer events by sending and finishing through ``caller``."""

    what = "answering"
    transfer: bytes | None = None

    def __init__(self) -> None:
        self.number = 0
        self.key: str | None = None
        self.progress = 0.0
        self.asked = 0.0
        self.resends = 0
        self.wants_credit = False
        self.request_ids: list[int] = []

    @abc.abstractmethod
    def start(self, caller: Caller, now: float) -> None:
        """Ask. Called again whenever an answer is overdue or a link came up; a repetition must be harmless."""

    @abc.abstractmethod
    def receive(
        self, caller: Caller, link: int, request_id: int, message: Message, data: Buffer | None, now: float
    ) -> None:
        """Take an answer. Errors: :class:`BadFrame` if it is none, or one to something that was not asked."""

    def lost(self, caller: Caller, link: int, now: float) -> None:
        """``link`` is gone. The operation is started again on another, if not now then when one comes up."""
        self.start(caller, now)

    def pump(self, caller: Caller, now: float) -> None:  # noqa: B027  (a call waits for none)
        """There may be credit again."""

    def cancel(self, caller: Caller, now: float) -> None:
        caller.finish(self, TierError("cancelled"))

    def given_up(self, caller: Caller) -> None:  # noqa: B027  (a call holds nothing there)
        """Nothing has moved for too long: the peer need keep nothing for it."""

    def refused(self, caller: Caller, error: Unauthorized) -> None:
        """The peer lets us in no more."""
        caller.finish(self, error)

    def told(self, error: Exception) -> Exception:
        """What to raise where ``error`` ends the operation: never more than is known."""
        return error

    def moved(self, now: float) -> None:
        self.progress = now
        self.resends = 0

    def release(self, caller: Caller) -> None:  # noqa: B027  (a call holds none)
        """The operation is over: give back credit and let go of buffers."""


class Caller:
    """What an operation may do: send over a link, take credit, finish."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.links: list[int] = []
        self.incarnation = 0
        self.in_flight_bytes = 0
        self.effects: list[Effect] = []
        self.operations: dict[int, Operation] = {}
        self.transfers: dict[bytes, Operation] = {}
        self.requests: dict[int, Operation] = {}
        self.starved: deque[Operation] = deque()
        self._request_ids = itertools.count(1)
        self._turn = 0

    def next_link(self) -> int | None:
        """The link whose turn it is; ``None`` while there is none."""
        if not self.links:
            return None
        self._turn += 1
        return self.links[self._turn % len(self.links)]

    def send(self, operation: Operation, link: int, message: Message, data: memoryview | None = None) -> int:
        """Returns the request id. Later requests have larger ones."""
        request_id = next(self._request_ids)
        self.effects.append(Send(link, operation.number, encode(request_id, message), data))
        return request_id

    def take_credit(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may be under way; one chunk always may."""
        if self.in_flight_bytes and self.in_flight_bytes + nbytes > self.settings.credit_bytes:
            return False
        self.in_flight_bytes += nbytes
        return True

    def return_credit(self, nbytes: int) -> None:
        self.in_flight_bytes -= nbytes

    def starve(self, operation: Operation) -> None:
        """Have ``operation`` pumped once there is credit again, after those that have waited for longer."""
        if not operation.wants_credit:
            operation.wants_credit = True
            self.starved.append(operation)

    def rename(self, operation: Operation, transfer: bytes) -> None:
        if operation.transfer is not None:
            self.transfers.pop(operation.transfer, None)
        operation.transfer = transfer
        self.transfers[transfer] = operation

    def finish(self, operation: Operation, result: object) -> None:
        if self.operations.pop(operation.number, None) is None:
            return
        if operation.transfer is not None:
            self.transfers.pop(operation.transfer, None)
        for request_id in operation.request_ids:
            self.requests.pop(request_id, None)
        operation.release(self)
        result = operation.told(result) if isinstance(result, Exception) else result
        self.effects.append(Finish(operation.number, result))


class Call(Operation):
    """A question with one answer. ``read`` turns the answer into the result."""

    def __init__(self, request: Message, read: Callable[[Message], object], key: str | None = None) -> None:
        super().__init__()
        self._request = request
        self._read = read
        self.key = key
        self._link: int | None = None
        self.what = f"answering {type(request).__name__}"
        self.transfer = getattr(request, "transfer", None)

    def start(self, caller: Caller, now: float) -> None:
        link = caller.next_link()
        if link is None:
            return
        self._link = link
        request_id = caller.send(self, link, self._request)
        self.request_ids.append(request_id)
        caller.requests[request_id] = self

    def lost(self, caller: Caller, link: int, now: float) -> None:
        if link == self._link:
            self.start(caller, now)

    def receive(
        self, caller: Caller, link: int, request_id: int, message: Message, data: Buffer | None, now: float
    ) -> None:
        if isinstance(message, Failure):
            caller.finish(self, error_of(message, self.key))
        else:
            caller.finish(self, self._read(message))


class ClientProtocol:
    """All operations of one client with one peer."""

    def __init__(self, settings: ClientSettings) -> None:
        self.caller = Caller(settings)
        self.dropped: dict[str, int] = {}
        self._cancelled: dict[int, float] = {}
        self._refusal: str | None = None
        self._obstacle = UNKNOWN_OBSTACLE

    @property
    def idle(self) -> bool:
        return not self.caller.operations

    def begin(self, operation: Operation, number: int, now: float) -> list[Effect]:
        """Start ``operation`` under ``number``, which is used once."""
        caller = self.caller
        operation.number, operation.progress, operation.asked = number, now, now
        caller.operations[number] = operation
        if operation.transfer is not None:
            caller.transfers[operation.transfer] = operation
        if self._refusal is not None:
            caller.finish(operation, Unauthorized(self._refusal, key=operation.key))
        else:
            self._attempt(operation, lambda: operation.start(caller, now))
        return self._effects(now)

    def cancel(self, number: int, now: float) -> list[Effect]:
        """Let go of an operation as soon as it can be; ``Finish`` says when. None is left waiting for ever."""
        operation = self.caller.operations.get(number)
        if operation is not None and number not in self._cancelled:
            self._cancelled[number] = now + ABORT_S
            self._attempt(operation, lambda: operation.cancel(self.caller, now))
        return self._effects(now)

    def receive(self, link: int, frames: Sequence[Buffer], now: float) -> list[Effect]:
        """One message of the server's. What is none is counted and dropped."""
        try:
            if not 1 <= len(frames) <= 2:
                raise BadFrame("malformed", f"a message has {len(frames)} frames")
            request_id, message = decode(frames[0])
            transfer = getattr(message, "transfer", None)
            operation = self.caller.transfers.get(transfer) if transfer else None
            if operation is None:
                operation = self.caller.requests.get(request_id)
            if operation is None:
                raise BadFrame("unasked", f"{type(message).__name__} for nobody")
            data = frames[1] if len(frames) == 2 else None
            self._attempt(operation, lambda: operation.receive(self.caller, link, request_id, message, data, now))
        except BadFrame as bad:
            self.dropped[bad.reason] = self.dropped.get(bad.reason, 0) + 1
        return self._effects(now)

    def connected(self, link: int, now: float) -> list[Effect]:
        self._refusal = None
        self._obstacle = UNKNOWN_OBSTACLE
        self.caller.links.append(link)
        if len(self.caller.links) == 1:  # others need no help: they are under way on another link
            for operation in list(self.caller.operations.values()):
                operation.asked = now
                self._attempt(operation, partial(operation.start, self.caller, now))
        return self._effects(now)

    def disconnected(self, link: int, now: float) -> list[Effect]:
        if link in self.caller.links:
            self.caller.links.remove(link)
            for operation in list(self.caller.operations.values()):
                self._attempt(operation, partial(operation.lost, self.caller, link, now))
        return self._effects(now)

    def refused(self, reason: str, now: float) -> list[Effect]:
        """The peer lets us not in, and will not: whatever waits for a connection ends, and what begins later too."""
        if not self.caller.links:
            self._refusal = reason
            for operation in list(self.caller.operations.values()):
                operation.refused(self.caller, Unauthorized(reason, key=operation.key))
        return self._effects(now)

    def turned_away(self, reason: str) -> None:
        """The peer takes us not now; what waits for a connection goes on waiting, and says so where it is in vain."""
        self._obstacle = f"it {reason}"

    def connecting(self) -> None:
        """A new try: what was in the way of the one before need not be in the way now."""
        self._obstacle = UNKNOWN_OBSTACLE

    def close(self, error: TierError) -> list[Effect]:
        for operation in list(self.caller.operations.values()):
            self.caller.finish(operation, error)
        return self._effects(0.0)

    def tick(self, now: float) -> list[Effect]:
        """Ask again where an answer is overdue, and end what has waited for too long. A few times a second."""
        settings = self.caller.settings
        for number, until in list(self._cancelled.items()):
            if now >= until and number in self.caller.operations:
                # No word that it is dropped: then nothing of it may be under way any more.
                self.caller.effects.append(Reset())
                self.caller.finish(self.caller.operations[number], TierError("cancelled"))
        for operation in list(self.caller.operations.values()):
            if now - operation.progress >= settings.deadline_s:
                self._attempt(operation, partial(operation.given_up, self.caller))
                self.caller.finish(
                    operation,
                    Transient(
                        f"peer {settings.peer} came no further with {operation.what} for {settings.deadline_s:g} s"
                        + ("" if self.caller.links else " and there is no connection to it")
                        + f"; {self._obstacle}",
                        key=operation.key,
                    ),
                )
                continue
            wait_s = Backoff(settings.resend_s, 8 * settings.resend_s).pause_s(operation.resends + 1)
            if self.caller.links and now - max(operation.progress, operation.asked) >= wait_s:
                operation.asked = now
                operation.resends += 1
                self._attempt(operation, partial(operation.start, self.caller, now))
        return self._effects(now)

    def _attempt(self, operation: Operation, step: Callable[[], None]) -> None:
        """Run ``step``. What it raises ends that operation, and no other: a mistake of one caller is that caller's."""
        try:
            step()
        except BadFrame:
            raise
        except Exception as error:
            if operation.number in self.caller.operations:
                self.caller.finish(operation, error)
            else:
                log.exception("after the end of %s", operation.what)

    def _effects(self, now: float) -> list[Effect]:
        caller = self.caller
        for _ in range(len(caller.starved)):
            if caller.in_flight_bytes >= caller.settings.credit_bytes:
                break
            operation = caller.starved.popleft()
            operation.wants_credit = False
            if operation.number in caller.operations:
                self._attempt(operation, partial(operation.pump, caller, now))
        effects, caller.effects = caller.effects, []
        for effect in effects:
            if isinstance(effect, Finish):
                self._cancelled.pop(effect.number, None)
        return effects


def error_of(failure: Failure, key: str | None) -> Exception:
    """The exception that a failure stands for; a class we do not know is a ``TierError``."""
    if failure.error == "ValueError":
        return ValueError(failure.message)
    kind = getattr(errors, failure.error, None)
    if not (isinstance(kind, type) and issubclass(kind, TierError)):
        kind = TierError
    return kind(failure.message, key=key)

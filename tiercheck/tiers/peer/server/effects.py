"""What the server's protocol has done for it: operations of the namespaces' drivers, and messages to send.

The protocol decides and hands out these values; a shell around it does them, and reports each task's outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tiercheck.errors import CapacityExceeded, TierError
from tiercheck.tiers.peer.messages import Failure, Message, encode
from tiercheck.tiers.peer.server.limits import PeerLimits
from tiercheck.types import Buffer, ByteRange, ObjectInfo, PutMode

__all__ = [
    "NO_TRANSFER",
    "DeleteObjects",
    "Desk",
    "DropMemory",
    "Greet",
    "ListObjects",
    "Memory",
    "OpenObject",
    "PublishMemory",
    "ReadChunk",
    "ReadableObject",
    "Reply",
    "ReserveMemory",
    "StatObject",
    "StoreWhole",
    "Task",
    "UsageOf",
    "Work",
    "failure_of",
]

NO_TRANSFER = bytes(16)


class Memory(Protocol):
    """Room for an object that is being received."""

    @property
    def buffer(self) -> memoryview: ...

    async def publish(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo: ...

    async def drop(self) -> None: ...


@dataclass(frozen=True)
class ReadableObject:
    """An object, or a range of one, that is open for reading. ``content`` is ``None`` if it cannot be mapped.

    ``copied``: ``content`` is memory of its own, which goes with the reply that it is sent in.
    """

    namespace: str
    key: str
    wanted: ByteRange
    etag: str
    content: memoryview | None
    copied: bool = False


@dataclass(frozen=True)
class Greet:
    namespace: str


@dataclass(frozen=True)
class StatObject:
    namespace: str
    key: str


@dataclass(frozen=True)
class ListObjects:
    namespace: str
    prefix: str
    after: str


@dataclass(frozen=True)
class DeleteObjects:
    namespace: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class UsageOf:
    namespace: str


@dataclass(frozen=True)
class StoreWhole:
    namespace: str
    key: str
    data: Buffer
    mode: PutMode


@dataclass(frozen=True)
class ReserveMemory:
    """``is_wanted``: asked when its turn comes, which may be long after."""

    namespace: str
    key: str
    nbytes: int
    is_wanted: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class PublishMemory:
    memory: Memory
    mode: PutMode


@dataclass(frozen=True)
class DropMemory:
    memory: Memory


@dataclass(frozen=True)
class OpenObject:
    """``wanted`` is ``None`` for all of it. What has at most ``whole_bytes`` comes with its content in any case."""

    namespace: str
    key: str
    wanted: ByteRange | None
    whole_bytes: int


@dataclass(frozen=True)
class ReadChunk:
    """Bytes of a source without content; ``NotFound`` if it is no longer the object that was opened."""

    source: ReadableObject
    wanted: ByteRange


Task = (
    Greet | StatObject | ListObjects | DeleteObjects | UsageOf | StoreWhole | ReserveMemory | PublishMemory | DropMemory
    | OpenObject | ReadChunk
)  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """A message to ``peer``. ``copied_bytes``: of its data, what lives only for this reply."""

    peer: bytes
    head: bytes
    data: Buffer | None = None
    copied_bytes: int = 0


@dataclass(frozen=True)
class Work:
    """A task to do; its outcome (a value or an exception) is reported under ``number``."""

    number: int
    task: Task


Then = Callable[[object, float], None]


class Desk:
    """Collects the effects of one event, numbers tasks, and counts what was dropped."""

    def __init__(self, limits: PeerLimits) -> None:
        self.limits = limits
        self.dropped: dict[str, int] = {}
        self._effects: list[Reply | Work] = []
        self._waiting: dict[int, Then] = {}
        self._number = 0

    @property
    def working(self) -> int:
        """Tasks whose outcome is not known yet."""
        return len(self._waiting)

    def ask(self, task: Task, then: Then) -> None:
        """Have ``task`` done; ``then`` is given its outcome and the time."""
        self._number += 1
        self._waiting[self._number] = then
        self._effects.append(Work(self._number, task))

    def done(self, number: int, outcome: object, now: float) -> None:
        self._waiting.pop(number)(outcome, now)

    def reply(
        self, peer: bytes, request_id: int, message: Message, data: Buffer | None = None, copied_bytes: int = 0
    ) -> None:
        self._effects.append(Reply(peer, encode(request_id, message), data, copied_bytes))

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def take_effects(self) -> list[Reply | Work]:
        effects, self._effects = self._effects, []
        return effects


def failure_of(error: BaseException, transfer: bytes = NO_TRANSFER) -> Failure:
    """How an exception travels: a ``TierError`` or a ``ValueError`` with its message, another by its name alone."""
    if isinstance(error, TierError):
        # A client of another release knows no class that is newer than it.
        kind = CapacityExceeded if isinstance(error, CapacityExceeded) else type(error)
        return Failure(transfer, kind.__name__, cut(error.message))
    if isinstance(error, ValueError):
        return Failure(transfer, "ValueError", cut(str(error)))
    return Failure(transfer, "TierError", f"the peer's server failed: {type(error).__name__}")


def cut(text: str) -> str:
    return text.encode(errors="replace")[:2000].decode(errors="ignore")

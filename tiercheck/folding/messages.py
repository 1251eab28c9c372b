"""What the process that folds and its owner say to each other.

The two are one program: the owner starts the process from the code that it runs itself. So no message has a version.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec import Struct

from tiercheck import errors
from tiercheck.errors import TierError, Transient
from tiercheck.replication.fold_executor import Outcome

__all__ = [
    "FRAME_BYTES_MAX",
    "Answer",
    "Ask",
    "Begun",
    "Cancel",
    "Channel",
    "Done",
    "Failed",
    "FoldTarget",
    "MayPublish",
    "Prepare",
    "Replay",
    "Request",
    "Serves",
    "Verdict",
    "WorkAnswer",
    "failed",
    "pack",
    "read_answer",
    "read_request",
]

FRAME_BYTES_MAX = 64 << 20


class FoldTarget(Struct, frozen=True):
    """A first tier, and how its bases are folded."""

    url: str
    """As another process than the trainer opens it."""
    name: str
    certified: bool
    """Only by a kernel that is certified for the optimizer in the process that folds."""


class Prepare(Struct, frozen=True, tag=True):
    target: FoldTarget
    base: str


class Replay(Struct, frozen=True, tag=True):
    target: FoldTarget
    base: str
    differentials: tuple[str, ...]
    version: int


# What the owner says


class Ask(Struct, frozen=True, tag=True):
    id: int
    work: Prepare | Replay


class Verdict(Struct, frozen=True, tag=True):
    """The answer to :class:`MayPublish`."""

    id: int
    wanted: bool


class Cancel(Struct, frozen=True, tag=True):
    """Nobody waits for it any more. :class:`Done` or :class:`Failed` follow all the same."""

    id: int


# What the process says


class Serves(Struct, frozen=True, tag=True):
    """The process has started: it takes work from here on."""


class Begun(Struct, frozen=True, tag=True):
    """The work is no longer queued behind other work."""

    id: int


class MayPublish(Struct, frozen=True, tag=True):
    """Whether the base is wanted still. Nothing is published without a :class:`Verdict`."""

    id: int


class Done(Struct, frozen=True, tag=True):
    id: int
    outcome: Outcome


class Failed(Struct, frozen=True, tag=True):
    """A tier's error."""

    id: int
    kind: str
    message: str
    tier: str | None = None
    key: str | None = None

    def error(self) -> TierError:
        kind = getattr(errors, self.kind, Transient)
        return (kind if issubclass(kind, TierError) else Transient)(self.message, tier=self.tier, key=self.key)


Request = Ask | Verdict | Cancel
WorkAnswer = Begun | MayPublish | Done | Failed
Answer = Serves | WorkAnswer

_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


class Channel(Protocol):
    """Takes whole messages from one end to the other, in their order."""

    def send(self, message: bytes) -> None:
        """Errors: none; what cannot be sent is lost, and :meth:`receive` tells that the other end is gone."""
        ...

    async def receive(self) -> bytes:
        """Errors: ``EOFError`` if the other end is gone, or has sent what is no message."""
        ...

    def close(self) -> None: ...


def pack(message: Request | Answer) -> bytes:
    return msgspec.msgpack.encode(message)


def read_request(message: bytes) -> Request:
    """Errors: ``ValueError``."""
    request: Request = _requests.decode(message)
    return request


def read_answer(message: bytes) -> Answer:
    """Errors: ``ValueError``."""
    answer: Answer = _answers.decode(message)
    return answer


def failed(number: int, error: TierError) -> Failed:
    return Failed(number, type(error).__name__, error.message, error.tier, error.key)

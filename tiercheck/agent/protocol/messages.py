"""What a trainer and the agent of its node say to each other: msgpack in one ZeroMQ frame a message.

A request is ``[PROTOCOL, id, name, fields]``; its reply ``[PROTOCOL, id, None, fields]`` or, where the request
failed, ``[PROTOCOL, id, error, fields]``. Identifiers are the client's own; id 0 wants no reply.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from tiercheck import errors
from tiercheck.agent.protocol.wire import from_plain, to_plain
from tiercheck.errors import Corruption, DeadlineExceeded, TierCheckError, TierError
from tiercheck.format import host_state
from tiercheck.format.host_state import Limits
from tiercheck.replication.mover import MoverStatus
from tiercheck.types import Buffer, shown

__all__ = [
    "PROTOCOL",
    "REPLY_BYTES_MAX",
    "REQUEST_BYTES_MAX",
    "Agree",
    "Answer",
    "Cycle",
    "Drain",
    "Hello",
    "HelloReply",
    "JobRequest",
    "MakeRoom",
    "Nudge",
    "Pause",
    "Rank",
    "RankReply",
    "RegisterJob",
    "Request",
    "RoomForBase",
    "Status",
    "Stop",
    "StopReply",
    "Withdraw",
    "pack_answer",
    "pack_error",
    "pack_request",
    "parse_answer",
    "parse_request",
]

T = TypeVar("T")

PROTOCOL = 1
REQUEST_BYTES_MAX = 64 << 10
REPLY_BYTES_MAX = 16 << 20
REQUEST_LIMITS = Limits(REQUEST_BYTES_MAX, values=1 << 10, depth=8, text_nbytes=REQUEST_BYTES_MAX, extensions=False)
REPLY_LIMITS = Limits(REPLY_BYTES_MAX, values=1 << 20, depth=8, text_nbytes=REPLY_BYTES_MAX, extensions=False)
DEADLINE_S_MAX = 7 * 86400.0
ID_MAX = 2**63
TIERS_S = 30.0
"""What listing all tiers may take: even where nothing is to be waited for, they are looked at first."""


@dataclass(frozen=True)
class Request:
    """Anything a client may ask. ``deadline_s``: how long the agent may take to answer; 0: as long as it takes to look,
    and nothing is waited for."""

    deadline_s: float

    look_s: ClassVar[float] = 1.0
    """What such a look may take."""

    def __post_init__(self) -> None:
        if not 0 <= self.deadline_s <= DEADLINE_S_MAX:
            raise ValueError(f"a request's deadline is 0 to {DEADLINE_S_MAX:g} s, not {shown(self.deadline_s)}")


@dataclass(frozen=True)
class Hello(Request):
    """Who are you?"""


@dataclass(frozen=True)
class Status(Request):
    """Everything the status page shows, as JSON."""


@dataclass(frozen=True)
class Stop(Request):
    """End. ``drain``: first bring everything captured to where it belongs, within the agent's own deadline."""

    drain: bool


@dataclass(frozen=True)
class Rank(Request):
    """A request about one rank's objects. ``namespace`` is the URL of the first tier, where they are captured."""

    namespace: str
    rank: int


@dataclass(frozen=True)
class JobRequest(Rank):
    """What the trainer of one generation asks: the agent that has taken up a newer one refuses it."""

    generation: int


@dataclass(frozen=True)
class RegisterJob(JobRequest):
    """The rank's replication job lies in its first tier: take it up. Ends a pause. Idempotent."""


@dataclass(frozen=True)
class Pause(Rank):
    """The trainer that holds this rank (:class:`~tiercheck.agent.client.trainer_lock.TrainerLock`) recovers: answer
    when nothing of it moves any more. Nothing moves from then on until the trainer registers its job, or is gone."""


@dataclass(frozen=True)
class Withdraw(JobRequest):
    """The rank has nothing more to move: forget the replication job. Idempotent."""


@dataclass(frozen=True)
class Nudge(JobRequest):
    """Something was captured. Wants no reply."""


@dataclass(frozen=True)
class Look(JobRequest):
    """How is this rank's mover?"""


@dataclass(frozen=True)
class Agree(JobRequest):
    """The ranks agree on a mark (:mod:`tiercheck.policy.agreement`)."""

    grace_s: ClassVar[float] = TIERS_S

    mark: int


@dataclass(frozen=True)
class RoomForBase(JobRequest):
    """Answer once another base may be captured."""

    look_s: ClassVar[float] = TIERS_S


@dataclass(frozen=True)
class MakeRoom(JobRequest):
    """Answer once what may go from the first tier is gone."""

    look_s: ClassVar[float] = TIERS_S


@dataclass(frozen=True)
class Drain(JobRequest):
    """Answer once everything captured is where it belongs."""

    look_s: ClassVar[float] = TIERS_S

    closing: bool


@dataclass(frozen=True)
class Cycle(JobRequest):
    """Look and act once."""

    look_s: ClassVar[float] = TIERS_S

    closing: bool


@dataclass(frozen=True)
class HelloReply:
    """Who the agent is and where it serves."""

    version: str
    """Of TierCheck."""
    pid: int
    node: str
    incarnation: str
    """Another one after each start."""
    detached: bool
    http: str
    """URL of the status page."""
    peer_endpoint: str | None
    """``HOST:PORT`` of the peer server, or ``ipc:///PATH``."""
    peer_server_key: str | None
    """Its public CURVE key."""
    drain_s: float
    """How long it may go on bringing everything home once it is told to end."""


@dataclass(frozen=True)
class RankReply:
    """How the rank's mover is, and what was asked."""

    status: MoverStatus
    conflict: str | None = None
    result: bool = False


@dataclass(frozen=True)
class StopReply:
    """The agent is ending."""


@dataclass(frozen=True)
class StatusReply:
    json: str


_REQUESTS: dict[str, type[Request]] = {
    re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower(): kind
    for kind in (
        Hello,
        Status,
        Stop,
        RegisterJob,
        Pause,
        Withdraw,
        Nudge,
        Look,
        Agree,
        MakeRoom,
        RoomForBase,
        Drain,
        Cycle,
    )
}
_NAMES = {kind: name for name, kind in _REQUESTS.items()}
_ERRORS: dict[str, type[TierCheckError]] = {name: getattr(errors, name) for name in errors.__all__}


@dataclass(frozen=True)
class Answer:
    """A reply as it came in: ``fields`` of the result, or an error."""

    id: int
    fields: Any
    error: TierCheckError | None

    def read(self, kind: type[T]) -> T:
        """The result as ``kind``. Errors: the request's own; ``ValueError`` for fields that ``kind`` has not."""
        if self.error is not None:
            raise self.error
        return from_plain(kind, self.fields)


def pack_request(identifier: int, request: Request) -> bytes:
    return host_state.pack([PROTOCOL, identifier, _NAMES[type(request)], to_plain(request)])


def parse_request(frame: Buffer) -> tuple[int, Request]:
    """Identifier and request. ``ValueError`` for anything malformed; ``ConfigurationError`` for another protocol,
    with the identifier as its ``identifier`` so that it can be answered."""
    identifier, name, fields = _envelope(frame, REQUEST_LIMITS)
    if not isinstance(name, str) or name not in _REQUESTS:
        raise ValueError(f"there is no request {shown(name)}")
    return identifier, from_plain(_REQUESTS[name], fields)


def pack_answer(identifier: int, answer: Any) -> bytes:
    """The frame of a reply. ``answer`` is a dataclass."""
    return host_state.pack([PROTOCOL, identifier, None, to_plain(answer)])


def pack_error(identifier: int, error: TierCheckError) -> bytes:
    """The frame of a reply to a request that failed. The class is the nearest one of ``tiercheck.errors``."""
    name = next(kind.__name__ for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind)
    fields: dict[str, Any] = {"message": str(error)[:4096]}
    if isinstance(error, TierError):
        fields = {"message": error.message[:4096], "tier": error.tier, "key": error.key}
    if isinstance(error, DeadlineExceeded):
        fields["late"] = [int(rank) for rank in error.late]
    return host_state.pack([PROTOCOL, identifier, name, fields])


def parse_answer(frame: Buffer) -> Answer:
    """A reply. ``ValueError`` for anything malformed, or an error that is not of ``tiercheck.errors``."""
    identifier, name, fields = _envelope(frame, REPLY_LIMITS)
    if name is None:
        return Answer(identifier, fields, None)
    kind = _ERRORS.get(name) if isinstance(name, str) else None
    if kind is None or not isinstance(fields, dict) or not isinstance(fields.get("message"), str):
        raise ValueError(f"there is no error {shown(name)}")
    return Answer(identifier, None, _rebuilt(kind, fields))


def _rebuilt(kind: type[TierCheckError], fields: dict[str, Any]) -> TierCheckError:
    message: str = fields["message"]
    if issubclass(kind, TierError):
        tier, key = fields.get("tier"), fields.get("key")
        return kind(message, tier=tier if isinstance(tier, str) else None, key=key if isinstance(key, str) else None)
    if issubclass(kind, DeadlineExceeded):
        late = fields.get("late")
        ranks = [rank for rank in late if type(rank) is int] if isinstance(late, list) else []
        return kind(message, late=ranks)
    return kind(message)


def _envelope(frame: Buffer, limits: Limits) -> tuple[int, Any, Any]:
    try:
        value = host_state.unpack(frame, limits=limits)
    except Corruption as error:
        raise ValueError(error.message) from None
    if not isinstance(value, list) or len(value) != 4:
        raise ValueError("a message has four parts")
    protocol, identifier, name, fields = value
    if type(identifier) is not int or not 0 <= identifier < ID_MAX:
        raise ValueError(f"{shown(identifier)} is no identifier")
    if protocol != PROTOCOL:
        raise OtherProtocol(identifier, protocol)
    return identifier, name, fields


class OtherProtocol(ValueError):
    """A message of another version of the protocol: it can be answered, and no more."""

    def __init__(self, identifier: int, protocol: Any) -> None:
        super().__init__(f"it speaks protocol {shown(protocol)}, this TierCheck speaks {PROTOCOL}")
        self.identifier = identifier

"""What a trainer and the agent of its node say to each other: msgpack in one ZeroMQ frame a message.

A request is ``[protocol, id, name, fields]``; its reply ``[protocol, id, None, fields]`` or, where the request
failed, ``[protocol, id, error, fields]``. Identifiers are the client's own; id 0 wants no reply.

Trainer and agent may be of neighbouring releases. Fields are read as :mod:`tiercheck.schema` says. A request that the
agent does not know is answered with :class:`~tiercheck.errors.UnknownRequest`. The protocol's number rises if a message
changes its meaning: ``hello`` tells each side which numbers the other speaks (:class:`Protocols`), and both go on with
the highest one in common. The four parts, ``hello`` and errors are the same in every protocol.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import Meta, Struct

from tiercheck import errors, schema
from tiercheck.errors import (
    ConfigurationError,
    Corruption,
    RanksLate,
    TierCheckError,
    TierError,
    UnknownRequest,
)
from tiercheck.format import host_state
from tiercheck.format.host_state import Limits
from tiercheck.keys import VERSION_MAX
from tiercheck.policy.folding import DUE_MAX
from tiercheck.policy.recovery.agreement import NO_MARK
from tiercheck.replication.handle import HURRY_S_MAX, MoverStatus
from tiercheck.schema import Count, Generation, Text, Version
from tiercheck.schema import Rank as RankNumber
from tiercheck.types import Buffer, shown

__all__ = [
    "PROTOCOLS",
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
    "Protocols",
    "Rank",
    "RankReply",
    "Refused",
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

REQUEST_BYTES_MAX = 64 << 10
REPLY_BYTES_MAX = 16 << 20
REQUEST_LIMITS = Limits(REQUEST_BYTES_MAX, values=1 << 10, depth=8, text_nbytes=REQUEST_BYTES_MAX, extensions=False)
REPLY_LIMITS = Limits(REPLY_BYTES_MAX, values=1 << 20, depth=8, text_nbytes=REPLY_BYTES_MAX, extensions=False)
DEADLINE_S_MAX = 7 * 86400.0
KINDS_MAX = 16
ERROR_CHARACTERS_MAX = 4096
TIERS_S = 30.0
"""What listing all tiers may take: even if nothing is to be waited for, they are looked at first."""


Protocol = Annotated[int, Meta(ge=1, le=2**16)]


@dataclass(frozen=True)
class Protocols:
    """The protocols that one side speaks."""

    oldest: Protocol = 1
    newest: Protocol = 1

    def __str__(self) -> str:
        return f"protocol {self.oldest}" if self.oldest == self.newest else f"protocols {self.oldest} to {self.newest}"

    def __contains__(self, protocol: int) -> bool:
        return self.oldest <= protocol <= self.newest

    def common(self, other: Protocols) -> int:
        """The newest protocol that both speak. Errors: ``ConfigurationError`` if there is none."""
        if max(self.oldest, other.oldest) > (newest := min(self.newest, other.newest)):
            raise ConfigurationError(
                f"the agent speaks {other}, this TierCheck {self}: end the agent (tiercheck agent --stop), and one of "
                "this release takes its place; or update the older of the two"
            )
        return newest


PROTOCOLS = Protocols()
"""What this release speaks."""


@dataclass(frozen=True)
class Request:
    """Anything a client may ask. ``deadline_s``: how long the agent may take to answer; 0: as long as it takes to look,
    and nothing is waited for."""

    deadline_s: Annotated[float, Meta(ge=0, le=DEADLINE_S_MAX)]

    look_s: ClassVar[float] = 1.0
    """What such a look may take."""


@dataclass(frozen=True)
class Hello(Request):
    """Who are you?"""

    protocols: Protocols = Protocols()
    """Of the client."""


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

    namespace: Text
    rank: RankNumber


@dataclass(frozen=True)
class JobRequest(Rank):
    """What the trainer of one generation asks: the agent that has taken up a newer one refuses it."""

    generation: Generation


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

    hurry_s: Annotated[float, Meta(ge=0, le=HURRY_S_MAX)] = 0.0
    """Somebody waits for the tiers: for so long no pace need hold a copy back."""
    due: Annotated[tuple[Version, ...], Meta(max_length=DUE_MAX)] = ()
    """Versions whose bases are left to the mover to fold."""


@dataclass(frozen=True)
class Look(JobRequest):
    """How is this rank's mover?"""


@dataclass(frozen=True)
class Agree(JobRequest):
    """The ranks agree on a mark (:mod:`tiercheck.policy.recovery.agreement`)."""

    mark: Annotated[int, Meta(ge=NO_MARK, le=VERSION_MAX)]


@dataclass(frozen=True)
class RoomForBase(JobRequest):
    """Answer once another base may come into the first tier."""

    due: Annotated[tuple[Version, ...], Meta(max_length=DUE_MAX)] = ()
    """Versions whose bases are left to the mover to fold."""
    patiently: bool = False
    """Wait also until the bases that were left to it before are folded."""
    look_s: ClassVar[float] = TIERS_S


@dataclass(frozen=True)
class MakeRoom(JobRequest):
    """Answer once something was deleted from the first tier (``result``), or nothing is left to do."""

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
    protocols: Protocols = Protocols()
    lacks_to_fold: str = ""
    """The package that folds need and that is not installed where it runs; empty: none."""


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


class _Envelope(Struct, frozen=True, array_like=True):
    """The four parts of a message."""

    protocol: Annotated[int, Meta(ge=0)]
    id: Count
    name: str | None
    fields: Any


@dataclass(frozen=True)
class _ErrorFields:
    message: str
    tier: str | None = None
    key: str | None = None
    late: tuple[RankNumber, ...] = ()
    kinds: Annotated[tuple[str, ...], Meta(max_length=KINDS_MAX)] = ()
    """The names of its class's bases, nearest first: whoever does not know the class may know one of them."""


@dataclass(frozen=True)
class Answer:
    """A reply as it came in: ``fields`` of the result, or an error."""

    id: int
    fields: Any
    error: TierCheckError | None

    def read(self, kind: type[T]) -> T:
        """The result as ``kind``. Errors: the request's own; ``ValueError`` for what is no ``kind``."""
        if self.error is not None:
            raise self.error
        return schema.read(kind, self.fields)


class Refused(ValueError):
    """A request that was not understood, and can be answered: ``error`` says why."""

    def __init__(self, identifier: int, error: TierCheckError) -> None:
        super().__init__(str(error))
        self.identifier = identifier
        self.error = error


def pack_request(identifier: int, request: Request, protocol: int = PROTOCOLS.newest) -> bytes:
    return schema.pack(_Envelope(protocol, identifier, _NAMES[type(request)], request))


def parse_request(frame: Buffer) -> tuple[int, Request]:
    """Identifier and request. Errors: :class:`Refused` for what is no request of this release; ``ValueError`` for what
    cannot even be answered."""
    envelope = _envelope(frame, REQUEST_LIMITS)
    kind = _REQUESTS.get(envelope.name or "")
    if kind is not Hello and envelope.protocol not in PROTOCOLS:
        error: TierCheckError = ConfigurationError(
            f"{_this()} speaks {PROTOCOLS}, and was sent a message of protocol {envelope.protocol}: end the older of "
            "the two"
        )
    elif kind is None:
        error = UnknownRequest(f"{_this()} knows no request {shown(envelope.name)}: it is of another release")
    else:
        try:
            return envelope.id, schema.read(kind, envelope.fields)
        except ValueError as reason:
            error = ConfigurationError(f"{_this()} does not understand what it was sent: {reason}")
    raise Refused(envelope.id, error)


def pack_answer(identifier: int, answer: Any) -> bytes:
    """The frame of a reply. ``answer`` is a dataclass."""
    return schema.pack(_Envelope(PROTOCOLS.newest, identifier, None, answer))


def pack_error(identifier: int, error: TierCheckError) -> bytes:
    """The frame of a reply to a request that failed. The class is the nearest one of ``tiercheck.errors``."""
    name, *kinds = [kind.__name__ for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind]
    fields = _ErrorFields(str(error)[:ERROR_CHARACTERS_MAX], kinds=tuple(kinds))
    if isinstance(error, TierError):
        fields = replace(fields, message=error.message[:ERROR_CHARACTERS_MAX], tier=error.tier, key=error.key)
    if isinstance(error, RanksLate):
        fields = replace(fields, late=tuple(int(rank) for rank in error.late))
    return schema.pack(_Envelope(PROTOCOLS.newest, identifier, name, fields))


def parse_answer(frame: Buffer) -> Answer:
    """A reply. ``ValueError`` for anything malformed. An error of a class that this release does not know is one of the
    nearest class that it does know."""
    envelope = _envelope(frame, REPLY_LIMITS)
    if envelope.name is None:
        return Answer(envelope.id, envelope.fields, None)
    fields = schema.read(_ErrorFields, envelope.fields)
    kind = next((_ERRORS[name] for name in (envelope.name, *fields.kinds) if name in _ERRORS), TierCheckError)
    return Answer(envelope.id, None, _rebuilt(kind, fields))


def _rebuilt(kind: type[TierCheckError], fields: _ErrorFields) -> TierCheckError:
    if issubclass(kind, TierError):
        return kind(fields.message, tier=fields.tier, key=fields.key)
    if issubclass(kind, RanksLate):
        return kind(fields.message, late=fields.late)
    return kind(fields.message)


def _envelope(frame: Buffer, limits: Limits) -> _Envelope:
    try:
        return schema.read(_Envelope, host_state.unpack(frame, limits=limits))
    except Corruption as error:
        raise ValueError(error.message) from None


def _this() -> str:
    return f"the agent, of TierCheck {version('tiercheck')},"

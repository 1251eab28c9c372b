"""What client and server say to each other: one small head a message, and raw bytes in a frame of their own.

A head is a msgpack array ``[protocol, kind, request id, field, ...]`` followed by the xxh3-64 of its bytes, so that
no flipped bit can turn it into another one. A head has few bytes, and is taken only if it is, field by field, what its
kind says. A release may add kinds, and fields with a default at the end of a kind: a reader ignores the fields that it
does not know. A head of another protocol, or of a kind that the server does not know, is answered with a
:class:`Failure`, which has the same form in every protocol.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_type_hints

import msgspec
import xxhash
from msgspec import Meta, Struct
from msgspec.structs import astuple

from tiercheck.types import Buffer

__all__ = [
    "HEAD_BYTES_MAX",
    "PROTOCOL",
    "AbortPut",
    "BadFrame",
    "BeginGet",
    "BeginPut",
    "ChunkTaken",
    "Data",
    "Delete",
    "Done",
    "EndGet",
    "Failure",
    "Forgotten",
    "GetChunk",
    "GetState",
    "Hello",
    "Info",
    "ListPage",
    "MeasureUsage",
    "Message",
    "NotUnderstood",
    "Page",
    "PutChunk",
    "PutState",
    "Stat",
    "UsageIs",
    "Welcome",
    "checksum",
    "decode",
    "encode",
]

PROTOCOL = 1
HEAD_BYTES_MAX = 256 << 10
TRANSFER_BYTES = 16
KEYS_MAX = 256
PAGE_MAX = 2048
COUNT_MAX = 1 << 62
KEY_CHARACTERS_MAX = 1024
CHUNKS_MAX = 1 << 20
"""Chunks of one object: a bit each is the largest thing in a head."""


class BadFrame(Exception):
    """A frame that is no message; ``reason`` is the word it is counted under."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class NotUnderstood(BadFrame):
    """A sound head of another release: it can be answered, and no more."""

    def __init__(self, reason: str, detail: str, request_id: int) -> None:
        super().__init__(reason, detail)
        self.request_id = request_id


Number = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Word = Annotated[int, Meta(ge=0)]
"""Of 64 bits: msgpack has no longer ones."""
ChunkCount = Annotated[int, Meta(ge=0, le=CHUNKS_MAX)]
ChunkBytes = Annotated[int, Meta(ge=0, le=1 << 30)]
Transfer = Annotated[bytes, Meta(min_length=TRANSFER_BYTES, max_length=TRANSFER_BYTES)]
Key = Annotated[str, Meta(max_length=KEY_CHARACTERS_MAX)]
Etag = Annotated[str, Meta(max_length=1024)]
Namespace = Annotated[str, Meta(max_length=255)]


# What a client asks.


@dataclass(frozen=True)
class Hello:
    """The first message: is there a server, does it speak this protocol, can the namespace be opened?"""

    namespace: Namespace


@dataclass(frozen=True)
class Stat:
    namespace: Namespace
    key: Key


@dataclass(frozen=True)
class ListPage:
    """The objects whose key starts with ``prefix`` and comes after ``after``, as many as fit a page."""

    namespace: Namespace
    prefix: Key
    after: Key


@dataclass(frozen=True)
class Delete:
    transfer: Transfer
    namespace: Namespace
    keys: Annotated[tuple[Key, ...], Meta(max_length=KEYS_MAX)]


@dataclass(frozen=True)
class MeasureUsage:
    namespace: Namespace


@dataclass(frozen=True)
class BeginPut:
    """Begin or resume the put ``transfer``. An object of one chunk comes with it, as the message's data.

    ``incarnation``: the server that was asked first. ``age_ms``: how long ago that was; 0 the first time.
    ``credit``: chunks that the sender would like to have under way.
    """

    transfer: Transfer
    namespace: Namespace
    key: Key
    nbytes: Number
    mode: Annotated[str, Meta(max_length=16)]
    etag: Etag
    chunk_bytes: ChunkBytes
    credit: ChunkCount
    incarnation: Word
    age_ms: Number
    checksum: Word


@dataclass(frozen=True)
class PutChunk:
    transfer: Transfer
    index: ChunkCount
    checksum: Word


@dataclass(frozen=True)
class AbortPut:
    transfer: Transfer


@dataclass(frozen=True)
class BeginGet:
    """Begin or resume reading ``[start, stop)`` of an object; ``whole``: all of it, wherever it ends."""

    transfer: Transfer
    namespace: Namespace
    key: Key
    whole: bool
    start: Number
    stop: Number
    chunk_bytes: ChunkBytes


@dataclass(frozen=True)
class GetChunk:
    """Send that chunk: the credit that the reader gives. ``opening``: the one whose bytes it wants, of no other."""

    transfer: Transfer
    index: ChunkCount
    opening: Word


@dataclass(frozen=True)
class EndGet:
    """The reader needs no more. Not answered."""

    transfer: Transfer


# What a server answers.


@dataclass(frozen=True)
class Welcome:
    """``incarnation`` is another number each time a server starts."""

    incarnation: Word
    chunk_bytes_max: ChunkBytes


@dataclass(frozen=True)
class Info:
    nbytes: Number
    etag: Etag


@dataclass(frozen=True)
class Page:
    """``entries``: (key, bytes, etag) in order. ``more``: there may be others after the last of them."""

    entries: Annotated[tuple[tuple[Key, Number, Etag], ...], Meta(max_length=PAGE_MAX)]
    more: bool


@dataclass(frozen=True)
class UsageIs:
    """``limit_bytes`` counts only if ``limited``."""

    used_bytes: Number
    limited: bool
    limit_bytes: Number


@dataclass(frozen=True)
class PutState:
    """``credit``: chunks that may be under way; ``received``: a bit for each chunk that is there, lowest first;
    ``reserving``: memory is being made for it, and there will be credit then."""

    transfer: Transfer
    incarnation: Word
    credit: ChunkCount
    received: Annotated[bytes, Meta(max_length=CHUNKS_MAX // 8)]
    reserving: bool = False


@dataclass(frozen=True)
class ChunkTaken:
    transfer: Transfer
    index: ChunkCount


@dataclass(frozen=True)
class Done:
    """The put is published, or the delete done; ``nbytes`` and ``etag`` are the object's."""

    transfer: Transfer
    nbytes: Number
    etag: Etag


@dataclass(frozen=True)
class Forgotten:
    """No such transfer is known, and none of that name was finished here that the sender might mean."""

    transfer: Transfer
    incarnation: Word


@dataclass(frozen=True)
class GetState:
    """``nbytes`` are to come. If they fit one chunk they are the message's data, and that was all.

    ``opening`` is another number each time a server opens an object.
    """

    transfer: Transfer
    nbytes: Number
    etag: Etag
    checksum: Word
    opening: Word


@dataclass(frozen=True)
class Data:
    transfer: Transfer
    index: ChunkCount
    checksum: Word


@dataclass(frozen=True)
class Failure:
    """``error`` is the name of a class of :mod:`tiercheck.errors`, or ``ValueError``. ``transfer`` may be zeros."""

    transfer: Transfer
    error: Annotated[str, Meta(max_length=64)]
    message: Annotated[str, Meta(max_length=4096)]


Message = (
    Hello | Stat | ListPage | Delete | MeasureUsage | BeginPut | PutChunk | AbortPut | BeginGet | GetChunk | EndGet
    | Welcome | Info | Page | UsageIs | PutState | ChunkTaken | Done | Forgotten | GetState | Data | Failure
)  # fmt: skip

KINDS: dict[int, type[Any]] = {
    1: Hello, 2: Stat, 3: ListPage, 4: Delete, 5: MeasureUsage, 6: BeginPut, 7: PutChunk, 8: AbortPut, 9: BeginGet,
    10: GetChunk, 11: EndGet,
    64: Welcome, 65: Info, 66: Page, 67: UsageIs, 68: PutState, 69: ChunkTaken, 70: Done, 71: Forgotten, 72: GetState,
    73: Data, 74: Failure,
}  # fmt: skip
NUMBERS = {kind: code for code, kind in KINDS.items()}


class _Head(Struct, frozen=True, array_like=True):
    """What every head begins with."""

    protocol: int
    kind: int
    request_id: Word


def _decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    """Of a head of that kind: an array whose first values are a :class:`_Head`'s, and the others the message's."""
    hints = get_type_hints(kind, include_extras=True)
    fields: list[Any] = [
        (name, hints[name], DEFAULTS[kind][name]) if name in DEFAULTS[kind] else (name, hints[name])
        for name in NAMES[kind]
    ]
    form = msgspec.defstruct(kind.__name__, fields, bases=(_Head,), frozen=True, array_like=True)
    return msgspec.msgpack.Decoder(form)


NAMES = {kind: tuple(each.name for each in fields(kind)) for kind in NUMBERS}
DEFAULTS = {kind: {each.name: each.default for each in fields(kind) if each.default is not MISSING} for kind in NUMBERS}
DECODERS = {kind: _decoder(kind) for kind in NUMBERS}
HEAD = msgspec.msgpack.Decoder(_Head)


def checksum(data: Buffer) -> int:
    """The xxh3-64 of ``data``."""
    return xxhash.xxh3_64_intdigest(data)


def encode(request_id: int, message: Message) -> bytes:
    """The head of ``message``."""
    kind = type(message)
    values = [getattr(message, name) for name in NAMES[kind]]
    for name, default in reversed(DEFAULTS[kind].items()):
        if getattr(message, name) != default:
            break
        values.pop()  # so is the head that of a release that had no such field
    body = msgspec.msgpack.encode((PROTOCOL, NUMBERS[kind], request_id, *values))
    return body + checksum(body).to_bytes(8, "little")


def decode(head: Buffer) -> tuple[int, Message]:
    """The request id and the message of a head. Errors: :class:`BadFrame`; :class:`NotUnderstood` for one of another
    release."""
    with memoryview(head) as view:
        if view.nbytes > HEAD_BYTES_MAX:
            raise BadFrame("oversized", f"a head has {view.nbytes} bytes; at most {HEAD_BYTES_MAX} are allowed")
        if view.nbytes < 12:
            raise BadFrame("truncated", f"a head has only {view.nbytes} bytes")
        body, stated = bytes(view[:-8]), int.from_bytes(view[-8:], "little")
    if checksum(body) != stated:
        raise BadFrame("corrupt", "a head's checksum is not that of its bytes")
    try:
        begins = HEAD.decode(body)
        kind = KINDS.get(begins.kind)
        if begins.protocol != PROTOCOL and kind is not Failure:
            spoken = f"a head speaks protocol {begins.protocol}, not {PROTOCOL}"
            raise NotUnderstood("protocol", spoken, begins.request_id)
        if kind is None:
            raise NotUnderstood("unknown", f"no message has the number {begins.kind}", begins.request_id)
        _, _, request_id, *values = astuple(DECODERS[kind].decode(body))
    except (ValueError, RecursionError) as error:
        raise BadFrame("malformed", f"a head is none: {str(error)[:200]}") from None
    return request_id, kind(*values)

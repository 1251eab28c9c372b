"""What client and server say to each other: one small head a message, and raw bytes in a frame of their own.

A head is a msgpack array ``[protocol, kind, request id, field, ...]`` followed by the xxh3-64 of its bytes, so that
no flipped bit can turn it into another one. Every length is bounded before anything is allocated for it, and a head
is taken only if it is, field by field, what its kind says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack
import xxhash

from tiercheck.types import Buffer, shown

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
WORD_MAX = (1 << 64) - 1
KEY_BYTES_MAX = 1024
CHUNKS_MAX = 1 << 20
"""Chunks of one object: a bit each is the largest thing in a head."""

T = TypeVar("T")


class BadFrame(Exception):
    """A frame that is no message; ``reason`` is the word it is counted under."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def text(bytes_max: int) -> Any:
    def check(value: object) -> bool:
        return isinstance(value, str) and len(value) <= bytes_max and len(value.encode()) <= bytes_max

    return field(metadata={"check": check})


def number(maximum: int = COUNT_MAX) -> Any:
    return field(metadata={"check": lambda value: type(value) is int and 0 <= value <= maximum})


def binary(minimum: int, maximum: int) -> Any:
    return field(metadata={"check": lambda value: isinstance(value, bytes) and minimum <= len(value) <= maximum})


def flag() -> Any:
    return field(metadata={"check": lambda value: type(value) is bool})


def transfer_id() -> Any:
    return binary(TRANSFER_BYTES, TRANSFER_BYTES)


def key() -> Any:
    return text(KEY_BYTES_MAX)


def namespace() -> Any:
    return text(255)


def etag() -> Any:
    return text(1024)


def word() -> Any:
    return number(WORD_MAX)


def checksum_field() -> Any:
    return word()


def keys_field() -> Any:
    def check(value: object) -> bool:
        return (
            isinstance(value, tuple)
            and len(value) <= KEYS_MAX
            and all(isinstance(item, str) and len(item) <= KEY_BYTES_MAX for item in value)
        )

    return field(metadata={"check": check})


def entries_field() -> Any:
    def entry(value: object) -> bool:
        return (
            isinstance(value, tuple)
            and len(value) == 3
            and isinstance(value[0], str)
            and type(value[1]) is int
            and 0 <= value[1] <= COUNT_MAX
            and isinstance(value[2], str)
        )

    def check(value: object) -> bool:
        return isinstance(value, tuple) and len(value) <= PAGE_MAX and all(map(entry, value))

    return field(metadata={"check": check})


# What a client asks.


@dataclass(frozen=True)
class Hello:
    """The first message: is there a server, does it speak this protocol, can the namespace be opened?"""

    namespace: str = namespace()


@dataclass(frozen=True)
class Stat:
    namespace: str = namespace()
    key: str = key()


@dataclass(frozen=True)
class ListPage:
    """The objects whose key starts with ``prefix`` and comes after ``after``, as many as fit a page."""

    namespace: str = namespace()
    prefix: str = key()
    after: str = key()


@dataclass(frozen=True)
class Delete:
    transfer: bytes = transfer_id()
    namespace: str = namespace()
    keys: tuple[str, ...] = keys_field()


@dataclass(frozen=True)
class MeasureUsage:
    namespace: str = namespace()


@dataclass(frozen=True)
class BeginPut:
    """Begin or resume the put ``transfer``. An object of one chunk comes with it, as the message's data.

    ``incarnation``: the server that was asked first. ``age_ms``: how long ago that was; 0 the first time.
    ``credit``: chunks that the sender would like to have under way.
    """

    transfer: bytes = transfer_id()
    namespace: str = namespace()
    key: str = key()
    nbytes: int = number()
    mode: str = text(16)
    etag: str = etag()
    chunk_bytes: int = number(1 << 30)
    credit: int = number(CHUNKS_MAX)
    incarnation: int = word()
    age_ms: int = number()
    checksum: int = checksum_field()


@dataclass(frozen=True)
class PutChunk:
    transfer: bytes = transfer_id()
    index: int = number(CHUNKS_MAX)
    checksum: int = checksum_field()


@dataclass(frozen=True)
class AbortPut:
    transfer: bytes = transfer_id()


@dataclass(frozen=True)
class BeginGet:
    """Begin or resume reading ``[start, stop)`` of an object; ``whole``: all of it, wherever it ends."""

    transfer: bytes = transfer_id()
    namespace: str = namespace()
    key: str = key()
    whole: bool = flag()
    start: int = number()
    stop: int = number()
    chunk_bytes: int = number(1 << 30)


@dataclass(frozen=True)
class GetChunk:
    """Send that chunk: the credit that the reader gives. ``opening``: the one whose bytes it wants, of no other."""

    transfer: bytes = transfer_id()
    index: int = number(CHUNKS_MAX)
    opening: int = word()


@dataclass(frozen=True)
class EndGet:
    """The reader needs no more. Not answered."""

    transfer: bytes = transfer_id()


# What a server answers.


@dataclass(frozen=True)
class Welcome:
    """``incarnation`` is another number each time a server starts."""

    incarnation: int = word()
    chunk_bytes_max: int = number(1 << 30)


@dataclass(frozen=True)
class Info:
    nbytes: int = number()
    etag: str = etag()


@dataclass(frozen=True)
class Page:
    """``entries``: (key, bytes, etag) in order. ``more``: there may be others after the last of them."""

    entries: tuple[tuple[str, int, str], ...] = entries_field()
    more: bool = flag()


@dataclass(frozen=True)
class UsageIs:
    """``limit_bytes`` counts only where ``limited``."""

    used_bytes: int = number()
    limited: bool = flag()
    limit_bytes: int = number()


@dataclass(frozen=True)
class PutState:
    """``credit``: chunks that may be under way; ``received``: a bit for each chunk that is there, lowest first."""

    transfer: bytes = transfer_id()
    incarnation: int = word()
    credit: int = number(CHUNKS_MAX)
    received: bytes = binary(0, CHUNKS_MAX // 8)


@dataclass(frozen=True)
class ChunkTaken:
    transfer: bytes = transfer_id()
    index: int = number(CHUNKS_MAX)


@dataclass(frozen=True)
class Done:
    """The put is published, or the delete done; ``nbytes`` and ``etag`` are the object's."""

    transfer: bytes = transfer_id()
    nbytes: int = number()
    etag: str = etag()


@dataclass(frozen=True)
class Forgotten:
    """No such transfer is known, and none of that name was finished here that the sender might mean."""

    transfer: bytes = transfer_id()
    incarnation: int = word()


@dataclass(frozen=True)
class GetState:
    """``nbytes`` are to come. Where they fit one chunk they are the message's data, and that was all.

    ``opening`` is another number each time a server opens an object.
    """

    transfer: bytes = transfer_id()
    nbytes: int = number()
    etag: str = etag()
    checksum: int = checksum_field()
    opening: int = word()


@dataclass(frozen=True)
class Data:
    transfer: bytes = transfer_id()
    index: int = number(CHUNKS_MAX)
    checksum: int = checksum_field()


@dataclass(frozen=True)
class Failure:
    """``error`` is the name of a class of :mod:`tiercheck.errors`, or ``ValueError``. ``transfer`` may be zeros."""

    transfer: bytes = transfer_id()
    error: str = text(64)
    message: str = text(4096)


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
CHECKS: dict[type[Any], tuple[tuple[str, Callable[[object], bool]], ...]] = {
    kind: tuple((item.name, item.metadata["check"]) for item in dataclasses.fields(kind)) for kind in NUMBERS
}


def checksum(data: Buffer) -> int:
    """The xxh3-64 of ``data``."""
    return xxhash.xxh3_64_intdigest(data)


def encode(request_id: int, message: Message) -> bytes:
    """The head of ``message``."""
    fields = (getattr(message, name) for name, _ in CHECKS[type(message)])
    body: bytes = msgpack.packb((PROTOCOL, NUMBERS[type(message)], request_id, *fields))
    return body + checksum(body).to_bytes(8, "little")


def decode(head: Buffer) -> tuple[int, Message]:
    """The request id and the message of a head. Errors: :class:`BadFrame`."""
    with memoryview(head) as view:
        if view.nbytes > HEAD_BYTES_MAX:
            raise BadFrame("oversized", f"a head has {view.nbytes} bytes; at most {HEAD_BYTES_MAX} are allowed")
        if view.nbytes < 12:
            raise BadFrame("truncated", f"a head has only {view.nbytes} bytes")
        body, stated = bytes(view[:-8]), int.from_bytes(view[-8:], "little")
    if checksum(body) != stated:
        raise BadFrame("corrupt", "a head's checksum is not that of its bytes")
    try:
        values = msgpack.unpackb(
            body,
            use_list=False,
            max_map_len=0,
            max_ext_len=0,
            max_array_len=PAGE_MAX,
            max_str_len=4096,
            max_bin_len=CHUNKS_MAX // 8,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise BadFrame("malformed", f"a head is no msgpack: {type(error).__name__}") from None
    if not isinstance(values, tuple) or len(values) < 3:
        raise BadFrame("malformed", "a head is no array")
    protocol, code, request_id, *fields = values
    if protocol != PROTOCOL:
        raise BadFrame("protocol", f"a head speaks protocol {shown(protocol)}, not {PROTOCOL}")
    if type(request_id) is not int or not 0 <= request_id <= WORD_MAX:
        raise BadFrame("malformed", "a request id is no number")
    kind = KINDS.get(code) if type(code) is int else None
    if kind is None:
        raise BadFrame("unknown", "a head is of no known kind")
    checks = CHECKS[kind]
    if len(fields) != len(checks):
        raise BadFrame("malformed", f"{kind.__name__} has {len(checks)} fields, not {len(fields)}")
    for value, (name, is_valid) in zip(fields, checks, strict=True):
        if not is_valid(value):
            raise BadFrame("malformed", f"{kind.__name__}.{name} is not what it must be")
    return request_id, kind(*fields)

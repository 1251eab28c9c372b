"""The header of a shard: what the file holds, where, and the checksum of each part.

A safetensors header is eight length bytes and a JSON object. TierCheck's is one canonical form of it, so that
it can be read with a fixed grammar instead of a general parser: nothing nests, and no length in it can make
the reader allocate more than a small multiple of the header's own bytes. It begins::

    {"__metadata__":{"format":"tiercheck/2","xxh3_64":"0123456789abcdef","stream":"base","token":"4f0c9a17e2b85d36", ...

The first checksum is that of the header itself: the XXH3-64 of it, length bytes and padding included, taken with its
own sixteen digits as zeros. It sits at a fixed place and is verified before anything else is believed. After it come
the shard's identity, its notes, a checksum per tensor (:mod:`tiercheck.format.checksums`) and the dtypes that
safetensors does not know.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from types import MappingProxyType

import xxhash

from tiercheck import keys
from tiercheck.types import Buffer, ByteRange

__all__ = [
    "ALIGNMENT",
    "COMPACT",
    "DTYPES",
    "FILLING",
    "FORMAT",
    "HEADER_NBYTES_MAX",
    "LENGTH_NBYTES",
    "NBYTES_MAX",
    "OBJECT_PREFIX",
    "PADDING_PREFIX",
    "STORED_AS",
    "ZEROS",
    "Extent",
    "HeaderTooLarge",
    "ShardHeader",
    "ShardMetadata",
    "TensorSpec",
    "appended",
    "check_count",
    "check_name",
    "decode_header",
    "description_of",
    "encode_header",
    "header_length",
    "header_texts",
    "round_up",
]

FORMAT = "tiercheck/2"
ALIGNMENT = 64
HEADER_NBYTES_MAX = 64 << 20
TENSORS_MAX = 1 << 20
NAME_BYTES_MAX = 1024
DIMENSIONS_MAX = 64
NOTES_MAX = 64
NOTE_CHARACTERS_MAX = 4096
NBYTES_MAX = 10**15
"""No shard is longer (0.9 PiB); a header's room is computed with offsets of this many digits."""

LENGTH_NBYTES = 8
OBJECT_PREFIX = "__object__:"
PADDING_PREFIX = "__padding_"
FILLING = f"{PADDING_PREFIX}end__"
"""The last padding of a shard that is as long as the memory in which it was written. It may be of any length."""
METADATA = "__metadata__"

DTYPES: Mapping[str, int] = MappingProxyType(
    {
        **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2},
        **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1},
        **{"I8": 1, "I16": 2, "I32": 4, "I64": 8, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "BOOL": 1},
        **{"C64": 8, "C128": 16},
    }
)
"""Bytes an element, by safetensors dtype, and of the one logical dtype that safetensors lacks."""

_CHECKSUM = re.compile(r"[0-9a-f]{16}\Z", re.ASCII)
_TOKEN = re.compile(r"(?:[0-9a-f]{16})?\Z", re.ASCII)

STORED_AS = MappingProxyType({"C128": ("F64", 2)})
"""How a logical dtype is stored: another dtype, and a trailing dimension."""


def round_up(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def check_name(name: str) -> str:
    """``name`` itself, where safetensors and a bounded header can hold it; ``ValueError`` otherwise."""
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"the tensor name {name[:80]!r} is not valid Unicode") from None
    if not 0 < nbytes <= NAME_BYTES_MAX:
        raise ValueError(f"the tensor name {name[:80]!r} has {nbytes} bytes, not 1 to {NAME_BYTES_MAX}")
    if name == METADATA:
        raise ValueError(f"the tensor name {METADATA!r} belongs to the file format")
    return name


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (a key of :data:`DTYPES`) and shape of a tensor; ``ValueError`` if one is impossible."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(index, self.shape)))
        check_name(self.name)
        if self.dtype not in DTYPES:
            raise ValueError(f"tensor {self.name!r} has the unknown dtype {self.dtype!r}: choose one of {list(DTYPES)}")
        if len(self.shape) > DIMENSIONS_MAX or min(self.shape, default=0) < 0:
            raise ValueError(f"tensor {self.name!r} has an impossible shape of {len(self.shape)} dimensions")
        # Zeros are left out of the product: whoever reshapes to this multiplies the other dimensions all the same.
        if math.prod(filter(None, self.shape)) * DTYPES[self.dtype] > NBYTES_MAX:
            raise ValueError(f"tensor {self.name!r} is too large; at most {NBYTES_MAX} bytes are allowed")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True)
class ShardMetadata:
    """Which rank's part of which version(s) a shard is. ``notes`` are a few short free strings.

    ``token``: of the generation, as its lineage record has it. Two jobs that both count a generation 3 differ in it.
    Empty for what no job wrote.
    """

    stream: keys.Stream
    generation: int
    first: int
    last: int
    rank: int
    world_size: int
    notes: Mapping[str, str] = field(default_factory=dict, hash=False)
    token: str = ""
    refers_to: tuple[int, ...] = ()
    """As the shard's key has it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", dict(self.notes))
        if not self.key.rank < self.world_size <= keys.RANK_MAX + 1:
            raise ValueError(f"rank {self.rank} does not belong to a world of {self.world_size}")
        if not _TOKEN.match(self.token):
            raise ValueError(f"{self.token[:80]!r} is no generation's token")
        check_notes(self.notes)

    @classmethod
    def of(cls, key: keys.ShardKey, world_size: int, token: str) -> ShardMetadata:
        place = key.stream, key.generation, key.first, key.last, key.rank
        return cls(*place, world_size, token=token, refers_to=key.refers_to)

    @property
    def key(self) -> keys.ShardKey:
        """The name this shard belongs under."""
        return keys.ShardKey(self.generation, self.stream, self.first, self.last, self.rank, self.refers_to)


@dataclass(frozen=True)
class Extent:
    """Where a tensor lies, in bytes from the first byte after the header. Padding has no checksum: it is zeros."""

    spec: TensorSpec
    start: int
    checksum: str | None

    def __post_init__(self) -> None:
        if self.checksum is not None and not _CHECKSUM.match(self.checksum):
            raise ValueError(
                f"the checksum {self.checksum[:80]!r} of tensor {self.spec.name[:80]!r} is not 16 lower-case "
                "hexadecimal digits"
            )

    @property
    def stop(self) -> int:
        return self.start + self.spec.nbytes

    @property
    def is_padding(self) -> bool:
        return self.spec.name.startswith(PADDING_PREFIX)

    @classmethod
    def padding(cls, index: int, start: int, nbytes: int) -> Extent:
        return cls(TensorSpec(f"{PADDING_PREFIX}{index}__", "U8", (nbytes,)), start, None)


@dataclass(frozen=True)
class ShardHeader:
    """A verified header: the shard's identity, and its tensors (objects and padding too) in file order."""

    metadata: ShardMetadata
    extents: tuple[Extent, ...]
    nbytes: int
    """Bytes before the first tensor."""

    @property
    def file_nbytes(self) -> int:
        return self.nbytes + (self.extents[-1].stop if self.extents else 0)

    def object_checksum(self, name: str) -> str:
        """Of a packed object; empty if the shard has none of this name."""
        found = (each.checksum for each in self.extents if each.spec.name == OBJECT_PREFIX + name)
        return next(found, None) or ""

    @property
    def ranges(self) -> dict[str, ByteRange]:
        """Where in the file each tensor, object and padding lies, by its name in the file."""
        return {
            extent.spec.name: ByteRange(self.nbytes + extent.start, self.nbytes + extent.stop)
            for extent in self.extents
        }


def check_notes(notes: Mapping[str, str]) -> None:
    if len(notes) > NOTES_MAX:
        raise ValueError(f"a shard carries at most {NOTES_MAX} notes, not {len(notes)}")
    for text in (*notes.keys(), *notes.values()):
        if not isinstance(text, str) or len(text) > NOTE_CHARACTERS_MAX:
            raise ValueError(f"a note is a string of at most {NOTE_CHARACTERS_MAX} characters; store more as an object")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the note {text[:80]!r} is not valid Unicode") from None


# Writing

_BEFORE_DIGEST = f'{{"{METADATA}":{{"format":"{FORMAT}","xxh3_64":"'.encode()
_DIGEST = slice(LENGTH_NBYTES + len(_BEFORE_DIGEST), LENGTH_NBYTES + len(_BEFORE_DIGEST) + 16)
ZEROS = "0" * 16


class HeaderTooLarge(ValueError):
    """A shard has more tensors, or longer names, than a header may describe: split it."""


def encode_header(metadata: ShardMetadata, extents: Sequence[Extent]) -> bytearray:
    """The header for tensors that lie contiguously at ``extents``: length bytes, JSON, spaces, checksum; as long as it
    needs to be, rounded up. Errors: ``ValueError`` if it passes a limit that readers set."""
    texts = header_texts(metadata, extents)
    header = bytearray(round_up(LENGTH_NBYTES + sum(map(len, texts))))
    write_header(memoryview(header), texts)
    return header


def encode_header_into(
    memory: memoryview,
    metadata: ShardMetadata,
    extents: Sequence[Extent],
    *,
    recurring: tuple[Buffer, Buffer] = (b"", b""),
) -> None:
    """The same, as long as ``memory``, and there. The length bytes, without which nothing parses, are written last.

    ``recurring``: of tensors that lie ahead of the others (:meth:`tiercheck.format.recurring.Recurring.texts`). Errors:
    ``ValueError`` also if there is too little memory; then nothing is written.
    """
    write_header(memory, header_texts(metadata, extents, recurring))


def write_header(memory: memoryview, texts: Sequence[Buffer]) -> None:
    needed, nbytes = LENGTH_NBYTES + sum(map(len, texts)), len(memory)
    if needed > nbytes:
        raise ValueError(
            f"the header takes {needed} bytes and its room has {nbytes}: "
            "compute the room with header_room over every tensor, object and note of the shard"
        )
    if nbytes > HEADER_NBYTES_MAX:
        raise HeaderTooLarge(f"the header takes {nbytes} bytes, over the limit of {HEADER_NBYTES_MAX}: split the shard")
    start = LENGTH_NBYTES
    for text in texts:
        memory[start : start + len(text)] = text
        start += len(text)
    memory[needed:] = b" " * (nbytes - needed)
    length = (nbytes - LENGTH_NBYTES).to_bytes(LENGTH_NBYTES, "little")
    digest = xxhash.xxh3_64(length)
    digest.update(memory[LENGTH_NBYTES:])
    memory[_DIGEST] = digest.hexdigest().encode("ascii")
    memory[:LENGTH_NBYTES] = length


COMPACT = json.JSONEncoder(separators=(",", ":"))


def header_texts(
    metadata: ShardMetadata, extents: Sequence[Extent], recurring: tuple[Buffer, Buffer] = (b"", b"")
) -> list[Buffer]:
    """The header's JSON, to be joined: every string, then every tensor."""
    check_count(len(extents))
    strings = {"format": FORMAT, "xxh3_64": ZEROS, "stream": str(metadata.stream), "token": metadata.token}
    strings |= {name: str(getattr(metadata, name)) for name in _NUMBERS}
    if metadata.refers_to:
        strings["refers_to"] = keys.reference(metadata.refers_to)
    strings |= {f"note:{name}": text for name, text in metadata.notes.items()}
    more = {f"xxh3_64:{extent.spec.name}": extent.checksum for extent in extents if extent.checksum is not None}
    more |= {f"dtype:{extent.spec.name}": extent.spec.dtype for extent in extents if extent.spec.dtype in STORED_AS}
    described = {extent.spec.name: description_of(extent) for extent in extents}
    shard = f'{{"{METADATA}":{COMPACT.encode(strings)[:-1]}'.encode("ascii")
    return [shard, recurring[0], appended(more), b"}", recurring[1], appended(described), b"}"]


def check_count(extents: int) -> None:
    """Errors: ``HeaderTooLarge`` if a shard cannot hold so many tensors, objects and paddings."""
    if extents > TENSORS_MAX:
        raise HeaderTooLarge(f"a shard holds at most {TENSORS_MAX} tensors, not {extents}: split it")


def appended(values: Mapping[str, object]) -> bytes:
    """The JSON of these, in an object that has others already."""
    return b"," + COMPACT.encode(values)[1:-1].encode("ascii") if values else b""


def description_of(extent: Extent) -> dict[str, object]:
    """What the header says of a tensor, beside its checksum."""
    dtype, shape = extent.spec.dtype, list(extent.spec.shape)
    if dtype in STORED_AS:
        dtype, trailing = STORED_AS[dtype]
        shape.append(trailing)
    return {"dtype": dtype, "shape": shape, "data_offsets": [extent.start, extent.stop]}


# Reading

_NUMBERS = ("generation", "first", "last", "rank", "world_size")
_STRING = r'("[^"\\]*+(?:\\.[^"\\]*+)*+")'
_INTEGER = r"(?:0|[1-9][0-9]{0,18})"
_PAIR = re.compile(rf"{_STRING}:{_STRING}([,}}])")
_TENSOR = re.compile(
    rf',{_STRING}:\{{"dtype":"([A-Z0-9_]{{1,16}})","shape":\[((?:{_INTEGER}(?:,{_INTEGER})*+)?)\],'
    rf'"data_offsets":\[({_INTEGER}),({_INTEGER})\]\}}'
)
_END = re.compile(r"\} *+\Z")
_FORMAT = re.compile(rb"tiercheck/[0-9]{1,4}")


def decode_header(buffer: memoryview, file_nbytes: int) -> ShardHeader:
    """The header at the start of ``buffer``, which holds at least the header of a file of ``file_nbytes``.

    Errors: ``ValueError`` saying what is wrong, for whatever a TierCheck writer does not write.
    """
    nbytes = header_length(buffer)
    if nbytes > file_nbytes or nbytes > len(buffer):
        raise ValueError(f"its header needs {nbytes} bytes and only {min(file_nbytes, len(buffer))} are there")
    if bytes(buffer[LENGTH_NBYTES : _DIGEST.start]) != _BEFORE_DIGEST:
        other = _FORMAT.search(bytes(buffer[LENGTH_NBYTES : _DIGEST.start]))
        if other and other[0] != FORMAT.encode():
            raise ValueError(f"it is of the format {other[0].decode()}, and this release reads {FORMAT}")
        raise ValueError(f"it does not begin as a file of format {FORMAT} does")
    hasher = xxhash.xxh3_64()
    for part in (buffer[: _DIGEST.start], ZEROS.encode("ascii"), buffer[_DIGEST.stop : nbytes]):
        hasher.update(part)
    if hasher.hexdigest().encode("ascii") != bytes(buffer[_DIGEST]):
        raise ValueError("its header fails its checksum")
    text = str(buffer[LENGTH_NBYTES:nbytes], "ascii")
    strings, position = read_metadata(text)
    metadata, checksums, dtypes = interpret(strings)
    extents = tuple(read_extents(text, position, checksums, dtypes))
    if checksums or dtypes:
        raise ValueError(f"its header describes the missing tensor {next(iter([*checksums, *dtypes]))[:80]!r}")
    header = ShardHeader(metadata, extents, nbytes)
    if header.file_nbytes != file_nbytes:
        raise ValueError(f"it has {file_nbytes} bytes and its header tells of {header.file_nbytes}")
    return header


def header_length(buffer: memoryview) -> int:
    """Bytes before the first tensor, from the first eight bytes of a file; ``ValueError`` if impossible."""
    if len(buffer) < LENGTH_NBYTES:
        raise ValueError(f"it has {len(buffer)} bytes, too few for a header")
    nbytes = LENGTH_NBYTES + int.from_bytes(buffer[:LENGTH_NBYTES], "little")
    if not LENGTH_NBYTES < nbytes <= HEADER_NBYTES_MAX:
        raise ValueError(f"its header claims {nbytes} bytes, not {LENGTH_NBYTES + 1} to {HEADER_NBYTES_MAX}")
    return nbytes


def read_string(literal: str) -> str:
    """Errors: ``ValueError`` for half of a surrogate pair, which Python takes for text, and other readers refuse."""
    if "\\" not in literal and literal.isprintable():  # nearly all: there are thousands of names and checksums
        return literal[1:-1]
    string: str = json.loads(literal)
    if "\\u" in literal and any("\ud800" <= each <= "\udfff" for each in string):
        raise ValueError("its header has half of a surrogate pair")
    return string


def read_metadata(text: str) -> tuple[dict[str, str], int]:
    """The strings of ``__metadata__`` and the position of the brace that closes them."""
    strings: dict[str, str] = {}
    position = len(f'{{"{METADATA}":{{')
    while match := _PAIR.match(text, position):
        name, value, separator = read_string(match[1]), read_string(match[2]), match[3]
        if name in strings:
            raise ValueError(f"its header has {name[:80]!r} twice")
        strings[name] = value
        position = match.end()
        if separator == "}":
            return strings, position
    raise ValueError(f"its metadata is malformed at byte {LENGTH_NBYTES + position}")


def interpret(strings: dict[str, str]) -> tuple[ShardMetadata, dict[str, str], dict[str, str]]:
    """The shard's metadata, and the checksum and the logical dtype by tensor name. Strings that this release does not
    know are ignored: a later one may add some."""
    notes: dict[str, str] = {}
    checksums: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    fields: dict[str, str] = {}
    families = {"note": notes, "xxh3_64": checksums, "dtype": dtypes}
    for name, value in strings.items():
        family, separator, rest = name.partition(":")
        target = families.get(family, fields) if separator else fields
        target[rest if separator and target is not fields else name] = value
    expected = {"format", "xxh3_64", "stream", "token", *_NUMBERS}
    if missing := sorted(expected - fields.keys()):
        raise ValueError(f"its metadata lacks {missing[0]!r}")
    for value in (fields[name] for name in _NUMBERS):
        if not re.fullmatch(_INTEGER, value):
            raise ValueError(f"its metadata has {value[:80]!r} for a number")
    numbers = {name: int(fields[name]) for name in _NUMBERS}
    stream = keys.Stream(fields["stream"])
    refers_to = keys.parse_reference(fields.get("refers_to", ""))
    metadata = ShardMetadata(stream=stream, **numbers, notes=notes, token=fields["token"], refers_to=refers_to)
    return metadata, checksums, dtypes


def read_extents(text: str, position: int, checksums: dict[str, str], dtypes: dict[str, str]) -> Iterator[Extent]:
    """The tensors in file order, each checked against the one before; takes what it uses from the two dicts."""
    seen: set[str] = set()
    stop = 0
    while match := _TENSOR.match(text, position):
        name, dtype = read_string(match[1]), match[2]
        shape = tuple(map(int, match[3].split(","))) if match[3] else ()
        if name in seen:
            raise ValueError(f"its header has the tensor {name[:80]!r} twice")
        if FILLING in seen:
            raise ValueError(f"its header has the tensor {name[:80]!r} behind what fills the end")
        if len(seen) == TENSORS_MAX:
            raise ValueError(f"it has over {TENSORS_MAX} tensors")
        seen.add(name)
        logical = dtypes.pop(name, None)
        if logical is not None:
            if logical not in STORED_AS or STORED_AS[logical] != (dtype, shape[-1] if shape else None):
                raise ValueError(f"tensor {name[:80]!r} cannot be {logical[:80]!r} stored as {dtype} {shape}")
            dtype, shape = logical, shape[:-1]
        elif dtype in STORED_AS:
            raise ValueError(f"tensor {name[:80]!r} has the dtype {dtype}, which files do not store as such")
        extent = Extent(TensorSpec(name, dtype, shape), int(match[4]), checksums.pop(name, None))
        check_extent(extent, stop, int(match[5]))
        stop = extent.stop
        position = match.end()
        yield extent
    if not _END.match(text, position):
        raise ValueError(f"its header is malformed at byte {LENGTH_NBYTES + position}")


def check_extent(extent: Extent, previous_stop: int, stop: int) -> None:
    name = extent.spec.name[:80]
    if extent.start != previous_stop or extent.stop != stop:
        raise ValueError(
            f"tensor {name!r} claims the bytes [{extent.start}, {stop}), and by its shape and its "
            f"predecessor has [{previous_stop}, {previous_stop + extent.spec.nbytes})"
        )
    if extent.is_padding != (extent.checksum is None):
        raise ValueError(f"tensor {name!r} is padding with a checksum, or has none")
    fits = extent.spec.dtype == "U8" and (extent.spec.nbytes < ALIGNMENT or name == FILLING)
    if extent.is_padding and not fits:
        raise ValueError(f"the padding {name!r} is not that of a writer")
    if extent.spec.name.startswith(OBJECT_PREFIX) and (extent.spec.dtype != "U8" or len(extent.spec.shape) != 1):
        raise ValueError(f"the packed object {name!r} is not a row of bytes")

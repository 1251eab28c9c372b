"""The shard file: one valid safetensors file, streamed out and verified on the way back.

Tensors lie contiguously, each at a multiple of 64 bytes from the file's start (the gaps are named U8 tensors,
since safetensors refuses holes). Host state is msgpack (:mod:`tiercheck.format.host_state`) in U8 tensors. The header
(:mod:`tiercheck.format.header`) comes first in the file and is written last, into room reserved for it, so that
tensors stream while objects are still being packed, and a half-written shard is never taken for a whole one.

Three ways in and out:

- :func:`payload` makes the buffers for a driver's ``put`` from tensors that are in memory already;
- :class:`ShardWriter` lays a shard out in memory that a tier has reserved, and hands out where tensors go;
- :func:`parse` verifies a shard's header and gives :class:`Shard`, whose tensors are views of the file's bytes,
  each verified when it is first asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck import keys
from tiercheck.errors import CapacityExceeded, Corruption
from tiercheck.format import header as shard_header
from tiercheck.format.checksums import RunningChecksum, checksum_of, copy_with_checksum
from tiercheck.format.header import (
    ALIGNMENT,
    DTYPES,
    LENGTH_NBYTES,
    OBJECT_PREFIX,
    Extent,
    HeaderTooLarge,
    ShardHeader,
    ShardMetadata,
    TensorSpec,
    decode_header,
    encode_header,
    encode_header_into,
    round_up,
)
from tiercheck.format.host_state import pack, unpack
from tiercheck.format.layout import ShardLayout, object_spec, tensor_spec
from tiercheck.format.parts import Digests, Part, checksums_of, parts_of
from tiercheck.format.recurring import Checksums, Recurring
from tiercheck.format.room import header_room
from tiercheck.types import Buffer

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "HeaderTooLarge",
    "PackedObject",
    "Recurring",
    "RunningChecksum",
    "Shard",
    "ShardHeader",
    "ShardMetadata",
    "ShardWriter",
    "TensorEntry",
    "TensorSpec",
    "Verification",
    "checksum_of",
    "copy_with_checksum",
    "header_length",
    "header_room",
    "parse",
    "parse_header",
    "payload",
    "shard_nbytes",
]

_ZEROS = bytes(ALIGNMENT)
FILLED_SHARE_MAX = 8
"""A shard is filled up if no more than an eighth of its memory is left."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's bytes: C-contiguous, little-endian, ``prod(shape) * DTYPES[dtype]`` of them.

    ``checksum`` (:func:`checksum_of`) is taken on trust where given, and computed where not.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer
    checksum: str | None = None

    def __post_init__(self) -> None:
        spec = self.spec
        object.__setattr__(self, "data", bytes_of(self.data))
        object.__setattr__(self, "shape", spec.shape)
        if spec.nbytes != len(self.data):
            raise ValueError(
                f"tensor {self.name!r} of {self.dtype} {list(self.shape)} has {spec.nbytes} bytes, "
                f"and its data {len(self.data)}"
            )

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)


@dataclass(frozen=True)
class PackedObject:
    """What :func:`tiercheck.format.host_state.pack` returned, on its way into a shard without being decoded.

    ``checksum`` is taken on trust where given, and computed where not.
    """

    data: Buffer
    checksum: str | None = None


def payload(
    metadata: ShardMetadata, tensors: Iterable[TensorEntry], objects: Mapping[str, object] | None = None
) -> list[Buffer]:
    """A shard as the buffers for :meth:`TierDriver.put`: header, tensors, padding between them, packed objects.

    The tensors' memory itself is handed through, neither joined nor copied: it must not change until the put
    has returned. Values of ``objects`` are packed, but for a :class:`PackedObject`, which is taken as it is.
    Errors: ``ValueError`` for a name that is reserved or there twice, :class:`HeaderTooLarge` for too much for one
    shard; :class:`tiercheck.format.host_state.Unstorable`.
    """
    layout = ShardLayout()
    checksums: dict[str, str] = {}
    buffers: list[Buffer] = []
    for entry in tensors:
        spec = tensor_spec(entry.name, entry.dtype, entry.shape)
        gap = layout.gap_before(spec)
        layout.append(spec, gap)
        checksums[entry.name] = entry.checksum or checksum_of(entry.data)
        buffers += [memoryview(_ZEROS)[:gap], entry.data]
    for name, value in (objects or {}).items():
        packed = packed_object(name, value)
        spec = object_spec(name, len(packed.data))
        extent = layout.append(spec, layout.gap_before(spec))
        checksums[extent.spec.name] = packed.checksum or checksum_of(packed.data)
        buffers.append(packed.data)
    header = encode_header(metadata, layout.with_checksums(checksums))
    return [header, *(buffer for buffer in buffers if len(buffer))]


def shard_nbytes(
    tensors: Iterable[TensorSpec],
    object_nbytes: Mapping[str, int] | None = None,
    notes: Mapping[str, str] | None = None,
) -> int:
    """Bytes to reserve for a whole shard, header room included: an upper bound for tensors of at most these
    shapes and objects that pack into at most ``object_nbytes`` (bytes by name), in any order."""
    specs = list(tensors)
    sizes = [spec.nbytes for spec in specs] + list((object_nbytes or {}).values())
    return header_room(specs, object_nbytes or {}, notes) + sum(round_up(nbytes) for nbytes in sizes)


class ShardWriter:
    """Lays a shard out in ``buffer``, writable memory that a tier has reserved.

    The first ``header_nbytes`` bytes (from :func:`header_room`) are kept for the header. Ask for a slot for each
    tensor, fill the slots in any order and from any thread, add objects, then ``finish``. Until then the
    buffer's beginning parses as no shard, whatever was in the memory before. One thread calls the methods.
    """

    def __init__(self, buffer: memoryview, header_nbytes: int) -> None:
        if buffer.readonly or buffer.format != "B" or not buffer.contiguous or buffer.ndim != 1:
            raise ValueError("a shard is written into writable contiguous memory of format 'B'")
        if header_nbytes % ALIGNMENT or header_nbytes <= 0:
            raise ValueError(f"the header's room is a positive multiple of {ALIGNMENT} bytes, not {header_nbytes}")
        if header_nbytes > len(buffer):
            raise CapacityExceeded(f"the header needs {header_nbytes} bytes, and {len(buffer)} are reserved")
        self._buffer = buffer
        self._header_nbytes = header_nbytes
        self._layout = ShardLayout()
        self._object_checksums: dict[str, str] = {}
        self._finished = False
        self._buffer[:LENGTH_NBYTES] = bytes(LENGTH_NBYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of the file so far, header room included."""
        return self._header_nbytes + self._layout.nbytes

    def move(self, buffer: memoryview) -> None:
        """Go on in other memory, of the same kind: what is filled so far is copied. Errors: ``CapacityExceeded`` if
        that is too short."""
        self._check_open()
        if self.nbytes > len(buffer):
            raise CapacityExceeded(f"the shard has {self.nbytes} bytes so far, and {len(buffer)} are reserved")
        buffer[: self.nbytes] = self._buffer[: self.nbytes]
        self._buffer = buffer

    def slot(self, name: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        """The writable bytes of the next tensor; fill them before ``finish``.

        Errors: ``ValueError`` for a name that is reserved or there twice; ``CapacityExceeded`` if the
        reservation ends first. Either leaves the writer as it was.
        """
        return self._place(tensor_spec(name, dtype, shape))

    def recurring(self, tensors: Recurring, stamp: str) -> memoryview:
        """The writable bytes of all these tensors, which come first; fill them before ``finish``, but for the gaps
        between them. ``stamp``: the version, which their names begin with.

        Errors: ``ValueError`` if something was placed; ``CapacityExceeded``. Either leaves the writer as it was.
        """
        self._check_open()
        if self._layout.nbytes or self._layout.leading is not None:
            raise ValueError("tensors that recur are placed first, and once")
        self.check_room(self._header_nbytes + tensors.nbytes, "the tensors that recur")
        self._layout = ShardLayout(tensors, stamp)
        memory = self._buffer[self._header_nbytes : self.nbytes]
        tensors.clear_gaps(memory)
        return memory

    def add_object(self, name: str, value: object) -> None:
        """Pack ``value`` (a :class:`PackedObject` is taken as it is) behind what is there.

        Errors: :class:`tiercheck.format.host_state.Unstorable`, and those of :meth:`slot`.
        """
        packed = packed_object(name, value)
        spec = object_spec(name, len(packed.data))
        self._place(spec)[:] = packed.data
        self._object_checksums[spec.name] = packed.checksum or checksum_of(packed.data)

    def nbytes_with(self, tensors: Iterable[TensorSpec], objects: Mapping[str, PackedObject]) -> int:
        """Bytes of the file, at most, when these have been placed, too."""
        specs = [*tensors, *(object_spec(name, len(each.data)) for name, each in objects.items())]
        return round_up(self.nbytes) + sum(round_up(spec.nbytes) for spec in specs)

    def check_room(self, nbytes: int, what: str) -> None:
        """Errors: ``CapacityExceeded`` if the memory is shorter than a file of so many bytes."""
        if nbytes > len(self._buffer):
            raise CapacityExceeded(
                f"with {what} the shard takes {nbytes} bytes, and {len(self._buffer)} are reserved for it: "
                "compute the reservation with shard_nbytes over all it holds"
            )

    def fill(self) -> None:
        """Nothing more comes: pad the shard with zeros, so that it is as long as its memory. Unless that is much longer
        (:data:`FILLED_SHARE_MAX`). A tier need not cut the memory then, which matters if it is page-locked."""
        self._check_open()
        left = len(self._buffer) - self.nbytes
        if 0 < left <= len(self._buffer) // FILLED_SHARE_MAX:
            self._buffer[self.nbytes :] = bytes(left)
            self._layout.fill(left)

    def finish(
        self,
        metadata: ShardMetadata,
        *,
        checksums: Mapping[str, str] | None = None,
        recurring: Checksums = (),
        threads: int = 1,
    ) -> int:
        """Write the header; the file is the first so many bytes of the buffer. ``threads``: that compute checksums.

        Checksums of tensors (:func:`checksum_of`, by name) are taken on trust from ``checksums``,
        and computed where it has none; those of the tensors that recur, as numbers, from ``recurring``. The length
        bytes, without which nothing parses, are written last.
        Errors: ``ValueError`` if the header passes its room, or a checksum is of no tensor; the shard can
        then still be finished properly.
        """
        self._check_open()
        tensors = {extent.spec.name: extent for extent in self._layout.tensors()}
        known = {**(checksums or {}), **self._object_checksums}
        for name in known.keys() - tensors.keys():
            raise ValueError(f"a checksum was given for {name!r}, which is no tensor of the shard")
        unknown = [extent for name, extent in tensors.items() if name not in known]
        known |= checksums_of(unknown, self._view, threads)
        leading = self._layout.leading
        texts = (b"", b"") if leading is None else leading.texts(self._layout.stamp, recurring)
        extents = self._layout.with_checksums(known)
        encode_header_into(self._buffer[: self._header_nbytes], metadata, extents, recurring=texts)
        self._finished = True
        return self.nbytes

    def _place(self, spec: TensorSpec) -> memoryview:
        self._check_open()
        start, gap = self.nbytes, self._layout.gap_before(spec)
        self.check_room(start + gap + spec.nbytes, repr(spec.name))
        extent = self._layout.append(spec, gap)
        self._buffer[start : start + gap] = _ZEROS[:gap]
        return self._view(extent)

    def _view(self, extent: Extent) -> memoryview:
        return self._buffer[self._header_nbytes + extent.start : self._header_nbytes + extent.stop]

    def _check_open(self) -> None:
        if self._finished:
            raise ValueError("the shard is finished; nothing can be added to it")


class Shard:
    """A shard whose header was verified by :func:`parse`. Its tensors are views of the buffer that was parsed."""

    is_given = False
    """Whether the memory of the tensors is nobody else's, so that whoever reads them may keep it."""

    def __init__(self, header: ShardHeader, buffer: memoryview, *, key: str | None, tier: str | None) -> None:
        self.metadata = header.metadata
        self.key = key
        self.tier = tier
        self._header = header
        self._buffer = buffer
        self._verified: set[str] = set()
        named = {extent.spec.name: extent for extent in header.extents if not extent.is_padding}
        self._tensors = {name: extent for name, extent in named.items() if not name.startswith(OBJECT_PREFIX)}
        self._objects = {
            name[len(OBJECT_PREFIX) :]: extent for name, extent in named.items() if name not in self._tensors
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._header.file_nbytes

    @property
    def header(self) -> ShardHeader:
        return self._header

    @property
    def digest(self) -> str:
        """The checksum of the header: the header holds the checksum of every tensor, so two
        shards of one digest are the same."""
        return checksum_of(self.beginning)

    @property
    def beginning(self) -> memoryview:
        """The bytes of the header."""
        return self._buffer[: self._header.nbytes]

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names in file order, neither padding nor packed objects among them."""
        return tuple(self._tensors)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors' names, dtypes and shapes in file order."""
        return tuple(extent.spec for extent in self._tensors.values())

    @property
    def object_names(self) -> tuple[str, ...]:
        return tuple(self._objects)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def entry(self, name: str) -> TensorEntry:
        """The tensor, its bytes verified (once) against their checksum. Errors: ``KeyError``; ``Corruption``."""
        extent = self._tensors[name]
        self._verify(extent, f"the tensor {name!r}")
        return self._entry(extent)

    def entries(self) -> Iterator[TensorEntry]:
        """Every tensor in file order, verified as by :meth:`entry`."""
        return map(self.entry, self._tensors)

    def raw_entries(self) -> Iterator[TensorEntry]:
        """Every tensor in file order, **unverified**, with the checksum the header gives.

        For merging shards without hashing again: what was damaged before stays detectable afterwards.
        """
        return map(self._entry, self._tensors.values())

    def object(self, name: str) -> Any:
        """The host object, verified, then unpacked. Errors: ``KeyError``; ``Corruption``."""
        extent = self._objects[name]
        self._verify(extent, f"the packed object {name!r}")
        try:
            return unpack(self._view(extent))
        except Corruption as error:
            message = f"the packed object {name!r} cannot be read: {error.message}"
            raise Corruption(message, tier=self.tier, key=self.key) from error

    @property
    def objects(self) -> dict[str, Any]:
        """Every host object by name, verified and unpacked anew. Errors: ``Corruption``."""
        return {name: self.object(name) for name in self._objects}

    def raw_objects(self) -> dict[str, PackedObject]:
        """Every host object as it lies in the file, **unverified**, with the checksum the header gives."""
        return {name: PackedObject(self._view(extent), extent.checksum) for name, extent in self._objects.items()}

    def verify(self) -> None:
        """Check every byte, padding included; raise ``Corruption`` naming the first tensor that fails."""
        verification = Verification(self)
        for part in verification.parts:
            verification.hash(part)
        verification.finish()

    def accept(self, found: Callable[[Extent], str]) -> None:
        """Take every tensor for verified. ``found``: the checksum of the bytes of each that was not. Errors:
        ``Corruption`` naming the first one that fails."""
        for told, extents in (("the tensor", self._tensors), ("the packed object", self._objects)):
            for name, extent in extents.items():
                if extent.spec.name not in self._verified:
                    self._check(extent, found(extent), f"{told} {name!r}")
        for extent in self._header.extents:
            if extent.is_padding and self._view(extent) != bytes(extent.spec.nbytes):
                message = f"the padding {extent.spec.name!r} is not zeros"
                raise Corruption(message, tier=self.tier, key=self.key)

    def _verify(self, extent: Extent, what: str) -> None:
        if extent.spec.name not in self._verified:
            self._check(extent, checksum_of(self._view(extent)), what)

    def _check(self, extent: Extent, found: str, what: str) -> None:
        if found != extent.checksum:
            message = (
                f"{what} fails its checksum (its bytes have {found}, the header says {extent.checksum}): "
                "restore it from another copy"
            )
            raise Corruption(message, tier=self.tier, key=self.key)
        self._verified.add(extent.spec.name)

    def _view(self, extent: Extent) -> memoryview:
        return self._buffer[self._header.nbytes + extent.start : self._header.nbytes + extent.stop]

    def _entry(self, extent: Extent) -> TensorEntry:
        spec = extent.spec
        return TensorEntry(spec.name, spec.dtype, spec.shape, self._view(extent), extent.checksum)


class Verification:
    """Every byte of a shard checked in parts, which several threads may take: :meth:`hash` each of :attr:`parts` once,
    in any order, then :meth:`finish`."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        kept = shard._verified
        held = [extent for extent in shard.header.extents if not extent.is_padding and extent.spec.name not in kept]
        self.parts = parts_of(held)
        self._digests = Digests(held)

    def hash(self, part: Part) -> None:
        """In any thread."""
        for extent, block in part:
            self._digests.take(extent, block, self._shard._view(extent))

    def finish(self) -> None:
        """Errors: ``Corruption`` naming the first tensor that fails."""
        self._shard.accept(self._digests.checksum)


def parse(buffer: Buffer, *, key: str | None = None, tier: str | None = None) -> Shard:
    """The shard in ``buffer``, exactly one file; nothing is copied, and only the header is verified yet.

    ``key`` and ``tier`` say in messages where the bytes came from. A ``key`` in TierCheck's naming must be that
    of the shard inside. Errors: ``Corruption`` for anything that a TierCheck writer did not write whole.
    """
    view = bytes_of(buffer)
    return Shard(parse_header(view, len(view), key=key, tier=tier), view, key=key, tier=tier)


def parse_header(buffer: Buffer, file_nbytes: int, *, key: str | None = None, tier: str | None = None) -> ShardHeader:
    """The verified header of a file of ``file_nbytes``, of which ``buffer`` is the beginning.

    For looking into a shard, or fetching some of its tensors, without fetching the rest: how long the beginning
    must be, :func:`header_length` tells from the first eight bytes. ``key``, ``tier``, errors: as for :func:`parse`.
    """
    try:
        header = decode_header(bytes_of(buffer), file_nbytes)
    except ValueError as error:
        raise Corruption(f"this is no whole shard: {error}", tier=tier, key=key) from error
    named = keys.parse(key) if key is not None else None
    if named is not None and named != header.metadata.key:
        raise Corruption(f"the shard under this key is another, {str(header.metadata.key)!r}", tier=tier, key=key)
    return header


def header_length(beginning: Buffer, *, key: str | None = None, tier: str | None = None) -> int:
    """Bytes of a shard's header, from the first eight bytes of the file or more. Errors: ``Corruption``."""
    try:
        return shard_header.header_length(bytes_of(beginning))
    except ValueError as error:
        raise Corruption(f"this is no whole shard: {error}", tier=tier, key=key) from error


def packed_object(name: str, value: object) -> PackedObject:
    if isinstance(value, PackedObject):
        return PackedObject(bytes_of(value.data), value.checksum)
    return PackedObject(pack(value, name=name))


def bytes_of(data: Buffer) -> memoryview:
    """``data`` as a flat view of bytes, without a copy; ``ValueError`` if it is not C-contiguous."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("a tensor's data must be C-contiguous")
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if math.prod(view.shape or (1,)) else memoryview(b"")

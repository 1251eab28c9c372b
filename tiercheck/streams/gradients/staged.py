"""Gradients on a device, on their way into host memory while training goes on.

What the optimizer's step waits for, by an event, is a pass on the device: gradients are encoded, or copied as they are,
into a ring of chunks that was allocated beforehand. A chunk then goes to host memory by one copy, by another stream,
and may be filled again when that has ended. If the ring holds all of a record, the step waits for nothing else.

A gradient goes to one of two places:

- **into the record itself**, in pinned memory of the first tier, if what is stored of it has a length that is known
  beforehand: as it is (``exact``); as the bf16 numbers that mixed precision has computed before it widened and scaled
  them; or as the codes of a block codec (``int8``, ``nf4``, ``onebit``; with feedback, if the device keeps the
  residuals). Kernels make them on the device. If the tier's memory is not pinned, they go by way of pinned host memory;
- **into pinned host memory** as it is, from where it is encoded when the record is closed, beside training: for every
  other codec; and for fp32 gradients that ``exact`` is expected to store as fp16.

That fp32 gradients are bf16 numbers times one scale is believed of those of which the provider says so
(:meth:`~tiercheck.streams.tensors.provider.StateProvider.gradient_dtypes`), and checked: if a single value is not given
back, the record is none. From then on these gradients are copied as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tiercheck.format.header import round_up
from tiercheck.streams.codecs import Part
from tiercheck.streams.codecs.blocks import BlockCodec
from tiercheck.streams.device.protocol import Device, Event
from tiercheck.streams.tensors.as_bytes import NAMES
from tiercheck.types import bytes_text

__all__ = ["CHUNK_NBYTES", "Flight", "HostMemory", "Landing", "Ring", "Staged", "parts_of"]

log = logging.getLogger(__name__)

CHUNK_NBYTES = 16 << 20
"""Of the ring; between two copies of so many bytes the device serves other streams."""
CHUNKS_MIN = 2
"""One is filled while another one is copied."""
CHUNK_NBYTES_MIN = 4096


@dataclass(frozen=True)
class Landing:
    """Where one tensor goes: each of its parts begins so many bytes after the beginning of the target."""

    tensor: torch.Tensor
    parts: tuple[int, ...]
    codec: BlockCodec | None = None
    """``None``: it is copied as it is, or narrowed."""
    found: torch.Tensor | None = None
    """What :meth:`Device.find_scale` has written, if it is narrowed to bf16."""
    residual: torch.Tensor | None = None
    """What the codec has not given back of those before, if the device keeps that: fp32, 1-D."""

    def nbytes(self, elements: int) -> tuple[int, ...]:
        """Of each part, for so many elements from a block's beginning on."""
        if self.found is not None:
            return (elements * torch.bfloat16.itemsize,)
        if self.codec is None:
            return (elements * self.tensor.element_size(),)
        return tuple(part.nbytes for part in self.codec.parts(elements))

    @property
    def block(self) -> int:
        """Elements that are not parted."""
        return 1 if self.codec is None else self.codec.block


@dataclass(frozen=True)
class Piece:
    """Some elements of a tensor, and where their parts lie in the chunk."""

    landing: Landing
    start: int
    stop: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """From the chunk to the target."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class Chunk:
    pieces: tuple[Piece, ...]
    copies: tuple[Copy, ...]
    gaps: tuple[tuple[int, int], ...]
    """What these copies write to the target beside the parts: first byte and end."""


@dataclass(frozen=True)
class Flight:
    """Tensors on their way to host memory."""

    ended: Event
    gaps: tuple[tuple[int, int], ...]

    def land(self, target: torch.Tensor) -> None:
        """Wait for them, and clear what was written between them."""
        self.ended.wait()
        for start, stop in self.gaps:
            target[start:stop] = 0


class Ring:
    """Memory of the device that all records of a rank go through. Training's thread uses it."""

    def __init__(self, device: Device, nbytes_max: int, record_nbytes: int) -> None:
        """``nbytes_max``: what it may take; ``record_nbytes``: more than a record has, and another chunk, is of no use.
        Errors: ``CapacityExceeded`` if the device lacks the memory."""
        self.chunk_nbytes = min(CHUNK_NBYTES, max(CHUNK_NBYTES_MIN, round_up(record_nbytes)))
        most = max(CHUNKS_MIN, nbytes_max // self.chunk_nbytes)
        self._count = min(most, max(CHUNKS_MIN, -(-record_nbytes // self.chunk_nbytes) + 1))
        self._device = device
        self._memory = device.memory(self.nbytes, "to stage gradients in: lower gpu_staging_bytes")
        self._encoding = device.side("gradients")
        self._copying = device.side("copies")
        self._emptied: list[Event | None] = [None] * self._count
        self._next = 0

    @property
    def nbytes(self) -> int:
        return self._count * self.chunk_nbytes

    def send(
        self, landings: Sequence[Landing], target: torch.Tensor, first: Callable[[], None] | None = None
    ) -> Flight:
        """Put the tensors on their way to ``target``, which the caller keeps until they have landed. They may be
        written to by what the calling thread puts into its current stream from now on, and freed by whoever may free
        them when the optimizer, which steps in that stream, has read them. ``first``: what the device does before."""
        current = self._device.current()
        self._encoding.wait(current.record())
        if first is not None:
            self._encoding.run(first)
        gaps: list[tuple[int, int]] = []
        for chunk in chunks_of(landings, self.chunk_nbytes):
            place, self._next = self._next, (self._next + 1) % self._count
            memory = self._memory[place * self.chunk_nbytes : (place + 1) * self.chunk_nbytes]
            if (emptied := self._emptied[place]) is not None:
                self._encoding.wait(emptied)
            self._encoding.run(partial(fill, chunk.pieces, memory, self._device))
            self._copying.wait(self._encoding.record())
            self._copying.run(partial(copy_out, chunk.copies, memory, target))
            self._emptied[place] = self._copying.record()
            gaps += chunk.gaps
        current.wait(self._encoding.record())
        return Flight(self._copying.record(), tuple(gaps))


def chunks_of(landings: Sequence[Landing], chunk_nbytes: int) -> Iterator[Chunk]:
    """The tensors, in order, in as few chunks as hold them."""
    pieces: list[Piece] = []
    at = 0
    for landing in landings:
        start, size = 0, landing.tensor.numel()
        while start < size:
            stop = fitting(landing, start, size, chunk_nbytes - at)
            if stop == start:
                yield chunk_made_of(pieces)
                pieces, at = [], 0
                continue
            places = []
            for nbytes in landing.nbytes(stop - start):
                places.append(at)
                at += round_up(nbytes)
            pieces.append(Piece(landing, start, stop, tuple(places)))
            start = stop
    if pieces:
        yield chunk_made_of(pieces)


def fitting(landing: Landing, start: int, size: int, room: int) -> int:
    """The end of those elements from ``start`` on whose parts fit into the room."""

    def taken(elements: int) -> int:
        return sum(map(round_up, landing.nbytes(elements)))

    if taken(size - start) <= room:
        return size
    blocks = room // max(1, sum(landing.nbytes(landing.block)))
    while blocks > 0 and taken(blocks * landing.block) > room:
        blocks -= 1 + blocks // 1024
    return start + max(0, blocks) * landing.block


def chunk_made_of(pieces: Sequence[Piece]) -> Chunk:
    """Parts that lie behind one another in the chunk as in the target are copied together."""
    parts = [
        Copy(place, begin + before, nbytes)
        for piece in pieces
        for place, begin, before, nbytes in zip(
            piece.places,
            piece.landing.parts,
            piece.landing.nbytes(piece.start),
            piece.landing.nbytes(piece.stop - piece.start),
            strict=True,
        )
    ]
    copies: list[Copy] = []
    gaps: list[tuple[int, int]] = []
    for part in parts:
        last = copies[-1] if copies else None
        if last is not None and part.target - last.target == part.source - last.source:
            if (end := last.target + last.nbytes) < part.target:
                gaps.append((end, part.target))
            copies[-1] = Copy(last.source, last.target, part.source + part.nbytes - last.source)
        else:
            copies.append(part)
    return Chunk(tuple(pieces), tuple(copies), tuple(gaps))


def fill(pieces: Sequence[Piece], memory: torch.Tensor, device: Device) -> None:
    """On the device: what is stored of the pieces goes into the chunk."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for piece in pieces:
        landing = piece.landing
        values = landing.tensor.detach().reshape(-1)[piece.start : piece.stop]
        places = [
            memory[at : at + nbytes]
            for at, nbytes in zip(piece.places, landing.nbytes(piece.stop - piece.start), strict=True)
        ]
        if landing.found is not None:
            device.narrow(values, landing.found, places[0])
        elif landing.codec is None:
            targets.append(places[0].view(values.dtype))
            sources.append(values)
        else:
            codes, scales = places
            kept = None if landing.residual is None else landing.residual[piece.start : piece.stop]
            device.quantise(landing.codec.name, values.contiguous(), codes, scales, kept)
    if targets:
        torch._foreach_copy_(targets, sources)


def copy_out(copies: Sequence[Copy], memory: torch.Tensor, target: torch.Tensor) -> None:
    for each in copies:
        into = target[each.target : each.target + each.nbytes]
        into.copy_(memory[each.source : each.source + each.nbytes], non_blocking=True)


class Staged:
    """The gradients of one record. Training's thread sends them, and another one takes what has landed."""

    def __init__(
        self, ring: Ring, hosts: HostMemory, memory: memoryview, *, pinned: Callable[[torch.Tensor], bool]
    ) -> None:
        """``memory``: of the record."""
        self._ring = ring
        self._hosts = hosts
        self._record = whole(memory)
        self._pinned = pinned
        self.is_pinned = pinned(self._record)
        self._flights: list[tuple[Flight, torch.Tensor]] = []
        self._due: list[tuple[torch.Tensor, int]] = []
        """Parts of the record that land in pinned memory, and where they begin in the record."""
        self._borrowed: list[torch.Tensor] = []
        self.host: dict[str, torch.Tensor] = {}
        """What lands in host memory as it is, by name."""

    def target(self, nbytes: int) -> torch.Tensor:
        """Where parts of so many bytes are to land: the record if it is pinned, else memory that is. Errors:
        ``CapacityExceeded``."""
        if self.is_pinned or not nbytes:
            return self._record
        host = self._hosts.borrow(nbytes)
        self._borrowed.append(host)
        return host

    def send(self, landings: Sequence[Landing], target: torch.Tensor, first: Callable[[], None] | None = None) -> None:
        """Into the record, in which their parts lie behind one another, by way of ``target`` if that is other
        memory."""
        if target is not self._record:
            parts = [
                (at, nbytes)
                for each in landings
                for at, nbytes in zip(each.parts, each.nbytes(each.tensor.numel()), strict=True)
            ]
            start = min(at for at, _ in parts)
            self._due += [(target[at - start : at - start + nbytes], at) for at, nbytes in parts]
            landings = [replace(each, parts=tuple(at - start for at in each.parts)) for each in landings]
        self._flights.append((self._ring.send(landings, target, first), target))

    def send_to_host(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Into pinned host memory. Errors: ``CapacityExceeded``."""
        starts: dict[str, int] = {}
        at = 0
        for name, tensor in tensors.items():
            starts[name] = at
            at += round_up(tensor.numel() * tensor.element_size())
        host = self._hosts.borrow(at)
        self._borrowed.append(host)
        landings = [Landing(tensor, (starts[name],)) for name, tensor in tensors.items()]
        self._flights.append((self._ring.send(landings, host), host))
        for name, tensor in tensors.items():
            nbytes = tensor.numel() * tensor.element_size()
            held = host[starts[name] : starts[name] + nbytes]
            self.host[name] = held.view(tensor.dtype).view(tensor.shape)

    def land(self) -> None:
        """Wait until everything is where it was sent. Idempotent."""
        flights, self._flights = self._flights, []
        for flight, target in flights:
            flight.land(target)
        due, self._due = self._due, []
        for part, start in due:
            self._record[start : start + part.numel()].copy_(part)

    def moved(self, memory: memoryview) -> None:
        """The record goes on in other memory, and what has landed was copied there."""
        self._record = whole(memory)
        self.is_pinned = self._pinned(self._record)

    def close(self) -> None:
        """Everything has landed, and was taken. Idempotent."""
        self.host.clear()
        self._due.clear()
        for each in self._borrowed:
            self._hosts.give_back(each)
        self._borrowed.clear()
        self._record = torch.empty(0)  # the tier reuses the memory only when nobody has a view of it


class HostMemory:
    """Pinned memory that records in flight borrow: as much as their gradients have, for each of them at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []

    def borrow(self, nbytes: int) -> torch.Tensor:
        """Errors: ``CapacityExceeded``."""
        for each in list(self._free):
            self._free.remove(each)
            if each.numel() >= nbytes:
                return each
        log.info("%s of pinned host memory for gradients of %s", bytes_text(nbytes), self._device.name)
        return self._device.pinned(nbytes)

    def give_back(self, memory: torch.Tensor) -> None:
        self._free.append(memory)


def whole(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def parts_of(tensor: torch.Tensor, codec: BlockCodec | None, *, narrowed: bool) -> tuple[Part, ...]:
    """What the device makes of a gradient: codes, bf16 numbers, or its own."""
    if codec is not None:
        return codec.parts(tensor.numel())
    return (Part("", "BF16" if narrowed else NAMES[tensor.dtype], tuple(tensor.shape)),)

"""Gradients on a device, on their way into host memory while training goes on.

What the optimizer's step waits for, by an event, is a pass on the device: gradients are encoded, or copied as they are,
into a ring of chunks that was allocated beforehand. A chunk then goes to host memory by another stream, and may be
filled again when that has ended. If the ring holds all of a record, the step waits for nothing else, and the copies may
begin later (:mod:`tiercheck.streams.device.gate`).

A gradient goes to one of two places:

- **into the record itself**, in pinned memory of the first tier, if what is stored of it has a length that is known
  beforehand: as it is (``exact``); as the bf16 numbers that mixed precision has computed before it widened and scaled
  them; or as the codes of a block codec (``int8``, ``nf4``, ``onebit``; with feedback, if the device keeps the
  residuals). Kernels make them on the device. If the tier's memory is not pinned, they go by way of pinned host memory;
- **into pinned host memory** as it is, from where it is encoded when the record is closed, beside training: for every
  other codec; and for fp32 gradients that ``exact`` is expected to store as fp16. Of ``sparse``, what the device has
  chosen comes there (:mod:`tiercheck.streams.gradients.compaction`).

That fp32 gradients are bf16 numbers times one scale is believed of those of which the provider says so
(:meth:`~tiercheck.streams.tensors.provider.StateProvider.gradient_dtypes`), and checked: if a single value is not given
back, the record is none. From then on these gradients are copied as they are.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from tiercheck.format.header import ALIGNMENT, round_up
from tiercheck.streams.codecs.blocks import BlockCodec
from tiercheck.streams.device.gate import Gate
from tiercheck.streams.device.protocol import Device, Event, Stream
from tiercheck.streams.gradients.compaction import Compaction
from tiercheck.streams.gradients.routes import Chunk, Copy, Landing, Piece, Route, route_of
from tiercheck.types import bytes_text

__all__ = ["CHUNKS_MIN", "CHUNK_NBYTES", "Flight", "HostMemory", "Ring", "Sending", "Staged", "evict", "nbytes_beside"]

log = logging.getLogger(__name__)

CHUNK_NBYTES = 256 << 20
"""Of the ring, at most. To fill a chunk takes the host 0.3 ms."""
CHUNK_NBYTES_USUAL = 16 << 20
"""A chunk is longer if a record then has more of them than :data:`CHUNKS_USUAL`."""
CHUNKS_USUAL = 8
CHUNKS_MIN = 2
"""One is filled while another one is copied."""
CHUNK_NBYTES_MIN = 4096
KEPT_MAX = 1024
"""What was worked out for a call is kept for so many calls: some frameworks bring each layer by itself."""


@dataclass(frozen=True)
class Sending:
    """Tensors, in the order of the route's landings, and what the device needs besides to make their parts."""

    route: Route
    tensors: Sequence[torch.Tensor]
    found: torch.Tensor | None = None
    """What :meth:`Device.find_scale` has written, if some are narrowed."""
    residuals: Sequence[torch.Tensor | None] = ()
    """What the codec has not given back of those before, if the device keeps that: fp32, 1-D."""
    first: Callable[[], None] | None = None
    """What the device does before."""
    seed: int = 0
    """Of a codec that draws samples."""


@dataclass
class Region:
    """Bytes of the ring."""

    start: int
    stop: int
    emptied: Event | None = None
    """When what was there was copied; ``None``: it has not departed."""


@dataclass(frozen=True)
class Filling:
    """A chunk at its place in the ring. What is copied there as it is comes first, all of it by one operation."""

    start: int
    stop: int
    plain: tuple[Piece, ...]
    targets: list[torch.Tensor]
    encoded: tuple[tuple[Piece, tuple[torch.Tensor, ...]], ...]
    copies: tuple[tuple[torch.Tensor, Copy], ...]

    def fill(self, sending: Sending, device: Device) -> None:
        """On the device: what is stored of the pieces goes into the chunk."""
        if self.plain:
            sources = [values_of(piece, sending.tensors[piece.index]) for piece in self.plain]
            torch._foreach_copy_(self.targets, sources)
        for piece, places in self.encoded:
            values = sending.tensors[piece.index].detach().reshape(-1)[piece.start : piece.stop]
            residual = sending.residuals[piece.index] if sending.residuals else None
            kept = None if residual is None else residual[piece.start : piece.stop]
            codec = piece.landing.codec
            if isinstance(codec, Compaction):
                codec.encode(values.contiguous(), sending.seed, places, kept)
            elif isinstance(codec, BlockCodec):
                codes, scales = places
                device.quantise(codec.name, values.contiguous(), codes, scales, kept)
            else:
                assert sending.found is not None
                device.narrow(values, sending.found, places[0])

    def copy_out(self, target: torch.Tensor) -> None:
        for source, each in self.copies:
            target[each.target : each.target + each.nbytes].copy_(source, non_blocking=True)


class Flight:
    """Tensors on their way to ``target``. Any thread may call :meth:`depart`."""

    def __init__(self, route: Route, target: torch.Tensor, copying: Stream) -> None:
        self._route = route
        self._target = target
        self._copying = copying
        self._filled: deque[tuple[Filling, Region, Event]] = deque()
        """Chunks that are not on their way yet, where they lie, and when they are filled."""
        self._ended: Event | None = None
        self._lock = threading.Lock()

    @property
    def waits(self) -> bool:
        """Whether some of it has not departed."""
        return bool(self._filled)

    def take(self, filling: Filling, region: Region, filled: Event) -> None:
        self._filled.append((filling, region, filled))

    def depart(self) -> None:
        """Put the copies of what was taken into their stream. What could not be put there remains."""
        with self._lock:
            while self._filled:
                filling, region, filled = self._filled[0]
                self._copying.wait(filled)
                self._copying.run(partial(filling.copy_out, self._target))
                region.emptied = self._ended = self._copying.record()
                self._filled.popleft()

    def land(self) -> None:
        """Wait for the tensors, and clear what was written between them."""
        self.depart()
        if self._ended is not None:
            self._ended.wait()
        self._target.numpy()[self._route.gaps] = 0
        self._target = torch.empty(0)  # the tier reuses the memory only when nobody has a view of it


def values_of(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    return values if piece.is_whole else values.reshape(-1)[piece.start : piece.stop]


class Ring:
    """Memory of the device that all records of a rank go through. Training's thread uses it."""

    def __init__(
        self, device: Device, nbytes_max: int, record_nbytes: int, gate: Gate | None = None, chunk_nbytes_least: int = 0
    ) -> None:
        """``nbytes_max``: what it may take; ``record_nbytes``: more than a record has, and another chunk, is of no use.
        ``gate``: what copies wait for, if the ring holds all of a record. ``chunk_nbytes_least``: what is not parted is
        as long. Errors: ``CapacityExceeded`` if the device lacks the memory."""
        usual = max(CHUNK_NBYTES_USUAL, min(record_nbytes, nbytes_max) // CHUNKS_USUAL)
        most = min(CHUNK_NBYTES, usual, record_nbytes, nbytes_max // CHUNKS_MIN)
        self.chunk_nbytes = max(CHUNK_NBYTES_MIN, round_up(most), round_up(chunk_nbytes_least))
        needed = (-(-record_nbytes // self.chunk_nbytes) + 1) * self.chunk_nbytes
        self.nbytes = max(CHUNKS_MIN * self.chunk_nbytes, min(needed, nbytes_max // ALIGNMENT * ALIGNMENT))
        self._device = device
        self._memory = device.memory(self.nbytes, "to stage gradients in: lower gpu_staging_bytes")
        self._encoding = device.side("gradients")
        self._copying = device.side("copies")
        self._gate = gate
        self._at = 0
        """Where the next chunk begins, if there is room behind."""
        self._regions: list[Region] = []
        """That may hold what is not copied yet."""
        self._flights: list[Flight] = []
        """Of the record that is being sent."""
        self._fillings: dict[tuple[Route, int], tuple[Filling, ...]] = {}
        """By route, and where the first chunk begins. A record's tensors go where those of the record before went."""
        self._routes_to_host: dict[tuple[tuple[torch.Size, torch.dtype], ...], Route] = {}

    def route_to_host(self, tensors: Sequence[torch.Tensor]) -> Route:
        """As they are, each on a line of its own."""
        key = tuple((each.shape, each.dtype) for each in tensors)
        if (known := self._routes_to_host.get(key)) is None:
            evict(self._routes_to_host)
            starts = accumulate((round_up(each.nbytes) for each in tensors), initial=0)
            landings = [Landing(*each, (start,)) for each, start in zip(key, starts, strict=False)]
            known = self._routes_to_host[key] = route_of(landings, self.chunk_nbytes)
        return known

    def begin(self) -> None:
        """What is sent next is a record's."""
        for each in self._flights:
            each.depart()
        self._flights.clear()
        self._at = 0

    def wait_for_gate(self) -> None:
        """In the thread in which what was sent is to depart."""
        if self._gate is not None:
            self._gate.wait()

    def send(self, sending: Sending, target: torch.Tensor) -> Flight:
        """Put the tensors on their way to ``target``, which the caller keeps until they have landed. They may be
        written to by what the calling thread puts into its current stream from now on, and freed by whoever may free
        them when the optimizer, which steps in that stream, has read them."""
        current = self._device.current()
        self._encoding.wait(current.record())
        if sending.first is not None:
            self._encoding.run(sending.first)
        flight = Flight(sending.route, target, self._copying)
        self._flights.append(flight)
        fillings = self._fillings_of(sending.route)
        at_once = self._gate is None or not self._gate.closes or not self._has_room(sending.route)
        for filling in fillings:
            if at_once:
                for each in self._flights:
                    each.depart()  # what was sent of the record before lies in the ring, too
            region = self._claimed(filling)
            self._encoding.run(partial(filling.fill, sending, self._device))
            flight.take(filling, region, self._encoding.record())
            self._at = round_up(filling.stop)
        if at_once:
            flight.depart()
        current.wait(self._encoding.record())
        return flight

    def _has_room(self, route: Route) -> bool:
        """Behind what was sent of the record before."""
        return self._at + sum(round_up(chunk.nbytes) for chunk in route.chunks) <= self.nbytes

    def _claimed(self, filling: Filling) -> Region:
        """The region of the ring, when what was there has gone."""
        claimed, kept = Region(filling.start, filling.stop), list[Region]()
        for each in self._regions:
            if each.stop <= claimed.start or claimed.stop <= each.start:
                kept.append(each)
            else:
                assert each.emptied is not None, "it has departed"
                self._encoding.wait(each.emptied)
        self._regions = [*kept, claimed]
        return claimed

    def _fillings_of(self, route: Route) -> tuple[Filling, ...]:
        key = route, self._at
        if (known := self._fillings.get(key)) is None:
            evict(self._fillings)
            made: list[Filling] = []
            at = self._at
            for chunk in route.chunks:
                start = at if at + chunk.nbytes <= self.nbytes else 0
                made.append(filling_of(chunk, self._memory, start))
                at = round_up(start + chunk.nbytes)
            known = self._fillings[key] = tuple(made)
        return known


def filling_of(chunk: Chunk, ring: torch.Tensor, start: int) -> Filling:
    memory = ring[start : start + chunk.nbytes]
    plain = tuple(piece for piece in chunk.pieces if piece.landing.is_plain)
    encoded = tuple((piece, places_of(piece, memory)) for piece in chunk.pieces if not piece.landing.is_plain)
    copies = tuple((memory[each.source : each.source + each.nbytes], each) for each in chunk.copies)
    return Filling(start, start + chunk.nbytes, plain, [place_of(piece, memory) for piece in plain], encoded, copies)


def evict(kept: dict[Any, Any]) -> None:
    """Those that were made first, so that there is room for one more."""
    while len(kept) >= KEPT_MAX:
        del kept[next(iter(kept))]


def places_of(piece: Piece, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The piece's parts in the chunk, as bytes."""
    return tuple(memory[at : at + nbytes] for at, nbytes in zip(piece.places, piece.nbytes(), strict=True))


def place_of(piece: Piece, memory: torch.Tensor) -> torch.Tensor:
    """The same of a piece that is copied as it is, in its dtype, and if it is whole in its shape."""
    (place,) = places_of(piece, memory)
    values = place.view(piece.landing.dtype)
    return values.view(piece.landing.shape) if piece.is_whole else values


class Staged:
    """The gradients of one record. Training's thread sends them, and another one takes what has landed."""

    def __init__(
        self, ring: Ring, hosts: HostMemory, memory: memoryview, *, pinned: Callable[[torch.Tensor], bool]
    ) -> None:
        """``memory``: of the record."""
        ring.begin()
        self._ring = ring
        self._hosts = hosts
        self._record = whole(memory)
        self._pinned = pinned
        self.is_pinned = pinned(self._record)
        self._flights: list[Flight] = []
        self._due: list[tuple[torch.Tensor, int]] = []
        """What has landed in pinned memory, and where it begins in the record."""
        self._borrowed: list[torch.Tensor] = []
        self.host: dict[str, torch.Tensor] = {}
        """What lands in host memory as it is, by name."""

    def target(self, nbytes: int) -> torch.Tensor | None:
        """Where parts of so many bytes are to land if the record is not pinned. Errors: ``CapacityExceeded``."""
        if self.is_pinned or not nbytes:
            return None
        host = self._hosts.borrow(nbytes)
        self._borrowed.append(host)
        return host

    def send(self, sending: Sending, start: int, nbytes: int, host: torch.Tensor | None) -> None:
        """Into so many bytes of the record from ``start`` on, by way of ``host`` if the record is not pinned."""
        if host is None:
            target = self._record[start : start + nbytes]
        else:
            target = host[:nbytes]
            self._due.append((target, start))
        self._flights.append(self._ring.send(sending, target))

    def beside(self, nbytes: int) -> torch.Tensor:
        """So many bytes of pinned host memory, for what does not land in the record. Errors: ``CapacityExceeded``."""
        host = self._hosts.borrow(nbytes)
        self._borrowed.append(host)
        return host

    def send_beside(self, sending: Sending, host: torch.Tensor) -> None:
        """Into memory of :meth:`beside`."""
        self._flights.append(self._ring.send(sending, host))

    def send_to_host(self, tensors: Mapping[str, torch.Tensor], host: torch.Tensor | None = None) -> None:
        """As they are, into memory of :meth:`beside`: so much as :func:`nbytes_beside` says. Errors:
        ``CapacityExceeded`` if none is given and there is none."""
        host = self.beside(nbytes_beside(tensors.values())) if host is None else host
        starts: dict[str, int] = {}
        at = 0
        for name, tensor in tensors.items():
            starts[name] = at
            at += round_up(tensor.nbytes)
        route = self._ring.route_to_host(list(tensors.values()))
        self.send_beside(Sending(route, list(tensors.values())), host)
        for name, tensor in tensors.items():
            held = host[starts[name] : starts[name] + tensor.nbytes]
            self.host[name] = held.view(tensor.dtype).view(tensor.shape)

    def land(self) -> None:
        """Wait until everything is where it was sent. Idempotent."""
        flights, self._flights = self._flights, []
        if any(each.waits for each in flights):
            self._ring.wait_for_gate()
        with ExitStack() as landing:  # all of them land, also if one fails
            for each in flights:
                landing.callback(each.land)
        due, self._due = self._due, []
        for landed, start in due:
            self._record[start : start + landed.numel()].copy_(landed)

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


def nbytes_beside(tensors: Iterable[torch.Tensor]) -> int:
    """Of tensors as they are, each on a line of its own."""
    return sum(round_up(each.nbytes) for each in tensors)


def whole(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)

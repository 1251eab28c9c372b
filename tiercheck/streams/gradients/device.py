"""The gradients of one record that are on a device: what goes where, and what is said of it.

See :mod:`tiercheck.streams.gradients.staged` for the way that they take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from tiercheck import kernels
from tiercheck.errors import CapacityExceeded, ConfigurationError, SaveError
from tiercheck.format.container import ShardWriter, TensorSpec
from tiercheck.format.header import round_up
from tiercheck.kernels.reference.scale_search import FOUND_NBYTES
from tiercheck.streams.codecs import DTYPES, FLOATS, Codec, Part
from tiercheck.streams.codecs.blocks import BlockCodec
from tiercheck.streams.codecs.exact import Exact
from tiercheck.streams.codecs.feedback import Feedback
from tiercheck.streams.codecs.sparse import Sparse, Survivors
from tiercheck.streams.device.gate import Gate
from tiercheck.streams.device.protocol import Device
from tiercheck.streams.device.samples import Comparison
from tiercheck.streams.errors import OtherwiseStored, WrittenUnseen
from tiercheck.streams.gradients.arrangement import Arrangement, Direct, arrange
from tiercheck.streams.gradients.compaction import Compacted, Compaction, compacted, fits, sparse_codec
from tiercheck.streams.gradients.description import Gathered
from tiercheck.streams.gradients.gathered import check_trained
from tiercheck.streams.gradients.pieces import checksums_of, hash_all
from tiercheck.streams.gradients.room import GradientRoom
from tiercheck.streams.gradients.routes import parts_of
from tiercheck.streams.gradients.scales import Scale
from tiercheck.streams.gradients.staged import CHUNKS_MIN, HostMemory, Ring, Sending, Staged, evict, nbytes_beside
from tiercheck.streams.records.record_names import gradient_name, stamp
from tiercheck.streams.tensors.as_bytes import NAMES
from tiercheck.types import bytes_text

__all__ = ["DeviceGradients", "OnDevice", "keeps_residual"]

log = logging.getLogger(__name__)

BUFFER, SCALES = "buffer ", "scales "
"""Before the name of a buffer, and the number of a call, among what lands on the host as it is."""
ONE = 0x3F800000
"""The pattern of the fp32 number 1."""
STAGING_SHARE = 40
"""2 GiB of 80: what a rank that trains a billion parameters has of gradients in half precision."""


class OnDevice:
    """What all records of a rank have in common."""

    def __init__(
        self,
        device: Device,
        codec: Codec,
        room: GradientRoom,
        nbytes_max: int,
        narrowed: Collection[str] = (),
        residual_sizes: Mapping[str, int] = MappingProxyType({}),
        gate: Gate | None = None,
    ) -> None:
        """``nbytes_max``: of the staging; 0: a share of the device's memory. ``narrowed``: the masters whose fp32
        gradients are said to be bf16 numbers times one scale. ``residual_sizes``: elements that the device is to keep
        by master, if it encodes by a codec with feedback. ``gate``: what copies to the host wait for. Errors:
        ``CapacityExceeded``; ``ConfigurationError`` if the codec's kernels cannot be compiled."""
        self.device = device
        self.gate = gate
        self.codec = codec
        self.room = room
        self.narrowed = frozenset(narrowed) if type(codec) is Exact else frozenset()
        """Those of which that has held so far."""
        by_device = not isinstance(codec, Feedback) or bool(residual_sizes)
        self.blocks = block_codec(codec) if by_device else None
        """By which the device encodes; ``None`` if it does not."""
        if self.blocks is not None:
            device.prepare(self.blocks.name)
        elif self.narrowed:
            self._prepare_to_narrow()
        self.residuals = DeviceResiduals(device, residual_sizes)
        nbytes_max = staging_nbytes(device, nbytes_max)
        sparse = sparse_codec(codec) if by_device else None
        sizes = residual_sizes if isinstance(codec, Feedback) else room.elements
        self.compaction = None if sparse is None else compaction_of(device, sparse, sizes.values(), nbytes_max)
        """The same, of the codec that chooses elements."""
        least = 0 if self.compaction is None else self.compaction.nbytes_most
        self.ring = Ring(device, nbytes_max, self._nbytes_sent, gate, least)
        self.hosts = HostMemory(device)
        self._came: dict[tuple[str, ...], Came] = {}
        """By names, the gradients of the last call that brought these."""
        log.info(
            "gradients on %s are staged in %s of its memory, in chunks of %s",
            device.name,
            bytes_text(self.ring.nbytes),
            bytes_text(self.ring.chunk_nbytes),
        )

    def arranged(self, gradients: Mapping[str, torch.Tensor], masters: Mapping[str, TensorSpec]) -> Arrangement:
        """What becomes of these. Errors: ``SaveError`` for one of no trained tensor, and for one on the host whose
        residual the device keeps."""
        names = tuple(gradients)
        narrowed, stored = self.narrowed, self.room.dtypes  # as of now: the thread that closes records may change them
        before = self._came.get(names)
        if before is None or not before.is_like(gradients, narrowed, stored, self.device):
            evict(self._came)
            arrangement = self._arrange(gradients, masters, narrowed, stored)
            kinds = tuple((each.dtype, each.shape, self.device.holds(each)) for each in gradients.values())
            before = self._came[names] = Came(arrangement, kinds, narrowed, stored)
        return before.arrangement

    def _arrange(
        self,
        gradients: Mapping[str, torch.Tensor],
        masters: Mapping[str, TensorSpec],
        narrowed: Collection[str],
        stored: Mapping[str, str],
    ) -> Arrangement:
        direct: list[Direct] = []
        chosen: list[tuple[str, str, torch.Tensor]] = []
        by_host: list[str] = []
        for name, gradient in gradients.items():
            check_trained(masters, name, gradient.shape)
            held = self.device.holds(gradient)
            if name in self.residuals.of and not held:
                raise SaveError(
                    f"the gradient of {name!r} came on the host, and {self.device.name} keeps what feedback has left "
                    "out of those before: give it there, or attach with gpu_feedback=False"
                )
            narrows = name in narrowed and gradient.dtype is torch.float32 and held
            if narrows or (held and self._is_direct(name, NAMES[gradient.dtype], stored)):
                parts = parts_of(gradient, self.blocks, narrows=narrows)
                direct.append(Direct(name, gradient.shape, gradient.dtype, narrows, parts))
            elif held and self._is_compacted(name, NAMES[gradient.dtype], gradient.numel()):
                chosen.append((name, NAMES[gradient.dtype], gradient))
            else:
                by_host.append(name)
        few = None if self.compaction is None else compacted(chosen, self.compaction, self.ring.chunk_nbytes)
        return arrange(direct, by_host, few, self.codec, self.blocks, self.ring.chunk_nbytes)

    @property
    def _nbytes_sent(self) -> int:
        """For one record, as far as can be told before there is one."""
        if self.blocks is not None:
            return self.room.nbytes
        if self.compaction is not None and self.compaction.takes_all:
            return self.compaction.nbytes
        return self.room.nbytes_given(self.narrowed)

    def _is_direct(self, name: str, dtype: str, stored: Mapping[str, str]) -> bool:
        """Whether what is stored of a gradient is made on the device, as it is or by a block codec."""
        if type(self.codec) is Exact:
            return dtype == stored[name] or dtype != "F32"
        has_residual = isinstance(self.codec, BlockCodec) or name in self.residuals.of
        return self.blocks is not None and dtype in FLOATS and has_residual

    def _is_compacted(self, name: str, dtype: str, size: int) -> bool:
        """Whether the device chooses what is stored of a gradient."""
        if self.compaction is None or (isinstance(self.codec, Feedback) and name not in self.residuals.of):
            return False
        return self.compaction.takes(dtype, size)

    def _prepare_to_narrow(self) -> None:
        try:
            self.device.prepare(self.codec.name)
        except ConfigurationError as error:
            log.warning("gradients on %s are narrowed on the host, which takes longer: %s", self.device.name, error)
            self.narrowed = frozenset()


@dataclass(frozen=True)
class Came:
    """What the arrangement of some gradients depends on."""

    arrangement: Arrangement
    kinds: tuple[tuple[torch.dtype, torch.Size, bool], ...]
    """Of each gradient, also whether the device holds it."""
    narrowed: frozenset[str]
    stored: Mapping[str, str]

    def is_like(
        self,
        gradients: Mapping[str, torch.Tensor],
        narrowed: Collection[str],
        stored: Mapping[str, str],
        device: Device,
    ) -> bool:
        """Whether the same becomes of gradients of the same names."""
        known = self.narrowed is narrowed and self.stored is stored
        return known and all(
            each.dtype is dtype and each.shape == shape and device.holds(each) is held
            for each, (dtype, shape, held) in zip(gradients.values(), self.kinds, strict=True)
        )


@dataclass(frozen=True)
class Sent:
    """The gradients of one call. ``begin``: where the first of their parts that has bytes begins in the record."""

    arrangement: Arrangement
    begin: int
    recurs: bool
    """Whether they come first in the record."""
    scales: str
    """The name under which what was found of their scale lands on the host; empty if none are narrowed."""

    def parts(self) -> Iterator[tuple[Direct, tuple[tuple[Part, int], ...]]]:
        """Each gradient's, and where they lie in the record."""
        starts = (self.begin + start for start in self.arrangement.starts)
        for each in self.arrangement.direct:
            yield each, tuple((part, next(starts)) for part in each.parts)


class DeviceResiduals:
    """What a codec has not given back of gradients so far, in the device's memory: fp32, four bytes an element."""

    def __init__(self, device: Device, sizes: Mapping[str, int]) -> None:
        """Errors: ``CapacityExceeded``."""
        total = sum(sizes.values())
        purpose = "for what +feedback keeps: gpu_feedback=False has it kept, and gradients encoded, on the host"
        self._memory = device.memory(4 * total, purpose).view(torch.float32) if total else None
        self.of: dict[str, torch.Tensor] = {}
        """By master."""
        at = 0
        for name, size in sizes.items():
            assert self._memory is not None
            self.of[name] = self._memory[at : at + size]
            at += size
        self._begun_at: int | None = None

    def clearing(self, bases_begun: int) -> Callable[[], None] | None:
        """What the device must do before it encodes a record that comes after so many bases, if anything: residuals
        begin at zero with each base."""
        memory = self._memory
        if memory is None or self._begun_at == bases_begun:
            return None

        def clear() -> None:
            memory.zero_()

        return clear

    def begun(self, bases_begun: int) -> None:
        """The device was told to clear them."""
        self._begun_at = bases_begun


class DeviceGradients:
    """Of one record. Training's thread calls :meth:`send` and :meth:`end`; the rest is for the thread that closes."""

    def __init__(
        self,
        common: OnDevice,
        writer: ShardWriter,
        memory: memoryview,
        version: int,
        late: Sequence[Comparison],
        bases_begun: int = 0,
    ) -> None:
        """``late``: if any of them differ, something wrote to the state after the version before was published.
        ``bases_begun``: before this record."""
        self.sent: frozenset[str] = frozenset()
        """The masters whose gradients have come."""
        self._common = common
        self._writer: ShardWriter | None = writer
        self._memory = memory
        self._version = version
        self._staged = Staged(common.ring, common.hosts, memory, pinned=common.device.is_pinned)
        self._sent: list[Sent] = []
        self._compacted: list[tuple[Compacted, torch.Tensor]] = []
        """Of each call, and where it lands."""
        self._late = late
        self._bases_begun = bases_begun
        self._comparisons: Sequence[Comparison] = ()

    @property
    def is_pinned(self) -> bool:
        """Whether the record's memory is, so that it had better be published as it is."""
        return self._staged.is_pinned

    def send(self, gradients: Mapping[str, torch.Tensor], masters: Mapping[str, TensorSpec], nbytes_most: int) -> None:
        """``nbytes_most``: of the record with these. Errors: ``CapacityExceeded``, before anything is sent; as of
        :meth:`OnDevice.arranged`."""
        common, arrangement = self._common, self._common.arranged(gradients, masters)
        assert self._writer is not None
        if (end := round_up(self._writer.nbytes) + arrangement.nbytes) > nbytes_most:
            raise CapacityExceeded(f"the gradients would end at byte {end} of the record, behind byte {nbytes_most}")
        if common.gate is not None:
            common.gate.close()
        # All memory first: what was placed in the record cannot be taken back.
        host, few = self._staged.target(arrangement.nbytes), arrangement.compacted
        beside = None if few is None else self._staged.beside(few.nbytes)
        found = common.device.memory(FOUND_NBYTES, "for the scale of gradients") if arrangement.searched else None
        by_host = {name: gradients[name] for name in arrangement.by_host}
        others = [*by_host.values(), *([] if found is None else [found])]
        plain = self._staged.beside(nbytes_beside(others)) if others else None
        if arrangement.direct:
            sent = self._placed(self._writer, arrangement)
            self._sent.append(sent)
            self._staged.send(self._sending(arrangement, gradients, found), sent.begin, arrangement.nbytes, host)
            common.residuals.begun(self._bases_begun)
        if few is not None and beside is not None:
            self._staged.send_beside(self._compacting(few, gradients), beside)
            self._compacted.append((few, beside))
            common.residuals.begun(self._bases_begun)
        if found is not None:
            by_host[self._sent[-1].scales] = found
        if by_host:
            self._staged.send_to_host(by_host, plain)
        self.sent = self.sent.union(gradients)

    def _placed(self, writer: ShardWriter, arrangement: Arrangement) -> Sent:
        """Where the parts lie in the record from now on."""
        scales = f"{SCALES}{len(self._sent)}" if arrangement.searched else ""
        begin, tensors = round_up(writer.nbytes), arrangement.tensors
        if tensors is not None and not self.sent:
            writer.recurring(tensors, stamp(self._version))
            return Sent(arrangement, begin, True, scales)
        end = writer.nbytes
        for each in arrangement.direct:
            for part in each.parts:
                writer.slot(gradient_name(self._version, each.name, part.suffix), part.dtype, part.shape)
        assert writer.nbytes == (begin + arrangement.nbytes if arrangement.nbytes else end)
        return Sent(arrangement, begin, False, scales)

    def _sending(
        self, arrangement: Arrangement, gradients: Mapping[str, torch.Tensor], found: torch.Tensor | None
    ) -> Sending:
        residuals, route = self._common.residuals, arrangement.route
        tensors = [gradients[each.name] for each in arrangement.direct]
        if found is not None:
            searched = [tensors[index] for index in arrangement.searched]
            return Sending(route, tensors, found=found, first=partial(find_scale, self._common.device, searched, found))
        kept = [residuals.of[each.name] for each in arrangement.direct] if residuals.of else ()
        return Sending(route, tensors, residuals=kept, first=residuals.clearing(self._bases_begun))

    def _compacting(self, few: Compacted, gradients: Mapping[str, torch.Tensor]) -> Sending:
        residuals, tensors = self._common.residuals, [gradients[name] for name in few.names]
        kept = [residuals.of[name] for name in few.names] if residuals.of else ()
        clear = residuals.clearing(self._bases_begun)
        return Sending(few.route, tensors, residuals=kept, first=clear, seed=self._version)

    def end(self, buffers: Mapping[str, torch.Tensor], comparisons: Sequence[Comparison]) -> None:
        """What else belongs to the version, as of now. ``comparisons``: if any differ, the record is none."""
        there = {BUFFER + name: each for name, each in buffers.items() if self._common.device.holds(each)}
        if there:
            self._staged.send_to_host(there)
        self._comparisons = comparisons

    def land(self) -> None:
        """Wait until everything that was sent is in host memory. Idempotent."""
        self._staged.land()

    def moved(self, memory: memoryview) -> None:
        self._memory = memory
        self._staged.moved(memory)

    def check(self) -> None:
        """Errors: ``WrittenUnseen``; ``OtherwiseStored``."""
        compared = ((True, self._late), (False, self._comparisons))
        self._late = self._comparisons = ()
        for late, comparisons in compared:
            if names := {name: None for each in comparisons for name in each.differing()}:
                raise WrittenUnseen(tuple(names), late=late)
        lost = [
            each.name
            for sent in self._sent
            if sent.scales and found_in(self._staged.host[sent.scales])[1]
            for each in sent.arrangement.direct
            if each.narrows
        ]
        if lost:
            self._common.narrowed = self._common.narrowed.difference(lost)
            self._common.room.note(dict.fromkeys(lost, "F32"))
            raise OtherwiseStored(lost)

    def taken(self, stored: dict[str, str], threads: int) -> tuple[Gathered | None, dict[str, dict[str, Any]]]:
        """What landed in the record: what comes first there, and how the others are encoded, by master. ``stored``:
        gets the dtypes in which the next ones of them had better be stored. ``threads``: that compute checksums."""
        sent, self._sent = self._sent, []
        gathered: Gathered | None = None
        encodings: dict[str, dict[str, Any]] = {}
        for each in sent:
            arrangement, scale = each.arrangement, self._scale(each)
            description = arrangement.description if scale is None else arrangement.scaled
            if each.recurs:
                assert arrangement.tensors is not None
                memory = self._memory[each.begin : each.begin + arrangement.tensors.nbytes]
                digests = hash_all(arrangement.pieces, memory, threads=threads)
                gathered = Gathered(checksums_of(arrangement.pieces, digests), description, scale)
            else:
                encodings |= description.encodings_with(scale)
            encodings |= self._with_nonfinite(each)
            stored |= self._narrowest(each)
        return gathered, encodings

    def _scale(self, sent: Sent) -> Scale | None:
        if not sent.scales:
            return None
        pattern, _ = found_in(self._staged.host[sent.scales])
        return None if pattern == ONE else Scale("BF16", float(np.uint32(pattern).view(np.float32)))

    def _with_nonfinite(self, sent: Sent) -> dict[str, dict[str, Any]]:
        """The encodings of those in which a block codec has found numbers that are not finite."""
        codec, found = self._common.blocks, dict[str, dict[str, Any]]()
        if codec is None:
            return found
        for each, parts in sent.parts():
            codes, scales = (self._array(*part) for part in parts)
            if count := codec.nonfinite(codes, scales, each.shape.numel()):
                said = sent.arrangement.description.encodings[each.name]
                found[each.name] = {**said, "scalars": {"nonfinite": count}}
        return found

    def _narrowest(self, sent: Sent) -> dict[str, str]:
        """fp32 values that bf16 holds take half the room if they go by way of host memory."""
        if type(self._common.codec) is not Exact:
            return {}
        return {
            each.name: "BF16"
            for each, ((part, start),) in sent.parts()
            if part.dtype == "F32" and is_bfloat16(self._array(part, start))
        }

    def on_host(
        self, buffers: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor | Survivors], dict[str, torch.Tensor]]:
        """Gradients that landed beside the record, as they are or those of their elements that are stored; and
        buffers."""
        host = self._staged.host
        gradients: dict[str, torch.Tensor | Survivors] = {
            name: each for name, each in host.items() if not name.startswith((BUFFER, SCALES))
        }
        for few, memory in self._compacted:
            gradients |= few.landed(memory)
        return gradients, {name: host.get(BUFFER + name, each) for name, each in buffers.items()}

    def close(self) -> None:
        """Let the record's memory go. Idempotent."""
        self._compacted.clear()
        self._staged.close()
        self._memory = memoryview(b"")
        self._writer = None

    def _array(self, part: Part, start: int) -> Any:
        return np.frombuffer(self._memory[start : start + part.nbytes], DTYPES[part.dtype])


def staging_nbytes(device: Device, nbytes_max: int) -> int:
    """What a setting of so many bytes comes to."""
    return nbytes_max or device.nbytes // STAGING_SHARE


def compaction_of(device: Device, codec: Sparse, sizes: Iterable[int], nbytes_max: int) -> Compaction | None:
    """``None`` if the device encodes none of these. Errors: as of :class:`Compaction`."""
    compaction = Compaction(device, codec, sizes, nbytes_max // CHUNKS_MIN)
    return compaction if compaction.nbytes else None


def keeps_residual(device: Device, codec: Codec, master: torch.Tensor, nbytes_max: int) -> bool:
    """Whether a device that is asked to keeps what feedback leaves out of this master's gradients, and encodes them.
    ``nbytes_max``: as of :class:`OnDevice`."""
    sparse = sparse_codec(codec)
    if not device.holds(master) or (sparse is None and block_codec(codec) is None):
        return False
    return sparse is None or fits(sparse, master.numel(), staging_nbytes(device, nbytes_max) // CHUNKS_MIN)


def block_codec(codec: Codec) -> BlockCodec | None:
    """The block codec that this is, or to which it adds feedback."""
    inner = codec.codec if isinstance(codec, Feedback) else codec
    return inner if isinstance(inner, BlockCodec) else None


def find_scale(device: Device, gradients: Sequence[torch.Tensor], found: torch.Tensor) -> None:
    device.find_scale([each.detach().reshape(-1) for each in gradients], found)


def found_in(memory: torch.Tensor) -> tuple[int, int]:
    """The pattern of the scale, and whether it failed."""
    scale, lost = memory.numpy().view(np.uint32).tolist()
    return scale, lost


def is_bfloat16(array: Any) -> bool:
    return bool(array.size) and kernels.is_bfloat16(array)

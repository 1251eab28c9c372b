"""The gradients of one record that are on a device: what goes where, and what is said of it.

See :mod:`tiercheck.streams.gradients.staged` for the way that they take.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from tiercheck import kernels
from tiercheck.errors import CapacityExceeded, ConfigurationError, SaveError
from tiercheck.format.container import ShardWriter
from tiercheck.format.header import round_up
from tiercheck.kernels.reference.scale_search import FOUND_NBYTES, SAMPLED_TENSORS_MAX
from tiercheck.streams.codecs import DTYPES, FLOATS, Codec, Encoding, Part
from tiercheck.streams.codecs.blocks import BlockCodec
from tiercheck.streams.codecs.exact import SCALE, Exact
from tiercheck.streams.codecs.feedback import Feedback
from tiercheck.streams.device.protocol import Device
from tiercheck.streams.device.samples import Comparison
from tiercheck.streams.gradients.room import GradientRoom
from tiercheck.streams.gradients.staged import HostMemory, Landing, Ring, Staged, parts_of
from tiercheck.streams.records.record_names import gradient_name
from tiercheck.streams.state import OtherwiseStored, WrittenUnseen
from tiercheck.streams.tensors.as_bytes import NAMES
from tiercheck.types import bytes_text

__all__ = ["DeviceGradients", "OnDevice", "block_codec"]

log = logging.getLogger(__name__)

BUFFER, SCALES = "buffer ", "scales "
"""Before the name of a buffer, and the number of a call, among what lands on the host as it is."""
ONE = 0x3F800000
"""The pattern of the fp32 number 1."""


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
    ) -> None:
        """``nbytes_max``: of the staging. ``narrowed``: the masters whose fp32 gradients are said to be bf16 numbers
        times one scale. ``residual_sizes``: elements that the device is to keep by master, if the codec is a block
        codec with feedback. Errors: ``CapacityExceeded``; ``ConfigurationError`` if the codec's kernels cannot be
        compiled."""
        self.device = device
        self.codec = codec
        self.room = room
        self.narrowed = frozenset(narrowed) if type(codec) is Exact else frozenset()
        """Those of which that has held so far."""
        by_device = isinstance(codec, BlockCodec) or bool(residual_sizes)
        self.blocks = block_codec(codec) if by_device else None
        """By which the device encodes; ``None`` if it does not."""
        if self.blocks is not None:
            device.prepare(self.blocks.name)
        elif self.narrowed:
            self._prepare_to_narrow()
        self.residuals = DeviceResiduals(device, residual_sizes)
        self.ring = Ring(device, nbytes_max, room.nbytes_most)
        self.hosts = HostMemory(device)
        log.info(
            "gradients on %s are staged in %s of its memory, in chunks of %s",
            device.name,
            bytes_text(self.ring.nbytes),
            bytes_text(self.ring.chunk_nbytes),
        )

    def is_direct(self, name: str, gradient: torch.Tensor) -> bool:
        """Whether what is stored of a gradient is made on the device, as it is or by a block codec."""
        if not self.device.holds(gradient):
            return False
        dtype = NAMES[gradient.dtype]
        if type(self.codec) is Exact:
            return dtype == self.room.dtypes[name] or dtype != "F32"
        has_residual = isinstance(self.codec, BlockCodec) or name in self.residuals.of
        return self.blocks is not None and dtype in FLOATS and has_residual

    def _prepare_to_narrow(self) -> None:
        try:
            self.device.prepare(self.codec.name)
        except ConfigurationError as error:
            log.warning("gradients on %s are narrowed on the host, which takes longer: %s", self.device.name, error)
            self.narrowed = frozenset()


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
        self._direct: dict[str, tuple[Encoding, list[tuple[Part, int]]]] = {}
        """By master, what is said of it but for scalars, and where its parts begin in the memory."""
        self._narrowed: dict[str, str] = {}
        """By master, the name under which what was found of its scale lands on the host."""
        self._late = late
        self._bases_begun = bases_begun
        self._comparisons: Sequence[Comparison] = ()

    @property
    def is_pinned(self) -> bool:
        """Whether the record's memory is, so that it had better be published as it is."""
        return self._staged.is_pinned

    def send(self, gradients: Mapping[str, torch.Tensor], nbytes_most: int) -> None:
        """``nbytes_most``: of the record with these. Errors: ``CapacityExceeded``, before anything is sent;
        ``SaveError`` for a gradient on the host whose residual the device keeps."""
        common, holds = self._common, self._common.device.holds
        if astray := [name for name, each in gradients.items() if name in common.residuals.of and not holds(each)]:
            raise SaveError(
                f"the gradient of {astray[0]!r} came on the host, and {common.device.name} keeps what feedback has "
                "left out of those before: give it there, or attach with gpu_feedback=False"
            )
        narrowed = {
            name
            for name, each in gradients.items()
            if name in common.narrowed and each.dtype is torch.float32 and holds(each)
        }
        direct = {name: each for name, each in gradients.items() if name in narrowed or common.is_direct(name, each)}
        planned = {name: parts_of(each, common.blocks, narrowed=name in narrowed) for name, each in direct.items()}
        needed = sum(round_up(part.nbytes) for parts in planned.values() for part in parts)
        assert self._writer is not None
        if self._writer.nbytes + needed > nbytes_most:
            raise CapacityExceeded(
                f"the gradients take {needed} bytes more, and would end behind byte {nbytes_most} of the record"
            )
        found = common.device.memory(FOUND_NBYTES, "for the scale of gradients") if narrowed else None
        target = self._staged.target(needed)
        landings = [
            self._landing(self._writer, name, each, planned[name], found if name in narrowed else None)
            for name, each in direct.items()
        ]
        host = {name: each for name, each in gradients.items() if name not in direct}
        if found is not None:
            scales = f"{SCALES}{len(self.sent)}"
            self._narrowed.update(dict.fromkeys(narrowed, scales))
            of = [gradients[name] for name in direct if name in narrowed]
            self._staged.send(landings, target, partial(find_scale, common.device, of, found))
            host[scales] = found
        elif landings:
            self._staged.send(landings, target, common.residuals.clearing(self._bases_begun))
            common.residuals.begun(self._bases_begun)
        if host:
            self._staged.send_to_host(host)
        self.sent = self.sent.union(gradients)

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
        if lost := [name for name, scales in self._narrowed.items() if found_in(self._staged.host[scales])[1]]:
            self._common.narrowed = self._common.narrowed.difference(lost)
            self._common.room.note(dict.fromkeys(lost, "F32"))
            raise OtherwiseStored(lost)

    def take_encodings(self, stored: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Of those that landed in the record. ``stored``: gets the dtypes in which the next ones of them had better be
        stored."""
        direct, self._direct = self._direct, {}
        found: dict[str, dict[str, Any]] = {}
        for name, (encoding, places) in direct.items():
            if (codec := self._common.blocks) is not None:
                codes, scales = (self._array(part, start) for part, start in places)
                nonfinite = codec.nonfinite(codes, scales, math.prod(encoding.shape))
                encoding = replace(encoding, scalars={"nonfinite": nonfinite})
            elif name in self._narrowed:
                scale, _ = found_in(self._staged.host[self._narrowed[name]])
                if scale != ONE:
                    encoding = replace(encoding, scalars={SCALE: scale})
            else:
                stored[name] = narrowest(self._array(*places[0]), encoding.dtype)
            found[name] = encoding.to_object()
        return found

    def on_host(self, buffers: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gradients and buffers that landed as they are."""
        host = self._staged.host
        gradients = {name: each for name, each in host.items() if not name.startswith((BUFFER, SCALES))}
        return gradients, {name: host.get(BUFFER + name, each) for name, each in buffers.items()}

    def close(self) -> None:
        """Let the record's memory go. Idempotent."""
        self._staged.close()
        self._memory = memoryview(b"")
        self._writer = None

    def _landing(
        self,
        writer: ShardWriter,
        name: str,
        gradient: torch.Tensor,
        parts: Sequence[Part],
        found: torch.Tensor | None,
    ) -> Landing:
        codec, residual = self._common.blocks, self._common.residuals.of.get(name)
        starts: list[int] = []
        for part in parts:
            slot = writer.slot(gradient_name(self._version, name, part.suffix), part.dtype, part.shape)
            starts.append(writer.nbytes - slot.nbytes)
        suffixes, shape = tuple(part.suffix for part in parts), tuple(gradient.shape)
        text = (codec or self._common.codec).text
        encoding = Encoding(text, NAMES[gradient.dtype], shape, suffixes)
        self._direct[name] = encoding, list(zip(parts, starts, strict=True))
        return Landing(gradient, tuple(starts), codec, found, residual)

    def _array(self, part: Part, start: int) -> Any:
        return np.frombuffer(self._memory[start : start + part.nbytes], DTYPES[part.dtype])


def block_codec(codec: Codec) -> BlockCodec | None:
    """The block codec that this is, or to which it adds feedback."""
    inner = codec.codec if isinstance(codec, Feedback) else codec
    return inner if isinstance(inner, BlockCodec) else None


def find_scale(device: Device, gradients: Sequence[torch.Tensor], found: torch.Tensor) -> None:
    """On the device, in the largest of them."""
    largest = sorted(gradients, key=torch.Tensor.numel)[-SAMPLED_TENSORS_MAX:]
    device.find_scale([each.detach().reshape(-1) for each in largest], found)


def found_in(memory: torch.Tensor) -> tuple[int, int]:
    """The pattern of the scale, and whether it failed."""
    scale, lost = memory.numpy().view(np.uint32).tolist()
    return scale, lost


def narrowest(array: Any, dtype: str) -> str:
    """fp32 values that bf16 holds take half the room if they go by way of host memory."""
    return "BF16" if dtype == "F32" and array.size and kernels.is_bfloat16(array) else dtype

"""The gradients of one record that are on a device: what goes where, and what is said of it.

See :mod:`tiercheck.streams.gradients.staged` for the way that they take.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tiercheck import kernels
from tiercheck.errors import CapacityExceeded
from tiercheck.format.container import ShardWriter
from tiercheck.format.header import round_up
from tiercheck.streams.codecs import DTYPES, Codec, Encoding, Part
from tiercheck.streams.codecs.blocks import BlockCodec
from tiercheck.streams.device.protocol import Device
from tiercheck.streams.device.samples import Comparison
from tiercheck.streams.gradients.room import GradientRoom
from tiercheck.streams.gradients.staged import HostMemory, Landing, Ring, Staged, is_direct, parts_of
from tiercheck.streams.records.record_names import gradient_name
from tiercheck.streams.state import WrittenUnseen
from tiercheck.streams.tensors.as_bytes import NAMES
from tiercheck.types import bytes_text

__all__ = ["DeviceGradients", "OnDevice"]

log = logging.getLogger(__name__)

BUFFER = "buffer "
"""Before the name of a buffer, among what lands on the host as it is."""


class OnDevice:
    """What all records of a rank have in common."""

    def __init__(self, device: Device, codec: Codec, room: GradientRoom, nbytes_max: int) -> None:
        """``nbytes_max``: of the staging. Errors: ``CapacityExceeded``; ``ConfigurationError`` if the codec's kernels
        cannot be compiled."""
        self.device = device
        self.codec = codec
        self.room = room
        if isinstance(codec, BlockCodec):
            device.prepare(codec.name)
        self.ring = Ring(device, nbytes_max, room.nbytes_most)
        self.hosts = HostMemory(device)
        log.info(
            "gradients on %s are staged in %s of its memory, in chunks of %s",
            device.name,
            bytes_text(self.ring.nbytes),
            bytes_text(self.ring.chunk_nbytes),
        )


class DeviceGradients:
    """Of one record. Training's thread calls :meth:`send` and :meth:`end`; the rest is for the thread that closes."""

    def __init__(
        self, common: OnDevice, writer: ShardWriter, memory: memoryview, version: int, late: Sequence[Comparison]
    ) -> None:
        """``late``: if any of them differ, something wrote to the state after the version before was published."""
        self.sent: frozenset[str] = frozenset()
        """The masters whose gradients have come."""
        self._common = common
        self._writer: ShardWriter | None = writer
        self._memory = memory
        self._version = version
        self._staged = Staged(common.ring, common.hosts, memory, pinned=common.device.is_pinned)
        self._direct: dict[str, tuple[Encoding, list[tuple[Part, int]]]] = {}
        """By master, what is said of it but for scalars, and where its parts begin in the memory."""
        self._late = late
        self._comparisons: Sequence[Comparison] = ()

    @property
    def is_pinned(self) -> bool:
        """Whether the record's memory is, so that it had better be published as it is."""
        return self._staged.is_pinned

    def send(self, gradients: Mapping[str, torch.Tensor], nbytes_most: int) -> None:
        """``nbytes_most``: of the record with these. Errors: ``CapacityExceeded``, before anything is sent."""
        codec, expected = self._common.codec, self._common.room.dtypes
        direct = {
            name: each
            for name, each in gradients.items()
            if self._staged.is_pinned and self._is_direct(codec, each, expected[name])
        }
        planned = {name: parts_of(codec, each) for name, each in direct.items()}
        needed = sum(round_up(part.nbytes) for parts in planned.values() for part in parts)
        assert self._writer is not None
        if self._writer.nbytes + needed > nbytes_most:
            raise CapacityExceeded(
                f"the gradients take {needed} bytes more, and would end behind byte {nbytes_most} of the record"
            )
        landings = [self._landing(self._writer, name, each, planned[name]) for name, each in direct.items()]
        if landings:
            self._staged.send(landings)
        host = {name: each for name, each in gradients.items() if name not in direct}
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
        """Errors: ``WrittenUnseen``."""
        compared = ((True, self._late), (False, self._comparisons))
        self._late = self._comparisons = ()
        for late, comparisons in compared:
            if names := {name: None for each in comparisons for name in each.differing()}:
                raise WrittenUnseen(tuple(names), late=late)

    def take_encodings(self, stored: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Of those that landed in the record. ``stored``: gets the dtypes in which the next ones of them had better be
        stored."""
        direct, self._direct = self._direct, {}
        found: dict[str, dict[str, Any]] = {}
        for name, (encoding, places) in direct.items():
            if isinstance(self._common.codec, BlockCodec):
                codes, scales = (self._array(part, start) for part, start in places)
                nonfinite = self._common.codec.nonfinite(codes, scales, math.prod(encoding.shape))
                encoding = replace(encoding, scalars={"nonfinite": nonfinite})
            else:
                stored[name] = narrowest(self._array(*places[0]), encoding.dtype)
            found[name] = encoding.to_object()
        return found

    def on_host(self, buffers: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gradients and buffers that landed as they are."""
        host = self._staged.host
        gradients = {name: each for name, each in host.items() if not name.startswith(BUFFER)}
        return gradients, {name: host.get(BUFFER + name, each) for name, each in buffers.items()}

    def close(self) -> None:
        """Let the record's memory go. Idempotent."""
        self._staged.close()
        self._memory = memoryview(b"")
        self._writer = None

    def _is_direct(self, codec: Codec, gradient: torch.Tensor, expected: str) -> bool:
        return self._common.device.holds(gradient) and is_direct(codec, NAMES[gradient.dtype], expected)

    def _landing(self, writer: ShardWriter, name: str, gradient: torch.Tensor, parts: Sequence[Part]) -> Landing:
        codec = self._common.codec
        starts: list[int] = []
        for part in parts:
            slot = writer.slot(gradient_name(self._version, name, part.suffix), part.dtype, part.shape)
            starts.append(writer.nbytes - slot.nbytes)
        suffixes, shape = tuple(part.suffix for part in parts), tuple(gradient.shape)
        encoding = Encoding(codec.text, NAMES[gradient.dtype], shape, suffixes)
        self._direct[name] = encoding, list(zip(parts, starts, strict=True))
        return Landing(gradient, tuple(starts), codec if isinstance(codec, BlockCodec) else None)

    def _array(self, part: Part, start: int) -> Any:
        return np.frombuffer(self._memory[start : start + part.nbytes], DTYPES[part.dtype])


def narrowest(array: Any, dtype: str) -> str:
    """fp32 values that bf16 holds take half the room if they go by way of host memory."""
    return "BF16" if dtype == "F32" and array.size and kernels.is_bfloat16(array) else dtype

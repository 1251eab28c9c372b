"""The differential stream: every iteration, the gradients that took the optimizer from version v-1 to v.

A shard of the stream holds one version, or a batch of consecutive ones; names carry the version, so that a
batch is the concatenation of its records. Of version v there are

- ``V/gradient/NAME`` (and ``#PART`` if the codec stores several): the gradient of a master, encoded,
- ``V/buffer/NAME``: a persistent buffer that has changed since it was last recorded,

and the objects ``V/record`` (whether the step was skipped, the options each parameter group stepped with, how
each gradient is encoded), ``V/host`` (the host state at the end of iteration v) and, of some versions, ``V/audit``
(:mod:`tiercheck.streams.records.audit`). :mod:`tiercheck.streams.records.recorded` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, cast

import torch

from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded, TierError
from tiercheck.format import host_state
from tiercheck.format.container import (
    PackedObject,
    ShardMetadata,
    ShardWriter,
    TensorSpec,
    checksum_of,
    header_room,
    packed_object,
)
from tiercheck.format.header import round_up
from tiercheck.format.layout import tensor_spec
from tiercheck.keys import ShardKey
from tiercheck.streams.codecs import Encoding, Slot, codec
from tiercheck.streams.codecs.exact import Exact, encode_scaled
from tiercheck.streams.codecs.sparse import Survivors
from tiercheck.streams.device.protocol import Device
from tiercheck.streams.errors import CameTwice
from tiercheck.streams.gradients.description import Gathered
from tiercheck.streams.gradients.device import DeviceGradients, OnDevice, keeps_residual
from tiercheck.streams.gradients.encoder import GradientEncoder, scratch
from tiercheck.streams.gradients.gathered import GatheredGradients, check_trained
from tiercheck.streams.gradients.room import GradientRoom
from tiercheck.streams.records.audit import audit_nbytes_max, audit_of
from tiercheck.streams.records.iteration import RECORD_SPARE_BYTES, IterationCapture, IterationStream
from tiercheck.streams.records.record_names import (
    audit_name,
    buffer_prefix,
    gradient_name,
    host_name,
    record_name,
)
from tiercheck.streams.records.step_options import StepOptions
from tiercheck.streams.tensors.as_bytes import NAMES, array_of, dtype_name, tensor_in
from tiercheck.streams.tensors.provider import StateProvider, extras_of

__all__ = ["DifferentialCapture", "DifferentialStream"]


class DifferentialCapture(IterationCapture):
    """Differential v on its way into the first tier's memory: :meth:`add` gradients, then :meth:`finish`."""

    def __init__(
        self, stream: DifferentialStream, key: ShardKey, memory: memoryview, header_nbytes: int, beside_nbytes: int
    ) -> None:
        """``beside_nbytes``: what must be left when all gradients have come, at most."""
        self._stream = stream
        self._key = key
        self._writer = ShardWriter(memory, header_nbytes)
        self._nbytes_before = len(memory) - beside_nbytes
        """The gradients and the header end there."""
        self._beside_nbytes = beside_nbytes
        self._base = stream.bases_begun
        self._options = StepOptions(stream.provider)
        self._gathered: Gathered | None = None
        self._encodings: dict[str, dict[str, Any]] = {}
        """Of gradients that were not gathered, and of those that hold numbers which are not finite."""
        self._stored: dict[str, str] = {}
        """The dtypes of what is stored of them."""
        self._kept: frozenset[str] = frozenset()
        """The gradients of a call that are there though it failed, since memory did not suffice for all."""
        self._checksums: dict[str, str] = {}
        self.is_on_its_way = stream.on_device is not None
        self._on_device: DeviceGradients | None = None
        self._buffers_landed: Mapping[str, torch.Tensor] | None = None
        """Those on a device, when they have come."""
        if stream.on_device is not None:
            common, late = stream.on_device, stream.comparisons()
            self._on_device = DeviceGradients(common, self._writer, memory, key.first, late, self._base)

    def move(self, memory: memoryview) -> None:
        if self._on_device:
            self._on_device.land()
        self._writer.move(memory)
        self._nbytes_before = len(memory) - self._beside_nbytes
        if self._on_device:
            self._on_device.moved(memory)

    def add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Encode gradients (by master, in the master's shape) into the tier's memory. They are free on return; on a
        device they are for what the thread puts into its current stream from then on.

        Where training uses the compressed gradients, each is written to: it becomes what the tier's memory decodes to.
        That is done for all of them even if that memory does not suffice, since the step follows in any case.
        Errors: ``SaveError`` for a gradient that is no master's, or came already; ``TierError``.
        """
        self._options.take(gradients)
        if self._on_device:
            for name in gradients:
                self._check_new(name)
            self._on_device.send(gradients, self._stream.masters, self._nbytes_before)
        else:
            self._take(gradients)

    def _take(self, gradients: Mapping[str, torch.Tensor | Survivors]) -> None:
        kept, self._kept = self._kept, frozenset()
        try:
            self._put({name: each for name, each in gradients.items() if name not in kept} if kept else gradients)
            if self._writer.nbytes > self._nbytes_before:
                raise CapacityExceeded(
                    f"the gradients end at byte {self._writer.nbytes}, and must at {self._nbytes_before} to leave room "
                    "for what else the record holds; if the model's dtype has changed since it was attached, change it "
                    "before it is attached"
                )
        except CapacityExceeded:
            self._kept = frozenset(name for name in gradients if self._has(name))
            raise

    def _put(self, gradients: Mapping[str, torch.Tensor | Survivors]) -> None:
        if self._stream.gathered is not None and self._gathered is None and not self._encodings:
            tensors = cast(Mapping[str, torch.Tensor], gradients)  # no codec that gathers them has survivors
            self._gathered = self._stream.gathered.put(tensors, self._writer, self._key.first)
            if self._gathered is not None:
                return
        for name, gradient in gradients.items():
            check_trained(self._stream.masters, name, gradient.shape)
            self._check_new(name)
        failures: list[TierError] = []
        for name, gradient in gradients.items():
            self._encode(name, gradient, failures)
        if failures:
            raise failures[0]

    def _encode(self, name: str, gradient: torch.Tensor | Survivors, failures: list[TierError]) -> None:
        written: dict[str, memoryview] = {}
        version, slot = self._key.first, partial(self._slot, name, written, failures)
        failed = len(failures)
        encoding = gradient.store(slot) if isinstance(gradient, Survivors) else self._scaled(gradient, slot)
        if encoding is None:
            assert isinstance(gradient, torch.Tensor)
            encoding = self._stream.encoder.encode(name, gradient, seed=version, slot=slot)
        if len(failures) > failed:
            return
        self._encodings[name] = encoding.to_object()
        # Now, while the parts are in the cache: at the end of the step they would be read from memory.
        for suffix, memory in written.items():
            checksum = encoding.checksums.get(suffix) or checksum_of(memory)
            self._checksums[gradient_name(version, name, suffix)] = checksum

    def _scaled(self, gradient: torch.Tensor, slot: Slot) -> Encoding | None:
        """By the scale that those had which came first. ``None``: encode it as others."""
        scale, codec = None if self._gathered is None else self._gathered.scale, self._stream.encoder.codec
        if scale is None or gradient.dtype is not torch.float32 or not gradient.is_cpu or not isinstance(codec, Exact):
            return None
        return encode_scaled(array_of(gradient), scale.fp16, scale.value, codec, slot)

    def _slot(
        self,
        name: str,
        written: dict[str, memoryview],
        failures: list[TierError],
        suffix: str,
        dtype: str,
        shape: tuple[int, ...],
    ) -> memoryview:
        """The tier's memory for a part, which is noted; if that does not suffice, memory of no consequence."""
        try:
            memory = self._writer.slot(gradient_name(self._key.first, name, suffix), dtype, shape)
        except TierError as error:
            failures.append(error)
            return scratch(suffix, dtype, shape)
        written[suffix] = memory
        self._stored[name] = dtype
        return memory

    def _check_new(self, name: str) -> None:
        if self._has(name):
            raise CameTwice(name, self._key.first)

    def _has(self, name: str) -> bool:
        if self._on_device and name in self._on_device.sent:
            return True
        return name in self._encodings or (self._gathered is not None and name in self._gathered.stored)

    def ended(self, *, skipped: bool, audit: bool = False) -> Callable[[], int]:
        stream = self._stream
        buffers = stream.changed_buffers()
        host_state = stream.packed_host_state()
        audited = stream.audit(host_state, fresh=not skipped) if audit else None
        if self._on_device:
            self._on_device.end(buffers, stream.comparisons())
        return partial(self._close, skipped, buffers, host_state, audited)

    def abandon(self) -> None:
        if self._on_device:
            self._on_device.land()
            self._on_device.close()

    def _close(
        self,
        skipped: bool,
        buffers: Mapping[str, torch.Tensor],
        host_state: PackedObject,
        audited: dict[str, Any] | None,
    ) -> int:
        version, stream = self._key.first, self._stream
        if self._on_device:
            if self._buffers_landed is None:
                self._buffers_landed = self._landed(self._on_device, buffers)
            buffers = self._buffers_landed
        record = self._record(skipped)
        stream.record_nbytes = len(record.data)
        objects = {record_name(version): record, host_name(version): host_state}
        if audited is not None:
            objects[audit_name(version)] = packed_object(audit_name(version), audited)
        specs = {
            name: tensor_spec(buffer_prefix(version) + name, dtype_name(each, name), tuple(each.shape))
            for name, each in buffers.items()
        }
        self.nbytes_needed = self._writer.nbytes_with(specs.values(), objects)
        self._writer.check_room(self.nbytes_needed, "what is beside the gradients")  # before anything of it is placed
        for name, spec in specs.items():
            memory = self._writer.slot(spec.name, spec.dtype, spec.shape)
            tensor_in(memory, spec.dtype, spec.shape, what=name).copy_(buffers[name])
        for name, each in objects.items():
            self._writer.add_object(name, each)
        if self._on_device:
            if self._on_device.is_pinned:
                self._writer.fill()
            self._on_device.close()  # only now: buffers lie in host memory that the next record borrows
        nbytes = self._writer.finish(
            ShardMetadata.of(self._key, self._stream.world_size, self._stream.token),
            checksums=self._checksums,
            recurring=() if self._gathered is None else self._gathered.checksums,
            threads=stream.closing_threads,
        )
        del self._writer  # the tier reuses the memory only when nobody has a view of it
        gathered = {} if self._gathered is None else self._gathered.stored
        if gathered or self._stored:
            stream.room.note({**gathered, **self._stored} if self._stored else gathered)
        return nbytes

    def _landed(self, on_device: DeviceGradients, buffers: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Wait for what is on its way. What has come as it is is encoded now. Returns the buffers, on the host. If
        memory does not suffice, this may be called again after :meth:`move`. Errors: ``WrittenUnseen``;
        ``OtherwiseStored``; ``CapacityExceeded``."""
        on_device.land()
        on_device.check()
        if on_device.sent:
            self._gathered, self._encodings = on_device.taken(self._stored, self._stream.closing_threads)
        gradients, buffers = on_device.on_host(buffers)
        on_device.sent = frozenset()
        self._stream.forget_residuals(self._base)
        self._take(gradients)
        return buffers

    def _record(self, skipped: bool) -> PackedObject:
        said = {"skipped": skipped, "hyperparameters": self._options.groups}
        name, gathered = record_name(self._key.first), self._gathered
        if gathered is not None and not self._encodings:
            return PackedObject(host_state.pack_with(said, {"gradients": gathered.packed()}, name=name))
        encodings = self._encodings if gathered is None else {**gathered.encodings(), **self._encodings}
        return PackedObject(host_state.pack({**said, "gradients": encodings}, name=name))


class DifferentialStream(IterationStream):
    """What one rank's differentials have in common: the codec, the room they take, what was recorded last.

    ``train_on_compressed``, ``encode_threads``, ``gpu_staging_bytes``, ``gpu_feedback``: see
    :class:`~tiercheck.config.CheckpointConfig`. Gradients on a GPU are closed beside training, unless training uses the
    compressed ones: then it waits for them. Errors: ``CapacityExceeded`` if the GPU has no memory for the staging;
    ``ConfigurationError`` for a codec that there is not, that cannot encode a master's dtype, or that does not
    go with training on the compressed gradient.
    """

    def __init__(
        self,
        provider: StateProvider,
        codec_name: str,
        world_size: int,
        *,
        train_on_compressed: bool = False,
        encode_threads: int = 1,
        gpu_staging_bytes: int = CheckpointConfig.gpu_staging_bytes,
        gpu_feedback: bool = CheckpointConfig.gpu_feedback,
        device: Device | None = None,
    ) -> None:
        self.masters = {
            name: TensorSpec(name, dtype_name(tensor, name), tuple(tensor.shape))
            for name, tensor in provider.masters().items()
        }
        self.encoder = GradientEncoder(
            codec(codec_name), self.masters, train_on_compressed=train_on_compressed, threads=encode_threads
        )
        exact = self.encoder.codec if type(self.encoder.codec) is Exact else None
        self.gathered = None if exact is None else GatheredGradients(exact, self.masters, threads=encode_threads)
        """What puts gradients into records together, if they are stored as they are."""
        expected = {name: NAMES[dtype] for name, dtype in provider.gradient_dtypes().items()}
        self.room = GradientRoom(self.encoder.codec, self.masters, expected)
        self._audit_nbytes = audit_nbytes_max(len(self.masters), len(extras_of(provider)))
        self.bases_begun = 0
        self.record_nbytes = 0
        """The length of the last record's own object."""
        self._forgotten_at = 0
        """The residuals hold nothing of what was before so many bases."""
        super().__init__(provider, world_size, device=device, defers=not train_on_compressed)
        self.on_device: OnDevice | None = None
        """What takes gradients on a device, if records are closed beside training."""
        if self.device is not None and self.defers:
            narrowed = [name for name, each in expected.items() if each == "BF16" and self.masters[name].dtype == "F32"]
            codec_there, room, kept = self.encoder.codec, self.room, dict[str, int]()
            if gpu_feedback:
                kept = self.encoder.give_up_residuals(
                    name
                    for name, each in provider.masters().items()
                    if keeps_residual(self.device, codec_there, each, gpu_staging_bytes)
                )
            self.on_device = OnDevice(self.device, codec_there, room, gpu_staging_bytes, narrowed, kept, self.gate)

    def key(self, generation: int, version: int, rank: int) -> ShardKey:
        return ShardKey.differential(generation, version, version, rank)

    @property
    def nbytes_max(self) -> int:
        return self.room.nbytes + self._beside_nbytes(self.host_nbytes_max, self._buffers())

    @property
    def nbytes_unexpected(self) -> int:
        return self.nbytes_max - self.room.nbytes + self.room.nbytes_most

    @property
    def nbytes_expected(self) -> int:
        beside_nbytes = self._beside_nbytes(self.host_nbytes, self._buffers(), record_nbytes=self.host_nbytes)
        return self.room.nbytes + beside_nbytes

    def begin(self, key: ShardKey, memory: memoryview) -> DifferentialCapture:
        buffers = self._buffers()
        header_nbytes = header_beside(buffers)
        beside_nbytes = self._beside_nbytes(self.host_nbytes_max, buffers) - header_nbytes
        return DifferentialCapture(self, key, memory, self.room.header_nbytes + header_nbytes, beside_nbytes)

    def leave_out(self, gradients: Mapping[str, torch.Tensor], version: int) -> None:
        """Training must not depend on what is recorded: where it uses the compressed gradients, it does so all the
        same."""
        if self.encoder.train_on_compressed:
            for name, gradient in gradients.items():
                self.encoder.encode(name, gradient, seed=version, slot=scratch)

    def mark_recorded(self) -> None:
        """As ever. Residuals that belong to the chain of differentials begin anew: the base holds what they stand for,
        and a record of it would count twice."""
        self.bases_begun += 1
        if not self.defers:  # else records before this one may still be encoded
            self.encoder.base_begun()
        super().mark_recorded()

    def forget_residuals(self, bases_begun: int) -> None:
        """The next record that is encoded comes after so many bases."""
        if bases_begun != self._forgotten_at:
            self._forgotten_at = bases_begun
            self.encoder.base_begun()

    def saved_with_bases(self) -> Mapping[str, torch.Tensor]:
        return self.encoder.saved_with_bases()

    def load(self, residuals: Mapping[str, torch.Tensor]) -> None:
        self.encoder.load(residuals)

    def audit(self, host_state: PackedObject, *, fresh: bool) -> dict[str, Any] | None:
        """Of the state as it is now: see :func:`~tiercheck.streams.records.audit.audit_of`. ``fresh``:
        :attr:`contents` is as of now."""
        known = self.contents if fresh and self.contents is not None else {}
        return audit_of(self.provider, host_state, known, self._audit_nbytes)

    def _buffers(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(buffer_prefix(0) + name, dtype_name(tensor, name), tuple(tensor.shape))
            for name, tensor in self.provider.buffers().items()
        )

    def _beside_nbytes(
        self, host_nbytes: int, buffers: tuple[TensorSpec, ...], record_nbytes: int | None = None
    ) -> int:
        """Bytes, at most, of what a record holds beside the gradients: buffers, objects, and their header."""
        if record_nbytes is None:
            usual = 512 * (self.room.count + len(buffers))
            record_nbytes = RECORD_SPARE_BYTES + max(usual, round_up(self.record_nbytes))
        sizes = [*(spec.nbytes for spec in buffers), record_nbytes, host_nbytes, self._audit_nbytes]
        return header_beside(buffers) + sum(map(round_up, sizes))


@lru_cache(maxsize=8)
def header_beside(buffers: tuple[TensorSpec, ...]) -> int:
    """The header's room for these and a record's objects. Asked for at each version, of the same buffers."""
    return header_room(buffers, (record_name(0), host_name(0), audit_name(0)))

"""The differential stream: every iteration, the gradients that took the optimizer from version v-1 to v.

A shard of the stream holds one version, or a batch of consecutive ones; names carry the version, so that a
batch is the concatenation of its records. Of version v there are

- ``V/gradient/NAME`` (and ``#PART`` where the codec stores several): the gradient of a master, encoded,
- ``V/buffer/NAME``: a persistent buffer that has changed since it was last recorded,

and the objects ``V/record`` (whether the step was skipped, the options each parameter group stepped with, how
each gradient is encoded) and ``V/host`` (the host state at the end of iteration v).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from tiercheck import objects
from tiercheck.container import (
    PackedObject,
    Shard,
    ShardMetadata,
    ShardWriter,
    TensorEntry,
    TensorSpec,
    header_room,
    shard_nbytes,
)
from tiercheck.errors import Corruption, SaveError
from tiercheck.keys import ShardKey
from tiercheck.streams.codecs import CODECS, Codec, codec, decode
from tiercheck.streams.providers import StateProvider
from tiercheck.streams.tensors import array_of, counters, dtype_name, tensor_in, tensor_of
from tiercheck.types import Fidelity

__all__ = ["Differential", "DifferentialCapture", "DifferentialStream", "read_differentials"]

HOST_BYTES_SPARE = 64 << 10
"""Room beyond twice the last host state, which may grow from one version to the next. Little: what a reservation
has too much is allocated afresh each time."""


@dataclass(frozen=True)
class Differential:
    """One version's record, decoded on demand. Errors of all methods: ``Corruption``."""

    version: int
    skipped: bool
    hyperparameters: list[dict[str, Any]]
    """Per parameter group, the options the step ran with."""
    host_state: Mapping[str, Any]
    _encodings: Mapping[str, Mapping[str, Any]]
    _shard: Shard

    @property
    def codecs(self) -> frozenset[str]:
        return frozenset(encoding["codec"] for encoding in self._encodings.values())

    @property
    def fidelity(self) -> Fidelity:
        known = [CODECS[name].fidelity for name in self.codecs if name in CODECS]
        return Fidelity.worst(*known) if len(known) == len(self.codecs) else Fidelity.APPROXIMATE

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by master; perhaps read-only views of the shard."""
        return {
            name: tensor_of(decode(encoding, self._parts(name, encoding)), encoding["dtype"])
            for name, encoding in self._encodings.items()
        }

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers recorded at this version."""
        prefix = f"{stamp(self.version)}/buffer/"
        found: dict[str, torch.Tensor] = {}
        for name in self._shard.names:
            if name.startswith(prefix):
                entry = self._shard.entry(name)
                found[name.removeprefix(prefix)] = tensor_in(
                    memoryview(entry.data), entry.dtype, entry.shape, what=name
                )
        return found

    def _parts(self, name: str, encoding: Mapping[str, Any]) -> dict[str, TensorEntry]:
        parts: dict[str, TensorEntry] = {}
        for suffix in encoding["parts"]:
            tensor = gradient_name(self.version, name, suffix)
            if tensor not in self._shard:
                raise Corruption(f"the part {tensor!r} is missing", tier=self._shard.tier, key=self._shard.key)
            parts[suffix] = self._shard.entry(tensor)
        return parts


class DifferentialCapture:
    """Differential v on its way into the first tier's memory: :meth:`add` gradients, then :meth:`finish`."""

    def __init__(self, stream: DifferentialStream, key: ShardKey, memory: memoryview, header_nbytes: int) -> None:
        self._stream = stream
        self._key = key
        self._writer = ShardWriter(memory, header_nbytes)
        self._hyperparameters = stream.provider.hyperparameters()
        self._encodings: dict[str, dict[str, Any]] = {}

    def add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Encode gradients (by master, in the master's shape) into the tier's memory. They are free on return.

        Errors: ``SaveError`` for a gradient that is no master's, or came already.
        """
        version = self._key.first
        for name, gradient in gradients.items():
            spec = self._stream.masters.get(name)
            if spec is None or spec.shape != tuple(gradient.shape):
                raise SaveError(f"there is no trained tensor {name!r} of shape {tuple(gradient.shape)}")
            if name in self._encodings:
                raise SaveError(f"the gradient of {name!r} came twice in iteration {version}")

            def slot(suffix: str, dtype: str, shape: tuple[int, ...], name: str = name) -> memoryview:
                return self._writer.slot(gradient_name(version, name, suffix), dtype, shape)

            encoding = self._stream.codec.encode(
                array_of(gradient), dtype_name(gradient, name), seed=version, slot=slot
            )
            self._encodings[name] = encoding.to_object()

    def finish(self, *, skipped: bool) -> int:
        """Add the host state as of now, and close the shard; returns its length in bytes."""
        version = stamp(self._key.first)
        for name, tensor in self._stream.changed_buffers().items():
            dtype, shape = dtype_name(tensor, name), tuple(tensor.shape)
            memory = self._writer.slot(f"{version}/buffer/{name}", dtype, shape)
            tensor_in(memory, dtype, shape, what=name).copy_(tensor)
        record = {
            "skipped": skipped,
            "hyperparameters": self._hyperparameters,
            "gradients": self._encodings,
        }
        self._writer.add_object(f"{version}/record", record)
        self._writer.add_object(f"{version}/host", self._stream.packed_host_state())
        key = self._key
        nbytes = self._writer.finish(
            ShardMetadata(key.stream, key.generation, key.first, key.last, key.rank, self._stream.world_size)
        )
        del self._writer  # the tier reuses the memory only when nobody has a view of it
        return nbytes


class DifferentialStream:
    """What one rank's differentials have in common: the codec, the room they take, what was recorded last."""

    def __init__(self, provider: StateProvider, codec_name: str, world_size: int) -> None:
        self.provider = provider
        self.codec: Codec = codec(codec_name)
        self.world_size = world_size
        self.masters = {
            name: TensorSpec(name, dtype_name(tensor, name), tuple(tensor.shape))
            for name, tensor in provider.masters().items()
        }
        gradients = [
            TensorSpec(gradient_name(0, name, part.suffix), part.dtype, part.shape)
            for name, spec in self.masters.items()
            for part in self.codec.plan(spec.dtype, spec.shape)
        ]
        # The masters never change, so the room of their gradients is worked out once and not at every step.
        self._gradients = len(gradients)
        self._gradients_nbytes = shard_nbytes(gradients)
        self._gradients_header_nbytes = header_room(gradients)
        self._recorded: dict[str, str] = {}
        self._frozen: dict[str, tuple[int, int]] = {}
        self._stepped: dict[str, tuple[int, int]] = {}
        self.host_nbytes = 0
        """The length of the last host state."""
        self.packed_host_state()
        self.mark_recorded()
        self.mark_stepped()

    @property
    def nbytes_max(self) -> int:
        """Bytes to reserve for one record: its published part is shorter."""
        buffers, held = self._others()
        return self._gradients_nbytes + shard_nbytes(buffers, held)

    @property
    def nbytes_expected(self) -> int:
        """About the bytes that one record keeps, at most, once it is published."""
        buffers, held = self._others()
        return self._gradients_nbytes + shard_nbytes(buffers, dict.fromkeys(held, self.host_nbytes))

    def begin(self, key: ShardKey, memory: memoryview) -> DifferentialCapture:
        """Start a record in ``memory``, of at least :attr:`nbytes_max` bytes, before the step."""
        return DifferentialCapture(self, key, memory, self._gradients_header_nbytes + header_room(*self._others()))

    def mark_recorded(self) -> None:
        """Buffers and frozen parameters as they are now are in a base: only what changes from here on matters."""
        self._recorded = {name: content_of(tensor) for name, tensor in self.provider.buffers().items()}
        self._frozen = self._frozen_now()

    def frozen_changed(self) -> bool:
        """Whether a parameter that no optimizer updates was written to since the last base: then a base is due,
        for differentials do not hold it. Told by torch's counter of in-place changes, which ``.data`` bypasses."""
        return self._frozen_now() != self._frozen

    def mark_stepped(self) -> None:
        """The masters are as the optimizer's step, or a recovery, left them."""
        self._stepped = counters(self.provider.masters())

    def masters_written(self) -> bool:
        """Whether anything but the optimizer has written to a master since then: then no replay of gradients leads to
        what it holds. Told as in :meth:`frozen_changed`."""
        return counters(self.provider.masters()) != self._stepped

    def changed_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that differ from what was recorded; they count as recorded then."""
        changed: dict[str, torch.Tensor] = {}
        for name, tensor in self.provider.buffers().items():
            content = content_of(tensor)
            if self._recorded.get(name) != content:
                changed[name] = tensor
                self._recorded[name] = content
        return changed

    def _frozen_now(self) -> dict[str, tuple[int, int]]:
        buffers = self.provider.buffers()
        return counters({name: tensor for name, tensor in self.provider.extras().items() if name not in buffers})

    def packed_host_state(self) -> PackedObject:
        """Errors: :class:`tiercheck.objects.Unstorable`, naming the path of what cannot be stored."""
        packed = objects.pack(self.provider.host_state(), name="host state")
        self.host_nbytes = len(packed)
        return PackedObject(packed)

    def _others(self) -> tuple[list[TensorSpec], dict[str, int]]:
        """Upper bounds of what a record holds beside the gradients: its buffers, and the bytes of its objects."""
        version = stamp(0)
        buffers = [
            TensorSpec(f"{version}/buffer/{name}", dtype_name(tensor, name), tuple(tensor.shape))
            for name, tensor in self.provider.buffers().items()
        ]
        record_nbytes = HOST_BYTES_SPARE + 512 * (self._gradients + len(buffers))
        host_nbytes = HOST_BYTES_SPARE + 2 * self.host_nbytes
        return buffers, {f"{version}/record": record_nbytes, f"{version}/host": host_nbytes}


def read_differentials(shard: Shard, *, tier: str) -> list[Differential]:
    """The versions in a shard, oldest first. Errors: ``Corruption`` where a checksum or the layout is wrong."""
    found: list[Differential] = []
    for version in shard.metadata.key.versions:
        try:
            record: Any = shard.object(f"{stamp(version)}/record")
            host_state: Any = shard.object(f"{stamp(version)}/host")
            found.append(
                Differential(
                    version=version,
                    skipped=bool(record["skipped"]),
                    hyperparameters=list(record["hyperparameters"]),
                    host_state=host_state,
                    _encodings=dict(record["gradients"]),
                    _shard=shard,
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Corruption(f"the record of version {version} lacks {error}", tier=tier, key=shard.key) from error
    return found


def stamp(version: int) -> str:
    """How a version is written in the names of a record."""
    return f"{version:012d}"


def gradient_name(version: int, master: str, suffix: str) -> str:
    return f"{stamp(version)}/gradient/{master}" + (f"#{suffix}" if suffix else "")


def content_of(tensor: torch.Tensor) -> str:
    """A digest of the tensor's content."""
    return xxhash.xxh3_128_hexdigest(array_of(tensor).tobytes())

"""A differential as it was stored: one version's record, of which gradients are decoded when they are asked for.

:mod:`tiercheck.streams.records.differential` says what lies in its shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tiercheck.errors import Corruption
from tiercheck.format.container import Shard, TensorEntry, TensorSpec
from tiercheck.kernels import HalfGradient, SparseGradient
from tiercheck.streams.codecs import Encoding, decode, decode_as_stored, fidelity_of
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.records.record_names import buffer_prefix, gradient_parts, host_name, record_name
from tiercheck.streams.tensors.as_bytes import tensor_in, tensor_of
from tiercheck.types import Fidelity

__all__ = ["Differential", "read_differentials"]


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
    _read: dict[str, Encoding] = field(default_factory=dict, compare=False)
    """Of ``_encodings``, those that were asked for."""

    @property
    def codecs(self) -> frozenset[str]:
        return frozenset(encoding["codec"] for encoding in self._encodings.values())

    @property
    def fidelity(self) -> Fidelity:
        """The worst of its gradients; one that the optimizer stepped with as it was decoded is exact."""
        return Fidelity.worst(*map(fidelity_of, map(self.encoding, self._encodings)))

    @property
    def encodings(self) -> Mapping[str, Mapping[str, Any]]:
        """By master, how its gradient is encoded: the plain values of an ``Encoding``."""
        return self._encodings

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by master; perhaps read-only views of the shard."""
        return {name: self.gradient(name) for name in self._encodings}

    def gradient(self, master: str, *, threads: int = 1) -> torch.Tensor:
        """One of them, decoded by at most ``threads`` threads."""
        encoding = self.encoding(master)
        return tensor_of(decode(encoding, self._parts(encoding, master), threads=threads), encoding.dtype)

    def gradient_as_stored(self, master: str, *, threads: int = 1) -> torch.Tensor | SparseGradient | HalfGradient:
        """The same without its zeros if it is stored sparsely, and as it is stored if that is fp32 in half precision:
        that is decoded where it is used, and takes no memory of its own."""
        encoding = self.encoding(master)
        found = decode_as_stored(encoding, self._parts(encoding, master), threads=threads)
        return tensor_of(found, encoding.dtype) if isinstance(found, np.ndarray) else found

    def encoding(self, master: str) -> Encoding:
        """How its gradient is encoded."""
        if master not in self._read:
            self._read[master] = Encoding.from_object(self._encodings[master])
        return self._read[master]

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers recorded at this version."""
        prefix = buffer_prefix(self.version)
        found: dict[str, torch.Tensor] = {}
        for name in self._shard.names:
            if name.startswith(prefix):
                entry = self._shard.entry(name)
                found[name.removeprefix(prefix)] = tensor_in(
                    memoryview(entry.data), entry.dtype, entry.shape, what=name
                )
        return found

    def is_whole(self) -> bool:
        """Whether every byte of its shard is one that was written."""
        try:
            self._shard.verify()
        except Corruption:
            return False
        return True

    def buffer_specs(self) -> list[TensorSpec]:
        """Of :meth:`buffers`, by the buffers' own names, without reading them."""
        prefix = buffer_prefix(self.version)
        specs = [spec for spec in self._shard.specs if spec.name.startswith(prefix)]
        return [TensorSpec(spec.name.removeprefix(prefix), spec.dtype, spec.shape) for spec in specs]

    def _parts(self, encoding: Encoding, master: str) -> dict[str, TensorEntry]:
        return gradient_parts(self._shard, self.version, master, encoding.parts)


def read_differentials(shard: Shard, *, tier: str) -> list[Differential]:
    """The versions in a shard, oldest first. Errors: ``Corruption`` if a checksum or the layout is wrong."""
    found: list[Differential] = []
    for version in shard.metadata.key.versions:
        try:
            record: Any = shard.object(record_name(version))
            host_state: Any = shard.object(host_name(version))
            Doubts.of(host_state)
            if not isinstance(record["skipped"], bool):
                raise ValueError("whether the step was skipped")
            found.append(
                Differential(
                    version=version,
                    skipped=record["skipped"],
                    hyperparameters=list(record["hyperparameters"]),
                    host_state=host_state,
                    _encodings=dict(record["gradients"]),
                    _shard=shard,
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Corruption(f"the record of version {version} lacks {error}", tier=tier, key=shard.key) from error
    return found

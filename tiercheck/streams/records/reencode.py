"""Differentials in another codec, on their way into a slower tier.

Encoding takes time that a training step does not have, and the mover does. So the first tier can take gradients as they
are, and a tier behind a narrow wire hold them with their exponents coded, or without their zeros.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.format.container import Shard, TensorEntry
from tiercheck.streams.codecs import DTYPES, Encoding, codec, codec_names, decode
from tiercheck.streams.codecs.exact import Exact
from tiercheck.streams.records.merge import ShardContents, as_stored
from tiercheck.streams.records.record_names import gradient_name, gradient_parts, record_name
from tiercheck.types import Fidelity

__all__ = ["check_codec_of_tier", "reencoded"]


def check_codec_of_tier(name: str, tier: str) -> None:
    """Errors: ``ConfigurationError`` for a codec that there is not, or that does not keep every bit."""
    if codec(name).fidelity is Fidelity.EXACT:
        return
    exact = ", ".join(codec_names(Fidelity.EXACT))
    raise ConfigurationError(
        f"the codec {name!r} of the tier {tier} loses bits: ranks that recover from different tiers would go on from "
        f"different states. A tier's own codec is one of {exact}; to lose bits everywhere, use "
        f"CheckpointConfig(codec={name!r})"
    )


def reencoded(shard: Shard, codec_name: str) -> ShardContents:
    """What a shard of differentials holds, its ``exact`` gradients in the codec ``codec_name``, which keeps every bit.

    Each gradient decodes to the bits that it decoded to before. One that was captured in another codec stays as it is,
    also one that the codec would make longer, and all that is no gradient. What is decoded is verified; the rest keeps
    its checksum. Takes the memory of what it encodes. Errors: ``Corruption`` naming the shard.
    """
    wanted, stored = codec(codec_name), as_stored(shard)
    objects, encoded, replaced = dict(stored.objects), list[TensorEntry](), set[str]()
    try:
        for version in shard.metadata.key.versions:
            record: Any = shard.object(record_name(version))
            encodings: dict[str, Any] = dict(record["gradients"])
            for master, description in encodings.items():
                encoding = Encoding.from_object(description)
                if encoding.codec != Exact.name:
                    continue
                parts = gradient_parts(shard, version, master, encoding.parts)
                slots = Slots(version, master)
                made = wanted.encode(decode(description, parts), encoding.dtype, seed=version, slot=slots)
                if slots.nbytes > sum(part.spec.nbytes for part in parts.values()):
                    continue  # such as half-precision numbers that are stored with the factor of their clipping
                encodings[master] = made.to_object()
                encoded += slots.entries()
                replaced.update(part.name for part in parts.values())
            objects[record_name(version)] = {**record, "gradients": encodings}
    except Corruption as error:
        raise Corruption(error.message, tier=shard.tier, key=shard.key) from error
    except (KeyError, TypeError, ValueError) as error:
        raise Corruption(f"a record in it cannot be read: {error}", tier=shard.tier, key=shard.key) from error
    kept = [entry for entry in stored.tensors if entry.name not in replaced]
    return ShardContents(stored.metadata, [*kept, *encoded], objects)


class Slots:
    """Memory for the parts of one gradient, and afterwards the parts: a :data:`~tiercheck.streams.codecs.Slot`."""

    def __init__(self, version: int, master: str) -> None:
        self._version = version
        self._master = master
        self._parts: list[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]] = []

    def __call__(self, suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        memory = np.empty(math.prod(shape) * DTYPES[dtype].itemsize, np.uint8)
        self._parts.append((gradient_name(self._version, self._master, suffix), dtype, tuple(shape), memory))
        return memory.data

    @property
    def nbytes(self) -> int:
        return sum(memory.size for *_, memory in self._parts)

    def entries(self) -> list[TensorEntry]:
        return [TensorEntry(name, dtype, shape, memory.data) for name, dtype, shape, memory in self._parts]

"""Codecs: how a differential's tensors become parts of a shard, and back.

A codec works on NumPy arrays. A dtype is named as safetensors names it; if NumPy lacks one, the array holds its
patterns (``BF16``: uint16, ``F8_*``: uint8). Encoded parts go straight into the memory that the caller's ``slot``
hands out, which may lie inside a tier. What :meth:`Encoding.to_object` returns describes an encoded tensor well
enough to decode it; it goes into the shard's msgpack object.

:class:`Codec` is the contract, and ``docs/how-to/write-a-codec.md`` says how to write one. Whatever a shard says is
checked before it is believed: malformed parts raise :class:`~tiercheck.errors.Corruption`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError
from tiercheck.kernels import HalfGradient, SparseGradient
from tiercheck.streams.codecs.encoding import DTYPES, FLOATS, Codec, Encoding, Part, Slot, StoredPart
from tiercheck.streams.codecs.registry import codec, codec_names, registered
from tiercheck.types import Fidelity, shown

__all__ = [
    "DTYPES",
    "FLOATS",
    "Codec",
    "Encoding",
    "Part",
    "Slot",
    "StoredPart",
    "codec",
    "codec_names",
    "codec_of",
    "decode",
    "decode_as_stored",
    "decode_sparse",
    "fidelity_of",
    "registered",
]


def decode(description: object, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
    """The tensor that :meth:`Encoding.to_object` describes, from its parts by suffix.

    ``threads``: the most that may run, the caller's included; the result does not depend on it.
    Errors: ``Corruption`` for a description or parts that no codec wrote; ``ConfigurationError`` for a codec that is
    not installed: the parts may be sound.
    """
    encoding = Encoding.from_object(description)
    return codec_of(encoding).decode(encoding, parts, threads=threads)


def decode_sparse(description: object, parts: Mapping[str, StoredPart], *, threads: int = 1) -> SparseGradient | None:
    """The stored elements of a tensor that is stored sparsely; ``None`` if :func:`decode` is to be used.

    Errors: as for :func:`decode`.
    """
    encoding = Encoding.from_object(description)
    return codec_of(encoding).decode_sparse(encoding, parts, threads=threads)


def decode_as_stored(
    description: object, parts: Mapping[str, StoredPart], *, threads: int = 1
) -> NDArray[Any] | SparseGradient | HalfGradient:
    """What a replay needs of the tensor: the stored elements if it is stored sparsely, or as fp32 in half precision;
    else as :func:`decode`. Errors: as there.
    """
    encoding = Encoding.from_object(description)
    chosen = codec_of(encoding)
    stored = chosen.decode_sparse(encoding, parts, threads=threads) or chosen.decode_half(encoding, parts)
    return chosen.decode(encoding, parts, threads=threads) if stored is None else stored


def fidelity_of(description: object) -> Fidelity:
    """What a tensor is worth that is described so.

    It is exact where its codec is, and where the optimizer stepped with the very tensor that it decodes to
    (:attr:`Encoding.trained_on`): what is exact *if* trained on is exact once it was. Otherwise it is what its codec
    declares, and approximate where the codec is not installed. Errors: ``Corruption`` for what describes nothing.
    """
    encoding = Encoding.from_object(description)
    try:
        declared = codec(encoding.codec).fidelity
    except ConfigurationError:
        return Fidelity.APPROXIMATE
    return Fidelity.EXACT if encoding.trained_on else declared


def codec_of(encoding: Encoding) -> Codec:
    """The codec that made it. Errors: ``ConfigurationError`` saying what to install."""
    try:
        return codec(encoding.codec)
    except ConfigurationError as error:
        raise ConfigurationError(f"a tensor was encoded by {shown(encoding.codec)}: {error}") from error

"""Codecs: how a differential's tensors become parts of a shard, and back.

A codec works on NumPy arrays. A dtype is named as safetensors names it; where NumPy lacks one, the array holds its
patterns (``BF16``: uint16, ``F8_*``: uint8). Encoded parts go straight into the memory that the caller's ``slot``
hands out, which may lie inside a tier. What :meth:`Encoding.to_object` returns describes an encoded tensor well
enough to decode it; it goes into the shard's msgpack object.

Whatever a shard says is checked before it is believed: malformed parts raise :class:`~tiercheck.errors.Corruption`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError
from tiercheck.kernels import SparseGradient
from tiercheck.streams.codecs.adaptive import Adaptive, Feedback
from tiercheck.streams.codecs.blocks import Int8, Nf4, OneBit
from tiercheck.streams.codecs.encoding import DTYPES, FLOATS, Codec, Encoding, Part, Slot, StoredPart
from tiercheck.streams.codecs.entropy import ExactEntropy
from tiercheck.streams.codecs.exact import Exact
from tiercheck.streams.codecs.nonzero import Nonzero
from tiercheck.streams.codecs.sparse import EXPONENT_MAX, Sparse
from tiercheck.types import Fidelity

__all__ = [
    "CODECS",
    "DTYPES",
    "EXPONENT_MAX",
    "FLOATS",
    "Adaptive",
    "Codec",
    "Encoding",
    "Exact",
    "ExactEntropy",
    "Feedback",
    "Int8",
    "Nf4",
    "Nonzero",
    "OneBit",
    "Part",
    "Slot",
    "Sparse",
    "StoredPart",
    "codec",
    "decode",
    "decode_sparse",
    "fidelity_of",
]


def _all_codecs() -> dict[str, Codec]:
    exact, int8, sparse = Exact(), Int8(), Sparse()
    lossy = (int8, Nf4(), OneBit(), sparse, Adaptive(small=int8, large=sparse, other=exact))
    lossless = (exact, ExactEntropy(exact), Nonzero(exact))
    return {each.name: each for each in (*lossless, *lossy, *map(Feedback, lossy))}


CODECS: Mapping[str, Codec] = MappingProxyType(_all_codecs())
"""Every codec by name."""


def codec(name: str) -> Codec:
    """The codec of this name. Errors: ``ConfigurationError`` listing the names."""
    try:
        return CODECS[name]
    except KeyError:
        close = difflib.get_close_matches(name, CODECS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigurationError(f"there is no codec {name!r}: choose one of {', '.join(CODECS)}{hint}") from None


def decode(description: object, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
    """The tensor that :meth:`Encoding.to_object` describes, from its parts by suffix.

    ``threads``: the most that may run, the caller's included; the result does not depend on it.
    Errors: ``Corruption`` for a description or parts that no codec wrote; ``ConfigurationError`` for a codec that this
    version lacks, since another version may have it and the parts be sound.
    """
    encoding = Encoding.from_object(description)
    return _codec_of(encoding).decode(encoding, parts, threads=threads)


def decode_sparse(description: object, parts: Mapping[str, StoredPart], *, threads: int = 1) -> SparseGradient | None:
    """The stored elements of a tensor that is stored sparsely; ``None`` where :func:`decode` is to be used.

    Errors: as for :func:`decode`.
    """
    encoding = Encoding.from_object(description)
    return _codec_of(encoding).decode_sparse(encoding, parts, threads=threads)


def fidelity_of(description: object) -> Fidelity:
    """What a tensor is worth that is described so.

    It is exact where its codec is, and where the optimizer stepped with the very tensor that it decodes to
    (:attr:`Encoding.trained_on`): what is exact *if* trained on is exact once it was. Otherwise it is what its codec
    declares, and approximate where this version lacks the codec. Errors: ``Corruption`` for what describes nothing.
    """
    encoding = Encoding.from_object(description)
    if encoding.codec not in CODECS:
        return Fidelity.APPROXIMATE
    return Fidelity.EXACT if encoding.trained_on else CODECS[encoding.codec].fidelity


def _codec_of(encoding: Encoding) -> Codec:
    if encoding.codec not in CODECS:
        raise ConfigurationError(
            f"a tensor was encoded by {encoding.codec!r:.80}, and this version of TierCheck has {', '.join(CODECS)}"
        )
    return CODECS[encoding.codec]

"""What a codec is, what it makes of a tensor, and how that is described in a shard."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Protocol, cast

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from tiercheck import schema
from tiercheck.errors import Corruption
from tiercheck.kernels import HalfGradient, Kernel, SparseGradient
from tiercheck.named import format_text, options_of
from tiercheck.types import Buffer, Fidelity

__all__ = ["DTYPES", "ELEMENTS_MAX", "FLOATS", "Codec", "Encoding", "Part", "Slot", "StoredPart"]

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        **{name: np.dtype(f"<f{size}") for name, size in (("F64", 8), ("F32", 4), ("F16", 2))},
        **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
        **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
        **{"BF16": np.dtype("<u2"), "BOOL": np.dtype("?"), "C64": np.dtype("<c8"), "C128": np.dtype("<c16")},
        **{name: np.dtype("u1") for name in ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")},
    }
)
"""The NumPy dtype that holds a tensor of each named dtype."""

FLOATS = MappingProxyType({name: DTYPES[name] for name in ("F32", "BF16", "F16")})
"""What the approximate codecs encode."""

DIMENSIONS_MAX = 64
ELEMENTS_MAX = 2**48
"""No tensor has more elements; a shape that says so is malformed."""

Slot = Callable[[str, str, tuple[int, ...]], memoryview]
"""``slot(suffix, dtype, shape)``: writable memory of exactly that part's size, format ``B``."""


@dataclass(frozen=True)
class Part:
    """A tensor that a codec stores for one it encodes. ``suffix`` tells the parts of one tensor apart."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class StoredPart(Protocol):
    """A part as it was read: :class:`tiercheck.format.container.TensorEntry` is one."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> Buffer: ...


@dataclass(frozen=True)
class Encoding:
    """What an encoded tensor was, and how to decode it."""

    codec: str
    """The text that names the codec, with its options: :attr:`Codec.text`."""
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """The suffixes of its parts, in the order in which they were written."""
    scalars: Mapping[str, int] = field(default_factory=dict)
    trained_on: bool = False
    """Whether the optimizer stepped with the very tensor that this decodes to: then nothing was lost by encoding it."""
    checksums: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By suffix, the checksums of those parts that the codec hashed while it wrote them
    (:func:`tiercheck.format.container.checksum_of`). They go into the shard's header, not into the description."""

    def to_object(self) -> dict[str, Any]:
        """Its description in a shard, as plain values. ``trained_on`` is there only if it is true."""
        shape, parts, scalars = list(self.shape), list(self.parts), dict(self.scalars)
        described = Description(self.codec, self.dtype, shape, parts, scalars, self.trained_on)
        return cast(dict[str, Any], msgspec.to_builtins(described))

    @classmethod
    def from_object(cls, value: object) -> Encoding:
        """The inverse. Errors: ``Corruption`` for anything that :meth:`to_object` does not return. An encoding is what
        it says."""
        if isinstance(value, Encoding):
            return value
        try:
            read = schema.read(Description, value)
        except ValueError as error:
            raise Corruption(f"an encoded tensor's description is malformed: {error}") from None
        if read.dtype not in DTYPES:
            raise Corruption(f"an encoded tensor's description names the dtype {read.dtype!r:.80}")
        if math.prod(read.shape) > ELEMENTS_MAX:
            raise Corruption(f"an encoded tensor's shape is {read.shape!r:.80}, larger than any tensor")
        return cls(read.codec, read.dtype, tuple(read.shape), tuple(read.parts), read.scalars, read.trained_on)


@schema.ready
class Description(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a shard says of an encoded tensor. An unknown field may change what the bytes mean, and is refused."""

    codec: str
    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=ELEMENTS_MAX)]], Meta(max_length=DIMENSIONS_MAX)]
    parts: list[str]
    scalars: dict[str, int]
    trained_on: bool = False


@dataclass(frozen=True)
class Codec(abc.ABC):
    """One way to encode tensors. Stateless: any number of threads may share one.

    A codec is a class registered under its :attr:`name` in the entry-point group ``tiercheck.codecs``. Its options are
    the fields of the class, which is then a frozen dataclass: ``sparse?ratio=0.001`` makes ``Sparse(ratio=0.001)``.
    ``__post_init__`` raises ``ValueError`` for an option out of range. What an option means never changes: shards carry
    the text of the codec that encoded them, and it decodes them.

    An exact codec may encode gradients again on their way to a tier (``Tier(url, codec=...)``). A batch holds the
    encodings of its versions as they are, so that merging concerns no codec.
    """

    name: ClassVar[str]
    """The name of the entry point."""
    fidelity: ClassVar[Fidelity]
    """What a tensor is worth that was encoded so, unless training used what it decodes to
    (:attr:`Encoding.trained_on`)."""
    dtypes: ClassVar[Mapping[str, np.dtype[Any]]] = FLOATS
    """What it encodes."""
    feedback: ClassVar[bool] = False
    """Whether :meth:`encode` takes a residual. Then there is also ``NAME+feedback``."""

    @cached_property
    def text(self) -> str:
        """What :func:`tiercheck.streams.codecs.codec` makes this codec from: name and options."""
        return format_text(self.name, options_of(self, f"codec {self.name!r}"))

    def bound(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """The most by which each of these values (1-D) may be off when it is decoded; infinity promises nothing.

        That is beside the rounding into the tensor's dtype. A value that is not finite comes back so, unless the
        bound is infinite there. Exact codecs promise zero, and do not override this.
        """
        return np.zeros(values.size)

    @abc.abstractmethod
    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        """Upper bounds of the parts of such a tensor, known before there is one.

        :meth:`encode` writes at most so many parts, and altogether at most so many bytes, also if each is
        rounded up to an alignment; a part's dtype may be another one, of four letters at most.
        Errors: ``ConfigurationError`` for a dtype or size that the codec cannot encode.
        """

    @abc.abstractmethod
    def encode(
        self,
        array: NDArray[Any],
        dtype: str,
        *,
        seed: int,
        slot: Slot,
        residual: NDArray[np.float32] | None = None,
        threads: int = 1,
    ) -> Encoding:
        """Encode ``array`` (any shape and strides, holding ``dtype``) into memory from ``slot``.

        Deterministic for (array, dtype, seed, residual), whatever ``threads`` is: the most threads that run, the
        caller's included. ``slot`` is called once a part, with the part's final size.

        ``residual`` (1-D, contiguous, writable, of the array's size, in the order of its elements in C) is what earlier
        encodings lost. What is encoded is ``array + residual``, one addition an element in fp32, and ``residual``
        becomes what this encoding loses of that: its difference to what :meth:`decode` will return, zero if that
        is not finite. Exact codecs lose nothing and take none.

        Source of error feedback: Seide et al., *1-bit stochastic gradient descent* (2014); Karimireddy et al., *Error
        feedback fixes SignSGD* (2019), algorithm 1.

        Errors: ``ConfigurationError`` as for :meth:`plan`; ``ValueError`` for an array that does not hold ``dtype``,
        memory or a residual of the wrong size.
        """

    @abc.abstractmethod
    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
        """The tensor, in its dtype and shape, perhaps a read-only view of a part. Errors: ``Corruption``."""

    def decode_sparse(
        self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1
    ) -> SparseGradient | None:
        """The elements of :meth:`decode`'s tensor that are stored, by their flat index, as fp32; the others are zero.

        ``None`` if the tensor is stored densely, or is too large for 32-bit indices: use :meth:`decode`. Errors:
        ``Corruption``.
        """
        return None

    def decode_half(self, encoding: Encoding, parts: Mapping[str, StoredPart]) -> HalfGradient | None:
        """The elements of :meth:`decode`'s tensor, if that is fp32 and all of them are stored in half precision: views
        of a part. ``None`` if they are not: use :meth:`decode`. Errors: ``Corruption``.
        """
        return None

    def residual_size(self, dtype: str, shape: Sequence[int]) -> int:
        """Elements of the residual that :meth:`encode` needs for such a tensor; 0: it runs without."""
        return 0

    def kernels_used(self) -> tuple[Kernel[..., Any], ...]:
        """Every kernel that :meth:`encode`, :meth:`decode` and :meth:`decode_sparse` may call.

        They are compiled before the first step, so that none compiles while training waits. A codec of another
        distribution declares its own: ``Kernel(reference, cpu="package.module", examples=...)``.
        """
        return ()

"""Codecs: how a differential's tensors become parts of a shard, and back.

A codec works on NumPy arrays. A dtype is named as safetensors names it; where NumPy lacks one, the array holds its
patterns (``BF16``: uint16, ``F8_*``: uint8). Encoded parts go straight into the memory that the caller's ``slot``
hands out, which may lie inside a tier. What :meth:`Encoding.to_object` returns describes an encoded tensor well
enough to decode it; it goes into the shard's msgpack object.

Whatever a shard says is checked before it is believed: malformed parts raise :class:`~tiercheck.errors.Corruption`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.types import Buffer, Fidelity

__all__ = [
    "CODECS",
    "DTYPES",
    "Adaptive",
    "Codec",
    "Encoding",
    "Exact",
    "Int8",
    "Part",
    "Slot",
    "Sparse",
    "StoredPart",
    "codec",
    "decode",
]

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

ELEMENTS_MAX = 2**48
"""No tensor has more elements; a shape that says so is malformed."""

EXPONENT_MAX = 15 + 149
"""The scale of a tensor whose largest element is the smallest denormal of fp32."""

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
    """A part as it was read: :class:`tiercheck.container.TensorEntry` is one."""

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
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """The suffixes of its parts, in the order in which they were written."""
    scalars: Mapping[str, int] = field(default_factory=dict)

    def to_object(self) -> dict[str, Any]:
        """Plain values for msgpack."""
        return {
            "codec": self.codec,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "parts": list(self.parts),
            "scalars": dict(self.scalars),
        }

    @classmethod
    def from_object(cls, value: object) -> Encoding:
        """The inverse. Errors: ``Corruption`` for anything that :meth:`to_object` does not return."""
        if not isinstance(value, Mapping) or set(value) != {"codec", "dtype", "shape", "parts", "scalars"}:
            raise Corruption("an encoded tensor's description does not have the fields of one")
        name, dtype, shape, parts, scalars = (value[key] for key in ("codec", "dtype", "shape", "parts", "scalars"))
        if not (isinstance(name, str) and isinstance(dtype, str) and dtype in DTYPES):
            raise Corruption(f"an encoded tensor's description names the codec {name!r:.80} and dtype {dtype!r:.80}")
        if not (isinstance(shape, list | tuple) and all(type(size) is int and size >= 0 for size in shape)):
            raise Corruption(f"an encoded tensor's shape is {shape!r:.80}")
        if len(shape) > 64 or math.prod(shape) > ELEMENTS_MAX:
            raise Corruption(f"an encoded tensor's shape is {shape!r:.80}, larger than any tensor")
        if not (isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts)):
            raise Corruption(f"an encoded tensor's parts are {parts!r:.80}")
        if not (isinstance(scalars, Mapping) and all(type(each) is int for each in scalars.values())):
            raise Corruption(f"an encoded tensor's scalars are {scalars!r:.80}")
        return cls(name, dtype, tuple(shape), tuple(parts), dict(scalars))


class Codec(abc.ABC):
    """One way to encode tensors. Stateless: any number of threads may share one."""

    name: ClassVar[str]
    fidelity: ClassVar[Fidelity]

    @abc.abstractmethod
    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        """Upper bounds of the parts of such a tensor, known before there is one.

        :meth:`encode` writes these parts, none of more bytes; its dtype may be another one, of four letters at most.
        Errors: ``ConfigurationError`` for a dtype or size that the codec cannot encode.
        """

    @abc.abstractmethod
    def encode(self, array: NDArray[Any], dtype: str, *, seed: int, slot: Slot) -> Encoding:
        """Encode ``array`` (any shape and strides, holding ``dtype``) into memory from ``slot``.

        Deterministic for (array, dtype, seed). ``slot`` is called once a part, in the plan's order, with the part's
        final size.
        Errors: ``ConfigurationError`` as for :meth:`plan`; ``ValueError`` for an array that does not hold ``dtype``, or
        memory of the wrong size.
        """

    @abc.abstractmethod
    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart]) -> NDArray[Any]:
        """The tensor, in its dtype and shape, perhaps a read-only view of a part. Errors: ``Corruption``."""


class Exact(Codec):
    """The tensor as it is: every bit comes back, the payloads of NaNs included.

    An fp32 tensor whose values are all exactly bf16 (a gradient from bf16 training that was not rescaled) is
    stored as bf16, half the bytes.
    """

    name = "exact"
    fidelity = Fidelity.EXACT

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        check_dtype(dtype, DTYPES, self.name)
        return (Part("", dtype, tuple(shape)),)

    def encode(self, array: NDArray[Any], dtype: str, *, seed: int, slot: Slot) -> Encoding:
        check_dtype(dtype, DTYPES, self.name)
        check_array(array, dtype)
        flat = np.ascontiguousarray(array).reshape(-1)
        shape = tuple(array.shape)
        if dtype == "F32" and flat.size and kernels.is_bfloat16(flat):
            kernels.narrow_into(flat, slot_array(slot, Part("", "BF16", shape)))
        else:
            slot_array(slot, Part("", dtype, shape)).view(np.uint8)[:] = flat.view(np.uint8)
        return Encoding(self.name, dtype, shape, ("",))

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart]) -> NDArray[Any]:
        check_description(encoding, DTYPES, ())
        (part,) = check_parts(encoding, parts, ("",))
        narrowed = encoding.dtype == "F32" and part.dtype == "BF16"
        patterns = part_array(part, "BF16" if narrowed else encoding.dtype, encoding.shape)
        return kernels.widen(patterns.reshape(-1)).reshape(encoding.shape) if narrowed else patterns


class Int8(Codec):
    """Floats as 8-bit codes in blocks of 256 with one fp32 scale each: ``|error| <= scale / 2``, scale = maximum / 127.

    Every NaN and infinity comes back as NaN, and spoils no other element; ``nonfinite`` counts them.
    """

    name = "int8"
    fidelity = Fidelity.APPROXIMATE

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        check_dtype(dtype, FLOATS, self.name)
        size = math.prod(shape)
        return Part("codes", "I8", (size,)), Part("scales", "F32", (-(-size // kernels.BLOCK),))

    def encode(self, array: NDArray[Any], dtype: str, *, seed: int, slot: Slot) -> Encoding:
        planned = self.plan(dtype, array.shape)
        values = to_float32(array, dtype)
        codes, scales = (slot_array(slot, part) for part in planned)
        kernels.quantise_into(values, codes, scales)
        scalars = {"nonfinite": int(np.count_nonzero(codes == kernels.NONFINITE_CODE))}
        return Encoding(self.name, dtype, tuple(array.shape), ("codes", "scales"), scalars)

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart]) -> NDArray[Any]:
        check_description(encoding, FLOATS, ("nonfinite",))
        planned = self.plan(encoding.dtype, encoding.shape)
        stored = check_parts(encoding, parts, ("codes", "scales"))
        codes, scales = (part_array(part, plan.dtype, plan.shape) for part, plan in zip(stored, planned, strict=True))
        if not np.all(np.isfinite(scales) & (scales >= 0)):
            raise Corruption("a block's scale is negative or not finite")
        return from_float32(kernels.dequantise(codes, scales), encoding.dtype).reshape(encoding.shape)


class Sparse(Codec):
    """The elements of largest magnitude, a hundredth of them; the others come back as zero.

    Values are fp16 under a power-of-two scale for the tensor, which brings the largest to [2**14, 2**15): off by at
    most 2**-11 of themselves, or by 2**-39 of the largest. The threshold is estimated from samples; never more than
    1.25 times the ratio is kept, the largest of them, and of equal ones the first. NaNs and infinities count as the
    largest; they come back as NaN and infinity, and ``nonfinite`` counts those in the tensor.

    Source: Deep Gradient Compression (Lin et al., 2018); TierCheck's paper, for the ratio and the fp16 values.
    """

    name = "sparse"
    fidelity = Fidelity.APPROXIMATE
    ratio = 0.01

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        check_dtype(dtype, FLOATS, self.name)
        size = math.prod(shape)
        if size >= 2**32:
            raise ConfigurationError(f"the codec 'sparse' has 32-bit indices, and the tensor {size} elements: split it")
        capacity = min(size, math.ceil(1.25 * self.ratio * size))
        return Part("indices", "U32", (capacity,)), Part("values", "F16", (capacity,))

    def encode(self, array: NDArray[Any], dtype: str, *, seed: int, slot: Slot) -> Encoding:
        (capacity,) = self.plan(dtype, array.shape)[0].shape
        values = to_float32(array, dtype)
        indices, survivors = kernels.compact(values, kernels.select_threshold(values, self.ratio, seed))
        nonfinite = survivors.size - int(np.count_nonzero(np.isfinite(survivors)))
        if indices.size > capacity:
            indices, survivors = largest_of(indices, survivors, capacity)
        finite = np.abs(survivors[np.isfinite(survivors)])
        exponent = 15 - int(np.frexp(finite.max(initial=0))[1])
        with np.errstate(all="ignore"):
            halves = np.ldexp(survivors, exponent).astype(np.float16)
        slot_array(slot, Part("indices", "U32", indices.shape))[:] = indices
        slot_array(slot, Part("values", "F16", halves.shape))[:] = halves
        scalars = {"exponent": exponent, "nonfinite": nonfinite}
        return Encoding(self.name, dtype, tuple(array.shape), ("indices", "values"), scalars)

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart]) -> NDArray[Any]:
        check_description(encoding, FLOATS, ("exponent", "nonfinite"))
        exponent, size = encoding.scalars["exponent"], math.prod(encoding.shape)
        if size >= 2**32:
            raise Corruption(f"a sparse tensor has 32-bit indices, and this one {size} elements")
        if not -EXPONENT_MAX <= exponent <= EXPONENT_MAX:
            raise Corruption(f"the scale's exponent {exponent} is out of range")
        stored = check_parts(encoding, parts, ("indices", "values"))
        kept = stored[0].shape[0] if len(stored[0].shape) == 1 else -1
        if not 0 <= kept <= self.plan(encoding.dtype, encoding.shape)[0].shape[0]:
            raise Corruption(f"{list(stored[0].shape)!r:.80} indices are not of a tensor of {size} elements")
        indices = part_array(stored[0], "U32", (kept,))
        halves = part_array(stored[1], "F16", (kept,))
        if kept and (int(indices[-1]) >= size or not np.all(indices[1:] > indices[:-1])):
            raise Corruption(f"the indices of a tensor of {size} elements do not ascend within it")
        values = np.zeros(size, np.float32)
        with np.errstate(all="ignore"):
            values[indices] = np.ldexp(halves.astype(np.float32), -exponent)
        return from_float32(values, encoding.dtype).reshape(encoding.shape)


class Adaptive(Codec):
    """TierCheck's paper: ``int8`` for tensors of fewer than 100,000 elements, ``sparse`` from there on.

    What neither encodes (integers, doubles) is ``exact``. An encoding names the codec that was chosen.
    """

    name = "adaptive"
    fidelity = Fidelity.APPROXIMATE
    small_elements = 100_000

    def choose(self, dtype: str, shape: Sequence[int]) -> Codec:
        if dtype not in FLOATS:
            return CODECS["exact"]
        return CODECS["int8" if math.prod(shape) < self.small_elements else "sparse"]

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        return self.choose(dtype, shape).plan(dtype, shape)

    def encode(self, array: NDArray[Any], dtype: str, *, seed: int, slot: Slot) -> Encoding:
        return self.choose(dtype, array.shape).encode(array, dtype, seed=seed, slot=slot)

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart]) -> NDArray[Any]:
        raise Corruption("no tensor is encoded by 'adaptive' itself: it names the codec that it chose")


def decode(description: object, parts: Mapping[str, StoredPart]) -> NDArray[Any]:
    """The tensor that :meth:`Encoding.to_object` describes, from its parts by suffix.

    Errors: ``Corruption`` for a description or parts that no codec wrote; ``ConfigurationError`` for a codec that this
    version lacks, since another version may have it and the parts be sound.
    """
    encoding = Encoding.from_object(description)
    if encoding.codec not in CODECS:
        raise ConfigurationError(
            f"a tensor was encoded by {encoding.codec!r:.80}, and this version of TierCheck has {', '.join(CODECS)}"
        )
    return CODECS[encoding.codec].decode(encoding, parts)


def codec(name: str) -> Codec:
    """The codec of this name. Errors: ``ConfigurationError`` listing the names."""
    try:
        return CODECS[name]
    except KeyError:
        raise ConfigurationError(f"there is no codec {name!r}: choose one of {', '.join(CODECS)}") from None


def check_dtype(dtype: str, supported: Mapping[str, Any], name: str) -> None:
    if dtype not in supported:
        raise ConfigurationError(f"the codec {name!r} encodes {', '.join(supported)}, not {dtype!r}")


def check_array(array: NDArray[Any], dtype: str) -> None:
    if array.dtype != DTYPES[dtype]:
        raise ValueError(f"a {dtype} tensor is held by an array of {DTYPES[dtype]}, not {array.dtype}")


def slot_array(slot: Slot, part: Part) -> NDArray[Any]:
    """A 1-D array over the memory of a new part."""
    memory = slot(part.suffix, part.dtype, part.shape)
    if memory.readonly or memory.format != "B" or memory.nbytes != part.nbytes:
        raise ValueError(
            f"the part {part.suffix!r} needs writable memory of format 'B' and {part.nbytes} bytes, "
            f"not {memory.nbytes} of format {memory.format!r}"
        )
    array = np.frombuffer(memory, DTYPES[part.dtype])
    if not array.flags.aligned:
        raise ValueError(f"the memory of the part {part.suffix!r} is not aligned to its {part.dtype}")
    return array


def check_parts(
    encoding: Encoding, parts: Mapping[str, StoredPart], suffixes: tuple[str, ...]
) -> tuple[StoredPart, ...]:
    """The parts that the codec writes, in its order. Errors: ``Corruption`` where others are there."""
    if encoding.parts != suffixes or set(parts) != set(suffixes):
        raise Corruption(
            f"a tensor encoded by {encoding.codec!r} has the parts {list(suffixes)}; its description says "
            f"{list(encoding.parts)!r:.80} and there are {sorted(parts)!r:.80}"
        )
    return tuple(parts[suffix] for suffix in suffixes)


def part_array(part: StoredPart, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The part's content, aligned. Errors: ``Corruption`` where it is not a ``dtype`` of ``shape``."""
    kind = DTYPES[dtype]
    nbytes = math.prod(shape) * kind.itemsize
    if part.dtype != dtype or tuple(part.shape) != shape or memoryview(part.data).nbytes != nbytes:
        raise Corruption(
            f"a part should be {dtype} {list(shape)} of {nbytes} bytes, and is {part.dtype!r:.20} "
            f"{list(part.shape)!r:.80} of {memoryview(part.data).nbytes}"
        )
    array = np.frombuffer(part.data, kind).reshape(shape)
    return array if array.flags.aligned else array.copy()


def check_description(encoding: Encoding, dtypes: Mapping[str, Any], scalars: tuple[str, ...]) -> None:
    """Refuse a dtype that the codec does not encode, and scalars that it does not write."""
    if encoding.dtype not in dtypes or set(encoding.scalars) != set(scalars):
        raise Corruption(
            f"no tensor of {encoding.dtype} is encoded by {encoding.codec!r} with the scalars "
            f"{sorted(encoding.scalars)!r:.80}"
        )


def to_float32(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The values, 1-D and contiguous; a copy only where they are not so already."""
    check_array(array, dtype)
    flat = np.ascontiguousarray(array).reshape(-1)
    return kernels.widen(flat) if dtype == "BF16" else flat.astype(np.float32, copy=False)


def from_float32(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """The values in ``dtype`` (of ``FLOATS``), rounded to nearest, ties to even."""
    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def largest_of(
    indices: NDArray[np.uint32], survivors: NDArray[np.float32], count: int
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """The ``count`` of largest magnitude (as integers, so NaNs first), of equal ones the first; order is kept."""
    magnitudes = survivors.view(np.uint32) & np.uint32(0x7FFFFFFF)
    kept = np.sort(np.argsort(~magnitudes, kind="stable")[:count])
    return indices[kept], survivors[kept]


CODECS: Mapping[str, Codec] = MappingProxyType({each.name: each for each in (Exact(), Int8(), Sparse(), Adaptive())})
"""Every codec by name."""

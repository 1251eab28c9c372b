"""Dense block quantisation: a code for every element, and a scale for every block."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import Corruption
from tiercheck.kernels import Kernel
from tiercheck.streams.codecs.checks import (
    check_description,
    check_dtype,
    check_parts,
    check_residual,
    part_array,
    slot_array,
)
from tiercheck.streams.codecs.encoding import FLOATS, Codec, Encoding, Part, Slot, StoredPart
from tiercheck.streams.codecs.floats import KERNELS_USED, from_float32, lose_rounding, to_float32
from tiercheck.types import Fidelity

__all__ = ["Int8", "Nf4", "OneBit"]

POISONED = np.uint32(0x7FC00000)
"""The fp32 scale of a block that decodes to NaN; as bf16, its upper half."""


class BlockCodec(Codec):
    """What the block codecs have in common: two parts, and the scalar ``nonfinite``: how many elements decode to NaN.

    The scales are plain numbers, checked before they are used: a negative or infinite one is ``Corruption``.
    """

    fidelity = Fidelity.APPROXIMATE
    feedback = True
    quantise_into: ClassVar[Callable[..., bool]]
    """The kernel that encodes: of :func:`tiercheck.kernels.quantise_into`'s arguments."""
    block: ClassVar[int]
    """Elements of one scale."""
    own_kernels: ClassVar[tuple[Kernel[..., Any], ...]]
    """The kernels of this codec alone: the one that encodes, and the one that decodes."""

    @abc.abstractmethod
    def parts(self, size: int) -> tuple[Part, Part]:
        """Codes and scales of ``size`` elements."""

    @abc.abstractmethod
    def dequantise(self, codes: NDArray[Any], scales: NDArray[Any], size: int, threads: int) -> NDArray[np.float32]: ...

    @abc.abstractmethod
    def nonfinite(self, codes: NDArray[Any], scales: NDArray[Any], size: int) -> int:
        """How many of ``size`` elements decode to NaN."""

    @abc.abstractmethod
    def are_scales(self, scales: NDArray[Any]) -> bool:
        """Whether each is a scale that the encoder writes."""

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        check_dtype(dtype, FLOATS, self.name)
        return self.parts(math.prod(shape))

    def encode(
        self,
        array: NDArray[Any],
        dtype: str,
        *,
        seed: int,
        slot: Slot,
        residual: NDArray[np.float32] | None = None,
        threads: int = 1,
        before: NDArray[Any] | None = None,
        rooted: bool = False,
    ) -> Encoding:
        """As every codec; and in the same pass ``array - before`` (of the same dtype and size), or the square roots of
        an array that is to be ``rooted``, in fp32."""
        check_dtype(dtype, FLOATS, self.name)
        check_residual(residual, array.size)
        values = to_float32(array, dtype)
        start = None if before is None else to_float32(before, dtype)
        planned = self.parts(values.size)
        codes, scales = (slot_array(slot, part) for part in planned)
        found = self.quantise_into(
            values, codes, scales, before=start, rooted=rooted, residual=residual, threads=threads
        )
        if residual is not None and dtype != "F32":
            decoded = self.dequantise(codes, scales, values.size, threads)
            lose_rounding(residual, decoded, dtype, threads=threads)
        scalars = {"nonfinite": self.nonfinite(codes, scales, values.size) if found else 0}
        return Encoding(self.text, dtype, tuple(array.shape), tuple(part.suffix for part in planned), scalars)

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
        check_description(encoding, FLOATS, ("nonfinite",))
        size = math.prod(encoding.shape)
        planned = self.parts(size)
        stored = check_parts(encoding, parts, tuple(part.suffix for part in planned))
        codes, scales = (part_array(part, plan.dtype, plan.shape) for part, plan in zip(stored, planned, strict=True))
        if not self.are_scales(scales):
            raise Corruption(f"a block's scale is none that the codec {self.name!r} writes")
        values = self.dequantise(codes, scales, size, threads)
        return from_float32(values, encoding.dtype, threads=threads).reshape(encoding.shape)

    def kernels_used(self) -> tuple[Kernel[..., Any], ...]:
        return (*self.own_kernels, *KERNELS_USED)


def largest_of_block(values: NDArray[np.float32], block: int) -> NDArray[np.float64]:
    """For each element, the largest magnitude in its block: NaN if one is NaN."""
    magnitudes = np.zeros(-(-values.size // block) * block)
    magnitudes[: values.size] = np.abs(values)
    return np.repeat(magnitudes.reshape(-1, block).max(axis=1), block)[: values.size]


class Int8(BlockCodec):
    """Floats as 8-bit codes in blocks of 256 with one fp32 scale each: ``|error| <= scale / 2``, scale = maximum / 127.

    Every NaN and infinity comes back as NaN, and spoils no other element; ``nonfinite`` counts them.
    """

    name = "int8"
    block = kernels.BLOCK
    quantise_into = staticmethod(kernels.quantise_into)
    own_kernels = kernels.quantise_into, kernels.dequantise

    def parts(self, size: int) -> tuple[Part, Part]:
        return Part("codes", "I8", (size,)), Part("scales", "F32", (-(-size // kernels.BLOCK),))

    def dequantise(self, codes: NDArray[Any], scales: NDArray[Any], size: int, threads: int) -> NDArray[np.float32]:
        return kernels.dequantise(codes, scales, threads=threads)

    def nonfinite(self, codes: NDArray[Any], scales: NDArray[Any], size: int) -> int:
        if codes.min(initial=0) != kernels.NONFINITE_CODE:  # which is the least code, and seldom there
            return 0
        return int(np.count_nonzero(codes == kernels.NONFINITE_CODE))

    def are_scales(self, scales: NDArray[Any]) -> bool:
        return bool(np.all(np.isfinite(scales) & (scales >= 0)))

    def bound(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        finite = np.where(np.isfinite(values), values, np.float32(0))
        # A scale is rounded to fp32, of which the denormals are far apart.
        return largest_of_block(finite, self.block) / 127 * (0.5 + 127 * 2.0**-22) + 127 * 2.0**-150


class PoisonedBlocks(BlockCodec):
    """Codes that have none to spare for NaN: a block that holds a NaN or an infinity decodes to NaN altogether.

    Its scale is NaN. ``nonfinite`` counts the elements of such blocks.
    """

    share: ClassVar[float]
    """Of a block's largest magnitude, by which an element may be off."""

    def bound(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """Infinity for the numbers in poisoned blocks."""
        largest = largest_of_block(values, self.block)
        bound = np.where(np.isfinite(largest), self.share * largest + 2.0**-133, np.inf)
        return np.where(np.isfinite(values), bound, 0.0)

    def nonfinite(self, codes: NDArray[Any], scales: NDArray[Any], size: int) -> int:
        poisoned = self.poisoned(scales)
        blocks = int(np.count_nonzero(poisoned))
        short = scales.size * self.block - size if blocks and poisoned[-1] else 0
        return blocks * self.block - short

    def are_scales(self, scales: NDArray[Any]) -> bool:
        patterns = scales.view(f"u{scales.itemsize}")
        infinity = np.float32(np.inf).view(np.uint32) >> (32 - 8 * scales.itemsize)
        return bool(np.all((patterns < infinity) | self.poisoned(scales)))

    def poisoned(self, scales: NDArray[Any]) -> NDArray[np.bool_]:
        poison = POISONED >> np.uint32(32 - 8 * scales.itemsize)
        return np.asarray(scales.view(f"u{scales.itemsize}") == poison)


class Nf4(PoisonedBlocks):
    """Floats as 4-bit codes of 16 levels, in blocks of 256 with one fp32 scale each, the largest magnitude.

    The levels are the quantiles of a normal distribution, closer to each other near zero, one of them zero: an element
    is off by at most 0.152 of the scale. A block that holds a NaN or an infinity comes back as NaN altogether;
    ``nonfinite`` counts the elements of such blocks. The last block is stored whole.

    Source: Dettmers et al., *QLoRA: Efficient Finetuning of Quantized LLMs* (2023), section 3 and appendix E.
    """

    name = "nf4"
    quantise_into = staticmethod(kernels.quantise_nf4_into)
    own_kernels = kernels.quantise_nf4_into, kernels.dequantise_nf4
    block = kernels.BLOCK
    share = 0.1519037 + 2.0**-22

    def parts(self, size: int) -> tuple[Part, Part]:
        blocks = -(-size // self.block)
        return Part("codes", "U8", (blocks * self.block // 2,)), Part("scales", "F32", (blocks,))

    def dequantise(self, codes: NDArray[Any], scales: NDArray[Any], size: int, threads: int) -> NDArray[np.float32]:
        return kernels.dequantise_nf4(codes, scales, size, threads=threads)


class OneBit(PoisonedBlocks):
    """Floats as their signs, in blocks of 128 with one bf16 scale each, the block's mean magnitude.

    A zero comes back as the scale, so a block of zeros as zeros. A block that holds a NaN or an infinity comes
    back as NaN altogether; ``nonfinite`` counts the elements of such blocks. The last block is stored whole.

    Source: Seide et al., *1-bit stochastic gradient descent* (2014), which needs error feedback; the mean magnitude as
    in Bernstein et al., *signSGD* (2018), and Karimireddy et al. (2019), a block instead of a tensor.
    """

    name = "onebit"
    quantise_into = staticmethod(kernels.quantise_onebit_into)
    own_kernels = kernels.quantise_onebit_into, kernels.dequantise_onebit
    block = kernels.ONEBIT_BLOCK
    share = 1 + 2.0**-7

    def parts(self, size: int) -> tuple[Part, Part]:
        blocks = -(-size // self.block)
        return Part("bits", "U8", (blocks * self.block // 8,)), Part("scales", "BF16", (blocks,))

    def dequantise(self, codes: NDArray[Any], scales: NDArray[Any], size: int, threads: int) -> NDArray[np.float32]:
        return kernels.dequantise_onebit(codes, scales, size, threads=threads)

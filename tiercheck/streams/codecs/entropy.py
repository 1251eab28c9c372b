"""Every bit comes back, and the exponents take less room: they are what compresses in a float."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import Corruption
from tiercheck.format.container import RunningChecksum
from tiercheck.kernels import Kernel
from tiercheck.kernels import threads as pieces
from tiercheck.streams.codecs.checks import (
    check_description,
    check_dtype,
    check_parts,
    flat_array,
    part_array,
    refuse_residual,
    slot_array,
)
from tiercheck.streams.codecs.encoding import DTYPES, FLOATS, Codec, Encoding, Part, Slot, StoredPart
from tiercheck.streams.codecs.exact import Exact
from tiercheck.types import Fidelity

__all__ = ["ExactEntropy"]

CODED = {name: FLOATS[name] for name in ("F32", "BF16")}
"""Dtypes whose exponents are a byte; of an fp16's bits its five are too few to be worth the parting."""

FRAME_ELEMENTS = 1 << 18
"""Exponents in one frame, part of the format: each can be decoded by itself."""

LENGTH = struct.Struct("<I")

PLAIN = Exact()


class ExactEntropy(Codec):
    """The tensor as it is, its exponents in fewer bits: every bit comes back, the payloads of NaNs included.

    A float's exponent byte is stored apart from its sign and mantissa, which do not compress, 256K elements (a frame)
    at a time. The part ``fractions`` is what :func:`tiercheck.kernels.split_exponents` leaves of each frame. The part
    ``exponents`` is each frame's as :func:`tiercheck.kernels.pack_exponents` packs them, behind its length (4 bytes,
    little endian); if that would not be shorter than the exponents themselves, it is these. Never more bytes than
    ``exact`` takes for the same tensor, and as there an fp32 tensor whose values are all exactly bf16 is stored as
    bf16. (What clipping or loss scaling has widened to fp32, records store as half-precision numbers and a factor, but
    with ``exact`` alone.) What is neither fp32 nor bf16 is stored by ``exact``.
    """

    name = "exact+entropy"
    fidelity = Fidelity.EXACT
    dtypes = DTYPES

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        check_dtype(dtype, DTYPES, self.name)
        if dtype not in CODED:
            return PLAIN.plan(dtype, shape)
        return planes(math.prod(shape), DTYPES[dtype].itemsize)

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
        check_dtype(dtype, DTYPES, self.name)
        refuse_residual(residual, self.name)
        if dtype not in CODED:
            return PLAIN.encode(array, dtype, seed=seed, slot=slot, threads=threads)
        flat = flat_array(array, dtype)
        if dtype == "F32" and flat.size and kernels.is_bfloat16(flat):
            narrowed = np.empty(flat.size, np.uint16)
            kernels.narrow_into(flat, narrowed)
            flat = narrowed
        patterns = flat.view(f"u{flat.itemsize}")
        rest, exponents = planes(flat.size, flat.itemsize)
        others = slot_array(slot, rest)
        packed, checksum = packed_frames(patterns, others, threads)
        size = sum(piece.size for piece in packed)
        if size < flat.size:
            np.concatenate(packed, out=slot_array(slot, Part(exponents.suffix, exponents.dtype, (size,))))
        else:
            part_frames(patterns, slot_array(slot, exponents), others, threads)
        checksums = {} if checksum is None else {rest.suffix: checksum}
        return Encoding(self.text, dtype, tuple(array.shape), (rest.suffix, exponents.suffix), checksums=checksums)

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
        check_description(encoding, CODED, ())
        stored_rest, stored_exponents = check_parts(encoding, parts, ("fractions", "exponents"))
        size, itemsize = math.prod(encoding.shape), DTYPES[encoding.dtype].itemsize
        narrowed = encoding.dtype == "F32" and size > 0 and tuple(stored_rest.shape) == (size,)
        itemsize = 2 if narrowed else itemsize
        rest = part_array(stored_rest, "U8", planes(size, itemsize)[0].shape)
        coded = part_array(stored_exponents, "U8", tuple(stored_exponents.shape)[:1] or (-1,))
        plane = coded if coded.size == size else unpacked_frames(coded, size, threads)
        patterns = np.empty(size, f"<u{itemsize}")

        def join(piece: slice) -> None:
            for each in frames_in(piece):
                kernels.join_exponents(plane[each], rest_of(rest, each, itemsize), patterns[each])

        pieces.run(join, pieces.split(size, threads, unit=FRAME_ELEMENTS))
        values = kernels.widen(patterns) if narrowed else patterns.view(DTYPES[encoding.dtype])
        return values.reshape(encoding.shape)

    def kernels_used(self) -> tuple[Kernel[..., Any], ...]:
        return (
            *PLAIN.kernels_used(),
            kernels.split_and_pack_exponents,
            kernels.split_exponents,
            kernels.unpack_exponents,
            kernels.join_exponents,
        )


def planes(size: int, itemsize: int) -> tuple[Part, Part]:
    return Part("fractions", "U8", (size * (itemsize - 1),)), Part("exponents", "U8", (size,))


def frames_in(piece: slice) -> list[slice]:
    starts = range(piece.start, piece.stop, FRAME_ELEMENTS)
    return [slice(start, min(start + FRAME_ELEMENTS, piece.stop)) for start in starts]


def rest_of(rest: NDArray[np.uint8], frame: slice, itemsize: int) -> NDArray[np.uint8]:
    """All but the exponents of a frame."""
    return rest[frame.start * (itemsize - 1) : frame.stop * (itemsize - 1)]


def part_frames(patterns: NDArray[Any], exponents: NDArray[np.uint8], rest: NDArray[np.uint8], threads: int) -> None:
    """The exponents as they are, in one plane; all else to ``rest``, frame by frame."""

    def split(piece: slice) -> None:
        for each in frames_in(piece):
            kernels.split_exponents(patterns[each], exponents[each], rest_of(rest, each, patterns.itemsize))

    pieces.run(split, pieces.split(patterns.size, threads, unit=FRAME_ELEMENTS))


def packed_frames(
    patterns: NDArray[Any], rest: NDArray[np.uint8], threads: int
) -> tuple[list[NDArray[np.uint8]], str | None]:
    """The exponents of each frame, packed, behind their length; all else goes to ``rest``, whose checksum is returned
    if one thread wrote it. A frame is hashed while it is in the cache."""
    split = pieces.split(patterns.size, threads, unit=FRAME_ELEMENTS)
    checksum = RunningChecksum() if len(split) == 1 else None

    def pack(piece: slice) -> NDArray[np.uint8]:
        frames = frames_in(piece)
        packed = np.empty(
            sum(LENGTH.size + kernels.packed_bytes_max(each.stop - each.start) for each in frames), np.uint8
        )
        end = 0
        for each in frames:
            others, start = rest_of(rest, each, patterns.itemsize), end + LENGTH.size
            nbytes = kernels.split_and_pack_exponents(patterns[each], others, packed[start:])
            if checksum is not None:
                checksum.update(others.data)
            LENGTH.pack_into(packed.data, end, nbytes)
            end = start + nbytes
        return packed[:end]

    return pieces.run(pack, split), None if checksum is None else checksum.text


def unpacked_frames(coded: NDArray[np.uint8], size: int, threads: int) -> NDArray[np.uint8]:
    """The inverse. Errors: ``Corruption`` for frames that are cut, damaged, too many, or followed by anything."""
    frames = split_frames(coded, -(-size // FRAME_ELEMENTS))
    plane = np.empty(size, np.uint8)

    def unpack(piece: slice) -> None:
        for part in frames_in(piece):
            index = part.start // FRAME_ELEMENTS
            try:
                kernels.unpack_exponents(frames[index], plane[part])
            except ValueError as error:
                raise Corruption(f"frame {index + 1} of the coded exponents is damaged: {error}") from error

    pieces.run(unpack, pieces.split(size, threads, unit=FRAME_ELEMENTS))
    return plane


def split_frames(coded: NDArray[np.uint8], count: int) -> list[NDArray[np.uint8]]:
    frames: list[NDArray[np.uint8]] = []
    at = 0
    for index in range(count):
        start = at + LENGTH.size
        if start > coded.size:
            raise Corruption(f"the coded exponents end before frame {index + 1} of {count}")
        at = start + LENGTH.unpack_from(coded.data, at)[0]
        frames.append(coded[start:at])
    if at != coded.size:
        raise Corruption(f"the frames of the coded exponents take {at} bytes, and there are {coded.size}")
    return frames

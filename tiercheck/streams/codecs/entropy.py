"""Every bit comes back, and the exponents take less room: they are what compresses in a float."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import ConfigurationError, Corruption
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

if TYPE_CHECKING:
    import zstandard

__all__ = ["ExactEntropy"]

FRAME_ELEMENTS = 1 << 18
"""Exponents in one zstandard frame, part of the format: frames are coded, and bounded, one by one."""

LEVEL, HASH_LOG, MATCH_MIN = 1, 6, 7
"""How frames are coded. Exponents repeat by chance: the shortest matches that level 1 finds cost more than they save.
Against its own settings these are four times as fast and a sixth smaller (256K exponents of a normal distribution: 950
instead of 250 MB/s, .325 instead of .381 of the plane, whose entropy is .318), and runs are still found."""

LENGTH = struct.Struct("<I")


class ExactEntropy(Codec):
    """The tensor as it is, its exponents coded by zstandard: every bit comes back, the payloads of NaNs included.

    A float's exponent byte is stored apart from its sign and mantissa, which do not compress. The part ``exponents`` is
    a sequence of frames of 256K exponents, each behind its length (4 bytes, little endian); where that would not be
    shorter than the exponents themselves, it is these. Never more bytes than ``exact`` takes, and as there an
    fp32 tensor whose values are all exactly bf16 is stored as bf16. What is no float is stored by ``exact``.
    """

    name = "exact+entropy"
    fidelity = Fidelity.EXACT

    def __init__(self, plain: Exact) -> None:
        self._plain = plain

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        check_dtype(dtype, DTYPES, self.name)
        if dtype not in FLOATS:
            return self._plain.plan(dtype, shape)
        zstandard_library()  # what is missing is missed now, not at the first step
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
        if dtype not in FLOATS:
            return self._plain.encode(array, dtype, seed=seed, slot=slot, threads=threads)
        flat = flat_array(array, dtype)
        if dtype == "F32" and flat.size and kernels.is_bfloat16(flat):
            flat = kernels.narrow(flat)
        rest, exponents = planes(flat.size, flat.itemsize)
        plane = np.empty(flat.size, np.uint8)
        kernels.split_exponents(flat.view(f"u{flat.itemsize}"), plane, slot_array(slot, rest), threads=threads)
        coded = coded_plane(plane, threads)
        stored = Part(exponents.suffix, exponents.dtype, (sum(map(len, coded)),))
        memory = slot_array(slot, stored)
        filled = 0
        for each in coded:
            memory[filled : filled + len(each)] = np.frombuffer(each, np.uint8)
            filled += len(each)
        return Encoding(self.name, dtype, tuple(array.shape), ("rest", "exponents"))

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
        check_description(encoding, FLOATS, ())
        stored_rest, stored_exponents = check_parts(encoding, parts, ("rest", "exponents"))
        size, itemsize = math.prod(encoding.shape), DTYPES[encoding.dtype].itemsize
        narrowed = encoding.dtype == "F32" and size > 0 and tuple(stored_rest.shape) == (size,)
        itemsize = 2 if narrowed else itemsize
        rest = part_array(stored_rest, "U8", planes(size, itemsize)[0].shape)
        coded = part_array(stored_exponents, "U8", tuple(stored_exponents.shape)[:1] or (-1,))
        plane = coded if coded.size == size else decoded_plane(coded, size, threads)
        patterns = np.empty(size, f"<u{itemsize}")
        kernels.join_exponents(plane, rest, patterns, threads=threads)
        values = kernels.widen(patterns) if narrowed else patterns.view(DTYPES[encoding.dtype])
        return values.reshape(encoding.shape)


def planes(size: int, itemsize: int) -> tuple[Part, Part]:
    return Part("rest", "U8", (size * (itemsize - 1),)), Part("exponents", "U8", (size,))


def coded_plane(plane: NDArray[np.uint8], threads: int) -> Sequence[bytes | memoryview]:
    """The frames, each behind its length; or the plane itself, where they are not shorter."""

    def code(piece: slice) -> list[bytes]:
        found: list[bytes] = []
        for start in range(piece.start, piece.stop, FRAME_ELEMENTS):
            frame = compressor().compress(plane[start : min(start + FRAME_ELEMENTS, piece.stop)].data)
            found += (LENGTH.pack(len(frame)), frame)
        return found

    coded = pieces.run(code, pieces.split(plane.size, threads, unit=FRAME_ELEMENTS))
    joined = [each for piece in coded for each in piece]
    return joined if sum(map(len, joined)) < plane.size else [plane.data]


def decoded_plane(coded: NDArray[np.uint8], size: int, threads: int) -> NDArray[np.uint8]:
    """The inverse; no frame is decoded that says it holds another number of exponents than it should.

    Errors: ``Corruption`` for frames that are cut, damaged, too many, or followed by anything.
    """
    if coded.size > size:
        raise Corruption(f"the coded exponents of {size} elements take {coded.size} bytes")
    frames = split_frames(coded.data, -(-size // FRAME_ELEMENTS))
    plane = np.empty(size, np.uint8)

    def decode(piece: slice) -> None:
        for start in range(piece.start, piece.stop, FRAME_ELEMENTS):
            part = plane[start : min(start + FRAME_ELEMENTS, piece.stop)]
            part[:] = decoded_frame(frames[start // FRAME_ELEMENTS], part.size)

    pieces.run(decode, pieces.split(size, threads, unit=FRAME_ELEMENTS))
    return plane


def split_frames(coded: memoryview, count: int) -> list[memoryview]:
    edges = [0]
    for _ in range(count):
        start = edges[-1] + LENGTH.size
        if start > len(coded):
            raise Corruption(f"the coded exponents end before frame {len(edges)} of {count}")
        edges.append(start + LENGTH.unpack_from(coded, edges[-1])[0])
    if edges[-1] != len(coded):
        raise Corruption(f"the frames of the coded exponents take {edges[-1]} bytes, and there are {len(coded)}")
    return [coded[start + LENGTH.size : stop] for start, stop in pairwise(edges)]


def decoded_frame(frame: memoryview, size: int) -> NDArray[np.uint8]:
    library = zstandard_library()
    try:
        said = library.get_frame_parameters(frame).content_size
        if said != size:
            raise Corruption(f"a frame of coded exponents says it holds {said}, and should hold {size}")
        content = decompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except library.ZstdError as error:
        raise Corruption(f"a frame of coded exponents cannot be decoded: {error}") from error
    if len(content) != size:
        raise Corruption(f"a frame of coded exponents holds {len(content)}, and should hold {size}")
    return np.frombuffer(content, np.uint8)


contexts = threading.local()
"""Each thread's zstandard contexts, which no two threads may share and which are dear to make."""


def compressor() -> zstandard.ZstdCompressor:
    if not hasattr(contexts, "compressor"):
        library = zstandard_library()
        parameters = library.ZstdCompressionParameters.from_level(
            LEVEL, strategy=library.STRATEGY_FAST, hash_log=HASH_LOG, min_match=MATCH_MIN, write_content_size=True
        )
        contexts.compressor = library.ZstdCompressor(compression_params=parameters)
    found: zstandard.ZstdCompressor = contexts.compressor
    return found


def decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(contexts, "decompressor"):
        contexts.decompressor = zstandard_library().ZstdDecompressor()
    found: zstandard.ZstdDecompressor = contexts.decompressor
    return found


def zstandard_library() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ConfigurationError("the codec 'exact+entropy' needs zstandard: pip install zstandard") from None
    return zstandard

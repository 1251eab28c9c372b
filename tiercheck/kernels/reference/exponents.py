"""Lossless coding of exponents in few bits, in NumPy.

The exponents of neighbouring elements of a gradient differ by a few; those of a whole tensor differ by dozens. So each
block has its own *highest* exponent, and a code of three bits counts down from it. The last code stands for an exponent
that is stored as it is. On gradients this takes 3.4 bits an element; the entropy of the exponents of a whole tensor is
3.6. Hardly any step depends on earlier elements, so that it is several times as fast as an entropy coder.

The format. Blocks have 256 exponents; a last, short block is filled up with its last exponent. In this order:

- for each block, one byte: the *highest* exponent that it codes;
- for each block, 96 bytes: the codes, which are ``highest - exponent`` if that is 0 to 6, else 7. The first 64 bytes
  are the low two bits of each code: byte j holds those of elements j, j + 64, j + 128 and j + 192, from its lowest bits
  up. The last 32 bytes are the high bits: byte j holds those of elements j, j + 32, ..., j + 224;
- for each code 7, in order, one byte: the exponent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.reference.planes import check_rest, split_exponents

__all__ = [
    "CODED",
    "EXPONENT_BLOCK",
    "STORED",
    "blocks_of",
    "pack_exponents",
    "packed_bytes_max",
    "split_and_pack_exponents",
    "unpack_exponents",
]

EXPONENT_BLOCK = 256
CODE_BYTES = EXPONENT_BLOCK * 3 // 8
CODED = 7
"""Exponents for which a block has a code: the highest one and the six below it."""
STORED = 7
"""The code of every other exponent, which is stored as it is."""


def blocks_of(size: int) -> int:
    return -(-size // EXPONENT_BLOCK)


def packed_bytes_max(size: int) -> int:
    """The most bytes that ``size`` packed exponents take."""
    return blocks_of(size) * (1 + CODE_BYTES + EXPONENT_BLOCK)


def pack_exponents(exponents: NDArray[np.uint8], packed: NDArray[np.uint8]) -> int:
    """Pack ``exponents`` (uint8, 1-D) into the front of ``packed`` (uint8, 1-D). Returns the bytes that they take.

    A block's *highest* is chosen among its largest exponent and the six below that, so that the fewest exponents are
    stored; of equally good ones, the largest. Errors: ``ValueError`` if ``packed`` is smaller than
    :func:`packed_bytes_max`.
    """
    check_room(exponents.size, packed)
    blocks = in_blocks(exponents)
    candidates = blocks.max(axis=1, initial=0)[:, None] - np.arange(CODED, dtype=np.uint8)  # modulo 256, as all here
    coded = (candidates[:, :, None] - blocks[:, None, :] < CODED).sum(axis=2)
    highest = candidates[np.arange(len(blocks)), coded.argmax(axis=1)]
    codes = np.minimum(highest[:, None] - blocks, STORED)
    stored = blocks[codes == STORED]
    found = np.concatenate([highest, packed_codes(codes).reshape(-1), stored])
    packed[: found.size] = found
    return found.size


def split_and_pack_exponents(
    patterns: NDArray[np.uint16] | NDArray[np.uint32], rest: NDArray[np.uint8], packed: NDArray[np.uint8]
) -> int:
    """:func:`split_exponents` and :func:`pack_exponents` in one call. Returns the bytes that the exponents take.

    Errors: those of the two; nothing was written then.
    """
    check_rest(patterns, rest)
    check_room(patterns.size, packed)
    exponents = np.empty(patterns.size, np.uint8)
    split_exponents(patterns, exponents, rest)
    return pack_exponents(exponents, packed)


def unpack_exponents(packed: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> None:
    """Write to ``exponents`` (uint8, 1-D) what :func:`pack_exponents` has packed. Any bytes of the right length decode.

    Errors: ``ValueError`` if the length of ``packed`` is not that of so many exponents with so many codes 7.
    """
    count = blocks_of(exponents.size)
    check_packed(count, packed)
    highest, codes = packed[:count], unpacked_codes(packed[count : count * (1 + CODE_BYTES)].reshape(count, CODE_BYTES))
    stored = packed[count * (1 + CODE_BYTES) :]
    is_stored = codes == STORED
    check_stored(int(is_stored.sum()), stored.size)
    blocks = highest[:, None] - codes
    blocks[is_stored] = stored
    exponents[:] = blocks.reshape(-1)[: exponents.size]


def in_blocks(exponents: NDArray[np.uint8]) -> NDArray[np.uint8]:
    missing = -exponents.size % EXPONENT_BLOCK
    return np.concatenate([exponents, np.repeat(exponents[-1:], missing)]).reshape(-1, EXPONENT_BLOCK)


def packed_codes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of ``(blocks, 256)`` as bytes of ``(blocks, 96)``."""
    low, high = (codes & 3).reshape(-1, 4, 64), (codes >> 2).reshape(-1, 8, 32)
    shifted_low = low << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    shifted_high = high << np.arange(8, dtype=np.uint8)[:, None]
    return np.concatenate(
        [np.bitwise_or.reduce(shifted_low, axis=1), np.bitwise_or.reduce(shifted_high, axis=1)], axis=1
    )


def unpacked_codes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse of :func:`packed_codes`."""
    low = packed[:, None, :64] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    high = packed[:, None, 64:] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes: NDArray[np.uint8] = low.reshape(-1, EXPONENT_BLOCK) | high.reshape(-1, EXPONENT_BLOCK) << np.uint8(2)
    return codes


def check_room(size: int, packed: NDArray[np.uint8]) -> None:
    if packed.size < packed_bytes_max(size):
        raise ValueError(
            f"{size} exponents may take {packed_bytes_max(size)} bytes, and there is room for {packed.size}"
        )


def check_packed(blocks: int, packed: NDArray[np.uint8]) -> None:
    if packed.size < blocks * (1 + CODE_BYTES):
        raise ValueError(f"{blocks} blocks of exponents take {blocks * (1 + CODE_BYTES)} bytes, not {packed.size}")


def check_stored(codes: int, stored: int) -> None:
    if codes != stored:
        raise ValueError(f"{codes} codes stand for stored exponents, of which there are {stored}")

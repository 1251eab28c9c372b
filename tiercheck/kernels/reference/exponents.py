"""Exponents in few bits, in NumPy: those of a block lie close together, and a block is coded against its own.

Neighbouring elements of a gradient have exponents that differ by a few, those of a whole tensor by dozens. A code of
three bits counts down from an exponent that is the block's own; its last value stands for an exponent that is stored as
it is. On gradients that takes 3.4 bits an element, where the entropy of all exponents together is 3.6; and hardly any
of it depends on the elements before, so that it is several times as fast as a coder of symbols.

What n exponents are packed into, blocks being of 256 and the last one filled up with its last exponent:

- one byte a block: the *highest* exponent that it codes;
- 96 bytes a block: the codes, ``highest - exponent`` from 0 to 6, or 7. First the low two bits of each: those of
  elements j, j + 64, j + 128 and j + 192 in byte j, the first in the lowest bits. Then the high bits: those of j,
  j + 32, ... in byte j;
- one byte each: the exponents whose code is 7, in order.
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
"""As many exponents a block has codes for, from the highest one down."""
STORED = 7
"""The code of any other."""


def blocks_of(size: int) -> int:
    return -(-size // EXPONENT_BLOCK)


def packed_bytes_max(size: int) -> int:
    """Bytes that ``size`` exponents take at most."""
    return blocks_of(size) * (1 + CODE_BYTES + EXPONENT_BLOCK)


def pack_exponents(exponents: NDArray[np.uint8], packed: NDArray[np.uint8]) -> int:
    """Write them to the front of ``packed``; returns the bytes that they take.

    Of the exponents from a block's largest one down to six less, that is chosen as the highest with which the fewest
    have to be stored; the larger one, where that is no reason. Errors: ``ValueError`` where ``packed`` has not the room
    of :func:`packed_bytes_max`.
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
    """Part ``patterns`` as :func:`split_exponents` does, and pack the exponents as :func:`pack_exponents` does.

    (A device does the one after the other, which are two launches.) Errors: as theirs; nothing is written then.
    """
    check_rest(patterns, rest)
    check_room(patterns.size, packed)
    exponents = np.empty(patterns.size, np.uint8)
    split_exponents(patterns, exponents, rest)
    return pack_exponents(exponents, packed)


def unpack_exponents(packed: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> None:
    """Write to ``exponents`` what :func:`pack_exponents` has packed. Any bytes of the right number make exponents.

    Errors: ``ValueError`` where it is not the right number, for that many exponents and codes of 7.
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
    """The inverse."""
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

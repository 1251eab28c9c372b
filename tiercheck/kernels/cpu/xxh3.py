"""XXH3-64 of many parts of one array in one call: of a short part, a call of the library costs more than the bytes.

The algorithm is Yann Collet's (https://github.com/Cyan4973/xxHash, ``doc/xxhash_spec.md``), with its default secret and
seed 0. It reads little-endian words, as the processors do that Numba compiles for.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import compiled
from tiercheck.kernels.reference.xxh3 import check_parts

__all__ = ["hash_each"]

SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
AVALANCHE, MIX = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
FIRST, SECOND, THIRD = np.uint64(PRIME64_1), np.uint64(PRIME64_2), np.uint64(PRIME64_3)
STRIPE, STRIPES = 64, 16
"""Bytes that are taken at a time, and how often until the accumulators are scrambled."""
LANES = 8
START = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
LAST_KEY, SCRAMBLE_KEY, MERGE_KEY = 192 - STRIPE - 7, 192 - STRIPE, 11
"""Where in the secret those of the last stripe, of a scramble and of the end are."""

LONG, WIDE, VECTOR = ir.IntType(64), ir.IntType(128), ir.VectorType(ir.IntType(64), LANES)


def hash_each(data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint64]:
    """As the reference."""
    check_parts(data, starts, stops)
    found = np.empty(starts.size, np.uint64)
    hash_parts(np.uintp(data.ctypes.data), starts, stops, np.uintp(SECRET.ctypes.data), found)
    return found


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def word_at(typing_context: Any, address: Any) -> Any:
    """The 64-bit word at ``address``, which need not be aligned."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], LONG.as_pointer()), align=1)

    return types.uint64(types.uintp), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def folded(typing_context: Any, a: Any, b: Any) -> Any:
    """The two halves of the 128-bit product, one xor the other."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        one, other = (builder.zext(each, WIDE) for each in arguments)
        product = builder.mul(one, other)
        high = builder.trunc(builder.lshr(product, ir.Constant(WIDE, 64)), LONG)
        return builder.xor(builder.trunc(product, LONG), high)

    return types.uint64(types.uint64, types.uint64), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def merged(typing_context: Any, address: Any, nbytes: Any, secret: Any) -> Any:
    """What the accumulators of more than 240 bytes come to: eight lanes of 64 bits, kept in registers all the way."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address, nbytes, secret = arguments
        lanes = cast(Any, cgutils.alloca_once_value)(builder, ir.Constant(VECTOR, START))

        def vector_at(base: Any, offset: Any) -> Any:
            return builder.load(builder.inttoptr(builder.add(base, offset), VECTOR.as_pointer()), align=1)

        def every(value: int) -> ir.Constant:
            return ir.Constant(VECTOR, [value] * LANES)

        def take(at: Any, key: Any) -> None:
            data = vector_at(address, at)
            keyed = builder.xor(data, vector_at(secret, key))
            product = builder.mul(builder.and_(keyed, every(0xFFFFFFFF)), builder.lshr(keyed, every(32)))
            neighbours = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [1, 0, 3, 2, 5, 4, 7, 6])
            swapped = builder.shuffle_vector(data, data, neighbours)
            builder.store(builder.add(builder.load(lanes), builder.add(product, swapped)), lanes)

        def scramble() -> None:
            now = builder.load(lanes)
            now = builder.xor(now, builder.lshr(now, every(47)))
            now = builder.xor(now, vector_at(secret, LONG(SCRAMBLE_KEY)))
            builder.store(builder.mul(now, every(PRIME32_1)), lanes)

        before_last = builder.sub(nbytes, LONG(1))
        blocks = builder.udiv(before_last, LONG(STRIPE * STRIPES))
        with cgutils.for_range(builder, blocks, intp=LONG) as block:
            start = builder.mul(block.index, LONG(STRIPE * STRIPES))
            for number in range(STRIPES):
                take(builder.add(start, LONG(number * STRIPE)), LONG(8 * number))
            scramble()
        start = builder.mul(blocks, LONG(STRIPE * STRIPES))
        stripes = builder.udiv(builder.sub(before_last, start), LONG(STRIPE))
        with cgutils.for_range(builder, stripes, intp=LONG) as stripe:
            take(builder.add(start, builder.mul(stripe.index, LONG(STRIPE))), builder.mul(stripe.index, LONG(8)))
        take(builder.sub(nbytes, LONG(STRIPE)), LONG(LAST_KEY))
        found = builder.mul(nbytes, LONG(PRIME64_1))
        mixed = builder.xor(builder.load(lanes), vector_at(secret, LONG(MERGE_KEY)))
        for lane in range(0, LANES, 2):
            pair = (builder.extract_element(mixed, ir.IntType(32)(lane + each)) for each in range(2))
            one, other = (builder.zext(each, WIDE) for each in pair)
            product = builder.mul(one, other)
            high = builder.trunc(builder.lshr(product, ir.Constant(WIDE, 64)), LONG)
            found = builder.add(found, builder.xor(builder.trunc(product, LONG), high))
        return found

    return types.uint64(types.uintp, types.uint64, types.uintp), generate


@compiled
def hash_parts(
    data: np.uintp, starts: NDArray[np.int64], stops: NDArray[np.int64], secret: np.uintp, found: NDArray[np.uint64]
) -> None:
    for each in range(starts.size):
        address, size = data + np.uintp(starts[each]), np.uint64(stops[each] - starts[each])
        if size > 240:
            found[each] = avalanche(merged(address, size, secret))
        elif size > 16:
            found[each] = hash_middle(address, size, secret)
        else:
            found[each] = hash_short(address, size, secret)


@compiled
def hash_short(data: np.uintp, size: np.uint64, secret: np.uintp) -> np.uint64:
    """Of up to 16 bytes."""
    if size > 8:
        low = word_at(data) ^ word_at(secret + np.uintp(24)) ^ word_at(secret + np.uintp(32))
        high = word_at(data + np.uintp(size) - np.uintp(8)) ^ word_at(secret + np.uintp(40))
        high ^= word_at(secret + np.uintp(48))
        return avalanche(size + reversed_bytes(low) + high + folded(low, high))
    keys = word_at(secret + np.uintp(8)) ^ word_at(secret + np.uintp(16))
    if size >= 4:
        first, last = bytes_from(data, 4), bytes_from(data + np.uintp(size) - np.uintp(4), 4)
        mixed = (last + (first << np.uint64(32))) ^ keys
        mixed ^= rotated(mixed, np.uint64(49)) ^ rotated(mixed, np.uint64(24))
        mixed *= MIX
        mixed ^= (mixed >> np.uint64(35)) + size
        mixed *= MIX
        return np.uint64(mixed ^ (mixed >> np.uint64(28)))
    if size:
        first = bytes_from(data, 1)
        middle = bytes_from(data + np.uintp(size >> np.uint64(1)), 1)
        last = bytes_from(data + np.uintp(size) - np.uintp(1), 1)
        combined = (first << np.uint64(16)) | (middle << np.uint64(24)) | last | (size << np.uint64(8))
        keys = word_at(secret)
        return avalanche_of_words(combined ^ ((keys ^ (keys >> np.uint64(32))) & np.uint64(0xFFFFFFFF)))
    return avalanche_of_words(word_at(secret + np.uintp(56)) ^ word_at(secret + np.uintp(64)))


@compiled
def hash_middle(data: np.uintp, size: np.uint64, secret: np.uintp) -> np.uint64:
    """Of 17 to 240 bytes."""
    found, end = size * FIRST, data + np.uintp(size)
    if size <= 128:
        for pair in range((np.int64(size) - 1) // 32, -1, -1):
            key = secret + np.uintp(32 * pair)
            found += mixed_with(data + np.uintp(16 * pair), key)
            found += mixed_with(end - np.uintp(16 * (pair + 1)), key + np.uintp(16))
        return avalanche(found)
    for number in range(8):
        found += mixed_with(data + np.uintp(16 * number), secret + np.uintp(16 * number))
    found = avalanche(found)
    for number in range(8, np.int64(size) // 16):
        found += mixed_with(data + np.uintp(16 * number), secret + np.uintp(16 * (number - 8) + 3))
    return avalanche(found + mixed_with(end - np.uintp(16), secret + np.uintp(136 - 17)))


@compiled
def mixed_with(data: np.uintp, secret: np.uintp) -> np.uint64:
    """Of 16 bytes."""
    return np.uint64(
        folded(word_at(data) ^ word_at(secret), word_at(data + np.uintp(8)) ^ word_at(secret + np.uintp(8)))
    )


@compiled
def bytes_from(data: np.uintp, count: int) -> np.uint64:
    """So few bytes as one number. Only they are read."""
    found = np.uint64(0)
    for each in range(count):
        found |= np.uint64(byte_at(data + np.uintp(each))) << np.uint64(8 * each)
    return found


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def byte_at(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()), align=1)

    return types.uint8(types.uintp), generate


@compiled
def reversed_bytes(word: np.uint64) -> np.uint64:
    found = np.uint64(0)
    for _ in range(8):
        found = (found << np.uint64(8)) | (word & np.uint64(0xFF))
        word >>= np.uint64(8)
    return found


@compiled
def rotated(word: np.uint64, bits: np.uint64) -> np.uint64:
    """To the left."""
    return (word << bits) | (word >> (np.uint64(64) - bits))


@compiled
def avalanche(word: np.uint64) -> np.uint64:
    word ^= word >> np.uint64(37)
    word *= AVALANCHE
    return word ^ (word >> np.uint64(32))


@compiled
def avalanche_of_words(word: np.uint64) -> np.uint64:
    word ^= word >> np.uint64(33)
    word *= SECOND
    word ^= word >> np.uint64(29)
    word *= THIRD
    return word ^ (word >> np.uint64(32))

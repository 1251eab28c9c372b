"""Comparisons of 64 elements at a time, which Numba has no types for.

Each intrinsic reads *lanes*: consecutive elements, as the fp32 patterns of their exact values. What an array holds, its
dtype says: ``uint32`` fp32 patterns, ``uint16`` bf16 patterns, ``int16`` fp16 patterns (Numba has no fp16 on a CPU).
With a residual (fp32 patterns; else ``None``) an element is the value plus its residual until :func:`reaching` has been
there, and the residual from then on.

Positions are not checked.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import frozen
from tiercheck.kernels.reference.compaction import Values

__all__ = [
    "GROUP",
    "REGISTER",
    "avx512",
    "avx512_bytes",
    "count_ones",
    "far_below",
    "gather",
    "gather_bytes",
    "lane_bits",
    "look_up",
    "reach_one",
    "reaching",
    "read_signs",
    "source_of",
    "spread_bytes",
    "trailing_zeros",
    "write_signs",
]

GROUP = 64
"""Lanes of one comparison: a bit each in a machine word."""

BYTE, SHORT, WORD, LONG, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

MAGNITUDE = 0x7FFFFFFF

REGISTER = 16
"""Lanes of 32 bits in one AVX-512 register."""

COMPRESS = "llvm.x86.avx512.mask.compress.v16i32"

PERMUTE = "llvm.x86.avx512.permvar.sf.512"

COMPRESS_BYTES, EXPAND_BYTES = "llvm.x86.avx512.mask.compress.v64i8", "llvm.x86.avx512.mask.expand.v64i8"


def source_of(values: Values) -> NDArray[Any]:
    """The patterns of ``values``, read-only, in the dtype that says what they are."""
    if values.dtype == np.uint16:
        return frozen(values)
    return frozen(values.view(np.uint32 if values.dtype == np.float32 else np.int16))


def lanes_of(value: int, like: ir.VectorType) -> ir.Constant:
    return ir.Constant(like, [value] * like.count)


def repeated(builder: ir.IRBuilder, value: Any, count: int) -> Any:
    start = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    one = builder.insert_element(start, value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(WORD, count), [0] * count))


class Lanes:
    """Builds the code that reads and writes lanes of the arrays that one intrinsic was called with."""

    def __init__(self, context: Any, builder: ir.IRBuilder) -> None:
        self.context, self.builder = context, builder

    def pointer(self, kind: Any, array: Any, position: Any, element: ir.Type, count: int) -> Any:
        data = self.context.make_array(kind)(self.context, self.builder, array).data
        data = self.builder.bitcast(data, element.as_pointer())
        address = self.builder.gep(data, [position])
        return self.builder.bitcast(address, ir.VectorType(element, count).as_pointer())

    def load(self, kind: Any, array: Any, position: Any, count: int) -> Any:
        element = WORD if kind.dtype.bitwidth == 32 else SHORT
        pointer = self.pointer(kind, array, position, element, count)
        return self.builder.load(pointer, align=kind.dtype.bitwidth // 8)

    def store(self, lanes: Any, kind: Any, array: Any, position: Any) -> None:
        pointer = self.pointer(kind, array, position, WORD, lanes.type.count)
        self.builder.store(lanes, pointer, align=4)

    def widened(self, kind: Any, lanes: Any) -> Any:
        """The fp32 patterns of what an array of this kind holds."""
        if kind.dtype == types.uint32:
            return lanes
        builder, wide = self.builder, ir.VectorType(WORD, lanes.type.count)
        words = builder.zext(lanes, wide)
        if kind.dtype == types.uint16:
            return builder.shl(words, lanes_of(16, wide))
        return self.widened_halves(words)

    def widened_halves(self, words: Any) -> Any:
        """In integers but for the denormals: no instruction set is needed, and a NaN keeps its bits."""
        builder, wide = self.builder, words.type
        magnitude = builder.and_(words, lanes_of(0x7FFF, wide))
        sign = builder.shl(builder.sub(words, magnitude), lanes_of(16, wide))
        shifted = builder.shl(magnitude, lanes_of(13, wide))
        normal = builder.add(shifted, lanes_of((127 - 15) << 23, wide))
        special = builder.add(shifted, lanes_of((255 - 31) << 23, wide))
        floats = ir.VectorType(FLOAT, wide.count)
        tiny = builder.fmul(builder.uitofp(magnitude, floats), ir.Constant(floats, [2.0**-24] * wide.count))
        is_tiny = builder.icmp_unsigned("<", magnitude, lanes_of(0x0400, wide))
        is_special = builder.icmp_unsigned(">=", magnitude, lanes_of(0x7C00, wide))
        finite = builder.select(is_tiny, builder.bitcast(tiny, wide), normal)
        return builder.or_(sign, builder.select(is_special, special, finite))

    def exact(self, source: tuple[Any, Any], residual: tuple[Any, Any], position: Any, count: int) -> Any:
        """The elements' patterns, where :func:`reaching` has been."""
        kind, array = source if residual[0] == types.none else residual
        return self.widened(kind, self.load(kind, array, position, count))

    def reach(self, source: tuple[Any, Any], residual: tuple[Any, Any], position: Any, least: Any, count: int) -> Any:
        """A bit a lane: whether its magnitude is ``least`` or more. The residual becomes the element."""
        builder, lanes = self.builder, self.load(*source, position, count)
        if residual[0] != types.none:
            floats = ir.VectorType(FLOAT, count)
            values = builder.bitcast(self.widened(source[0], lanes), floats)
            kept = builder.bitcast(self.load(*residual, position, count), floats)
            lanes = builder.bitcast(builder.fadd(values, kept), ir.VectorType(WORD, count))
            self.store(lanes, *residual, position)
        bits = lanes.type.element.width
        magnitudes = builder.and_(lanes, lanes_of(MAGNITUDE >> (32 - bits), lanes.type))
        limit = builder.trunc(least, lanes.type.element) if bits < 32 else least
        return builder.icmp_unsigned(">=", magnitudes, repeated(builder, limit, count))


def pairs(signature: Any, arguments: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Source and residual, the first two arguments, each with its type."""
    return (signature.args[0], arguments[0]), (signature.args[1], arguments[1])


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def reaching(typing_context: Any, source: Any, residual: Any, position: Any, least: Any) -> Any:
    """The ``GROUP`` lanes from ``position`` on: bit i is set where the magnitude of lane i is at least ``least``.

    Magnitudes compare as integers, those of the source's own patterns (so has ``least`` to be) where there is no
    residual, else fp32 patterns. The residual becomes the element.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        lanes = Lanes(context, builder)
        source, residual = pairs(signature, arguments)
        return builder.bitcast(lanes.reach(source, residual, arguments[2], arguments[3], GROUP), LONG)

    return types.uint64(source, residual, types.int64, types.uint32), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def reach_one(typing_context: Any, source: Any, residual: Any, position: Any, least: Any) -> Any:
    """As :func:`reaching`, of one lane."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        lanes = Lanes(context, builder)
        source, residual = pairs(signature, arguments)
        flags = lanes.reach(source, residual, arguments[2], arguments[3], 1)
        return builder.extract_element(flags, ir.Constant(WORD, 0))

    return types.boolean(source, residual, types.int64, types.uint32), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def lane_bits(typing_context: Any, source: Any, residual: Any, position: Any) -> Any:
    """The fp32 pattern of the element at ``position``, where :func:`reaching` has been."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        lanes = Lanes(context, builder).exact(*pairs(signature, arguments), arguments[2], 1)
        return builder.extract_element(lanes, ir.Constant(WORD, 0))

    return types.uint32(source, residual, types.int64), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def gather(
    typing_context: Any,
    source: Any,
    residual: Any,
    position: Any,
    mask: Any,
    indices: Any,
    survivors: Any,
    kept: Any,
) -> Any:
    """Write positions and patterns of the lanes in ``mask``, from ``kept`` on; returns how many there are then.

    Without a branch, with AVX-512's compression of a register: up to ``GROUP`` elements from ``kept`` on are written.
    Only where there is :func:`avx512`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        if not has_avx512(context):
            return arguments[6]
        lanes, (source, residual) = Lanes(context, builder), pairs(signature, arguments)
        words = ir.VectorType(WORD, REGISTER)
        bits = ir.IntType(REGISTER)
        counting, nothing = ir.Constant(words, list(range(REGISTER))), lanes_of(0, words)
        flags = ir.VectorType(ir.IntType(1), REGISTER)
        declare = cast(Any, cgutils.get_or_insert_function)
        compress = declare(builder.module, ir.FunctionType(words, [words, words, flags]), COMPRESS)
        kept = arguments[6]
        for start in range(0, GROUP, REGISTER):
            position = builder.add(arguments[2], ir.Constant(LONG, start))
            chosen = builder.trunc(builder.lshr(arguments[3], ir.Constant(LONG, start)), bits)
            positions = builder.add(counting, repeated(builder, builder.trunc(position, WORD), REGISTER))
            elements = lanes.exact(source, residual, position, REGISTER)
            for values, output in ((positions, 4), (elements, 5)):
                first = builder.call(compress, [values, nothing, builder.bitcast(chosen, flags)])
                lanes.store(first, signature.args[output], arguments[output], kept)
            kept = builder.add(kept, builder.zext(builder.ctpop(chosen), LONG))
        return kept

    return types.uint64(source, residual, types.int64, types.uint64, indices, survivors, types.uint64), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def write_signs(typing_context: Any, values: Any, position: Any, bits: Any, to: Any) -> Any:
    """Write the signs of the ``GROUP`` floats from ``position`` on to eight bytes of ``bits``, from ``to`` on: that of
    float i is bit i % 8 of byte i // 8."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        lanes, (values, position, bits, to) = Lanes(context, builder), arguments
        patterns = builder.load(lanes.pointer(signature.args[0], values, position, WORD, GROUP), align=4)
        signs = builder.icmp_signed("<", patterns, lanes_of(0, patterns.type))
        place = lanes.pointer(signature.args[2], bits, to, BYTE, GROUP // 8)
        builder.store(builder.bitcast(signs, place.type.pointee), place, align=1)
        return context.get_dummy_value()

    return types.none(values, types.uint64, bits, types.uint64), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def read_signs(typing_context: Any, bits: Any, position: Any, magnitude: Any, values: Any, to: Any) -> Any:
    """The inverse: write ``GROUP`` floats to ``values``, from ``to`` on, which are the magnitude with those signs."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        lanes, (bits, position, magnitude, values, to) = Lanes(context, builder), arguments
        read = builder.load(lanes.pointer(signature.args[0], bits, position, BYTE, GROUP // 8), align=1)
        negative = builder.bitcast(read, ir.VectorType(ir.IntType(1), GROUP))
        both = (repeated(builder, each, GROUP) for each in (builder.fneg(magnitude), magnitude))
        place = lanes.pointer(signature.args[3], values, to, FLOAT, GROUP)
        builder.store(builder.select(negative, *both), place, align=4)
        return context.get_dummy_value()

    return types.none(bits, types.uint64, types.float32, values, types.uint64), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def look_up(typing_context: Any, table: Any, codes: Any, position: Any, shift: Any, values: Any, to: Any) -> Any:
    """Write to ``values``, from ``to`` on, what the 16 bytes of ``codes`` from ``position`` on number in ``table``, an
    array of 16 floats: each by its low four bits, after ``shift``. Only where there is :func:`avx512`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        if not has_avx512(context):
            return context.get_dummy_value()
        table, codes, position, shift, values, to = arguments
        lanes, (table_kind, codes_kind, _, _, values_kind, _) = Lanes(context, builder), signature.args
        words, floats = ir.VectorType(WORD, REGISTER), ir.VectorType(FLOAT, REGISTER)
        start = ir.Constant(LONG, 0)
        levels = builder.load(lanes.pointer(table_kind, table, start, FLOAT, REGISTER), align=4)
        numbers = builder.zext(builder.load(lanes.pointer(codes_kind, codes, position, BYTE, REGISTER), align=1), words)
        numbers = builder.lshr(numbers, repeated(builder, shift, REGISTER))  # only the low four bits are looked at
        declare = cast(Any, cgutils.get_or_insert_function)
        permute = declare(builder.module, ir.FunctionType(floats, [floats, words]), PERMUTE)
        found = builder.call(permute, [levels, numbers])
        builder.store(found, lanes.pointer(values_kind, values, to, FLOAT, REGISTER), align=4)
        return context.get_dummy_value()

    return types.none(table, codes, types.uint64, types.uint32, values, types.uint64), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def gather_bytes(typing_context: Any, source: Any, position: Any, mask: Any, out: Any, to: Any) -> Any:
    """Write those of the ``GROUP`` bytes from ``position`` on that are in ``mask`` to ``out``, from ``to`` on, one
    behind the other: ``GROUP`` bytes are written, of which the others mean nothing. Only where there is
    :func:`avx512_bytes`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        if not has_feature(context, BYTES_FEATURE):
            return context.get_dummy_value()
        lanes, (source, position, mask, out, to) = Lanes(context, builder), arguments
        found = builder.load(lanes.pointer(signature.args[0], source, position, BYTE, GROUP), align=1)
        packed = moved_bytes(builder, COMPRESS_BYTES, found, mask)
        builder.store(packed, lanes.pointer(signature.args[3], out, to, BYTE, GROUP), align=1)
        return context.get_dummy_value()

    return types.none(source, types.uint64, types.uint64, out, types.uint64), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def spread_bytes(typing_context: Any, source: Any, position: Any, mask: Any, out: Any, to: Any) -> Any:
    """The inverse: the bytes of ``source`` from ``position`` on, of which ``GROUP`` are read, become in turn those of
    the ``GROUP`` bytes from ``to`` on that are in ``mask``. Only where there is :func:`avx512_bytes`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        if not has_feature(context, BYTES_FEATURE):
            return context.get_dummy_value()
        lanes, (source, position, mask, out, to) = Lanes(context, builder), arguments
        packed = builder.load(lanes.pointer(signature.args[0], source, position, BYTE, GROUP), align=1)
        place = lanes.pointer(signature.args[3], out, to, BYTE, GROUP)
        chosen = builder.bitcast(mask, ir.VectorType(ir.IntType(1), GROUP))
        spread = moved_bytes(builder, EXPAND_BYTES, packed, mask)
        builder.store(builder.select(chosen, spread, builder.load(place, align=1)), place, align=1)
        return context.get_dummy_value()

    return types.none(source, types.uint64, types.uint64, out, types.uint64), generate


def moved_bytes(builder: ir.IRBuilder, instruction: str, lanes: Any, mask: Any) -> Any:
    flags = ir.VectorType(ir.IntType(1), GROUP)
    declare = cast(Any, cgutils.get_or_insert_function)
    move = declare(builder.module, ir.FunctionType(lanes.type, [lanes.type, lanes.type, flags]), instruction)
    return builder.call(move, [lanes, lanes_of(0, lanes.type), builder.bitcast(mask, flags)])


AVX512_FEATURE, BYTES_FEATURE = "+avx512f", "+avx512vbmi2"


def has_feature(context: Any, feature: str) -> bool:
    """Whether the code is compiled for it (which the cache tells apart), not whether this CPU has it."""
    return feature in context.codegen().magic_tuple()[2].split(",")


def has_avx512(context: Any) -> bool:
    return has_feature(context, AVX512_FEATURE)


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def avx512(typing_context: Any) -> Any:
    """Whether :func:`gather` and :func:`look_up` can be called: a constant in compiled code."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(has_avx512(context)))

    return types.boolean(), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def avx512_bytes(typing_context: Any) -> Any:
    """Whether :func:`gather_bytes` and :func:`spread_bytes` can be called: a constant in compiled code."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(has_feature(context, BYTES_FEATURE)))

    return types.boolean(), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def far_below(typing_context: Any, values: Any, position: Any, highest: Any, distance: Any) -> Any:
    """Of the ``GROUP`` bytes (uint8) from ``position`` on: bit i is set where ``highest`` less byte i, modulo 256, is
    ``distance`` or more."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        array, position, highest, distance = arguments
        pointer = Lanes(context, builder).pointer(signature.args[0], array, position, BYTE, GROUP)
        below = builder.sub(repeated(builder, highest, GROUP), builder.load(pointer, align=1))
        return builder.bitcast(builder.icmp_unsigned(">=", below, repeated(builder, distance, GROUP)), LONG)

    return types.uint64(values, types.int64, types.uint8, types.uint8), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def trailing_zeros(typing_context: Any, mask: Any) -> Any:
    """Zeros below the lowest set bit; 64 of 0."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def count_ones(typing_context: Any, mask: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate

"""Vector operations on up to 64 elements, for which Numba has no types, as LLVM intrinsics.

Each intrinsic reads *lanes*: consecutive elements, as the fp32 patterns of their exact values. The dtype of an array
says what it holds: ``uint32`` fp32 patterns, ``uint16`` bf16 patterns, ``int16`` fp16 patterns (Numba has no fp16 on a
CPU). A residual is fp32 patterns, or ``None``. With a residual, an element is the value plus its residual.
:func:`reaching` writes that sum to the residual; from then on, the residual is the element.

Positions are not checked against the arrays.
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
"""Lanes of one comparison. Its result has one bit for each, in a 64-bit word."""

BYTE, SHORT, WORD, LONG, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

MAGNITUDE = 0x7FFFFFFF

REGISTER = 16
"""32-bit lanes of one AVX-512 register."""

COMPRESS = "llvm.x86.avx512.mask.compress.v16i32"

PERMUTE = "llvm.x86.avx512.permvar.sf.512"

COMPRESS_BYTES, EXPAND_BYTES = "llvm.x86.avx512.mask.compress.v64i8", "llvm.x86.avx512.mask.expand.v64i8"


def source_of(values: Values) -> NDArray[Any]:
    """The patterns of ``values``, as a read-only view of the dtype that says what they are."""
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
    """Builds the LLVM code that reads and writes lanes of the arrays of one call of an intrinsic."""

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
        """The fp32 patterns of lanes of an array of this Numba type."""
        if kind.dtype == types.uint32:
            return lanes
        builder, wide = self.builder, ir.VectorType(WORD, lanes.type.count)
        words = builder.zext(lanes, wide)
        if kind.dtype == types.uint16:
            return builder.shl(words, lanes_of(16, wide))
        return self.widened_halves(words)

    def widened_halves(self, words: Any) -> Any:
        """fp16 patterns as fp32 patterns. Only denormals need floating-point arithmetic: so any instruction set will
        do, and a NaN keeps its bits."""
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
        """The elements' patterns, after :func:`reaching` was called for them."""
        kind, array = source if residual[0] == types.none else residual
        return self.widened(kind, self.load(kind, array, position, count))

    def reach(self, source: tuple[Any, Any], residual: tuple[Any, Any], position: Any, least: Any, count: int) -> Any:
        """One bit for each lane: whether its magnitude is at least ``least``. The residual becomes the element."""
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
    """Source and residual, the first two arguments, each with its Numba type."""
    return (signature.args[0], arguments[0]), (signature.args[1], arguments[1])


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def reaching(typing_context: Any, source: Any, residual: Any, position: Any, least: Any) -> Any:
    """Compare the ``GROUP`` lanes from ``position`` on: bit i is set if the magnitude of lane i is at least ``least``.

    Magnitudes are compared as integers. Without a residual, these are the source's own patterns, and so is ``least``;
    with one, they are fp32 patterns. The residual becomes the element.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        lanes = Lanes(context, builder)
        source, residual = pairs(signature, arguments)
        return builder.bitcast(lanes.reach(source, residual, arguments[2], arguments[3], GROUP), LONG)

    return types.uint64(source, residual, types.int64, types.uint32), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def reach_one(typing_context: Any, source: Any, residual: Any, position: Any, least: Any) -> Any:
    """As :func:`reaching`, for one lane."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        lanes = Lanes(context, builder)
        source, residual = pairs(signature, arguments)
        flags = lanes.reach(source, residual, arguments[2], arguments[3], 1)
        return builder.extract_element(flags, ir.Constant(WORD, 0))

    return types.boolean(source, residual, types.int64, types.uint32), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def lane_bits(typing_context: Any, source: Any, residual: Any, position: Any) -> Any:
    """The fp32 pattern of the element at ``position``, after :func:`reaching` was called for it."""

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
    """Write the positions and patterns of the lanes in ``mask`` to the buffers, from ``kept`` on. Returns the new
    ``kept``.

    It has no branches, and uses AVX-512's compress instruction. Up to ``GROUP`` elements from ``kept`` on are
    overwritten. Call it only if :func:`avx512`.
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
    """Write the sign bits of the ``GROUP`` floats from ``position`` on to eight bytes of ``bits``, from ``to`` on. The
    sign of float i is bit i % 8 of byte i // 8."""

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
    """The inverse of :func:`write_signs`: write ``GROUP`` floats to ``values``, from ``to`` on, which are ``magnitude``
    with the signs in ``bits``."""

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
    """Look the 16 bytes of ``codes`` from ``position`` on up in ``table``, an array of 16 floats, and write the results
    to ``values``, from ``to`` on. A byte is shifted right by ``shift``; its low four bits are the index. Call it only
    if :func:`avx512`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        if not has_avx512(context):
            return context.get_dummy_value()
        table, codes, position, shift, values, to = arguments
        lanes, (table_kind, codes_kind, _, _, values_kind, _) = Lanes(context, builder), signature.args
        words, floats = ir.VectorType(WORD, REGISTER), ir.VectorType(FLOAT, REGISTER)
        start = ir.Constant(LONG, 0)
        levels = builder.load(lanes.pointer(table_kind, table, start, FLOAT, REGISTER), align=4)
        numbers = builder.zext(builder.load(lanes.pointer(codes_kind, codes, position, BYTE, REGISTER), align=1), words)
        numbers = builder.lshr(numbers, repeated(builder, shift, REGISTER))  # only the low four bits are used
        declare = cast(Any, cgutils.get_or_insert_function)
        permute = declare(builder.module, ir.FunctionType(floats, [floats, words]), PERMUTE)
        found = builder.call(permute, [levels, numbers])
        builder.store(found, lanes.pointer(values_kind, values, to, FLOAT, REGISTER), align=4)
        return context.get_dummy_value()

    return types.none(table, codes, types.uint64, types.uint32, values, types.uint64), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def gather_bytes(typing_context: Any, source: Any, position: Any, mask: Any, out: Any, to: Any) -> Any:
    """Write those of the ``GROUP`` bytes from ``position`` on whose bits are set in ``mask`` to ``out``, from ``to``
    on, one behind another. ``GROUP`` bytes of ``out`` are overwritten; the rest of them is unspecified. Call it only if
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
    """The inverse of :func:`gather_bytes`: write the bytes of ``source`` from ``position`` on, in turn, to those of the
    ``GROUP`` bytes of ``out`` from ``to`` on whose bits are set in ``mask``. ``GROUP`` bytes of ``source`` are read.
    Call it only if :func:`avx512_bytes`."""

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
    """Whether code is compiled for this CPU feature. Numba's cache tells such code apart."""
    return feature in context.codegen().magic_tuple()[2].split(",")


def has_avx512(context: Any) -> bool:
    return has_feature(context, AVX512_FEATURE)


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def avx512(typing_context: Any) -> Any:
    """Whether :func:`gather` and :func:`look_up` can be called. A constant in compiled code."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(has_avx512(context)))

    return types.boolean(), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def avx512_bytes(typing_context: Any) -> Any:
    """Whether :func:`gather_bytes` and :func:`spread_bytes` can be called. A constant in compiled code."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(has_feature(context, BYTES_FEATURE)))

    return types.boolean(), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def far_below(typing_context: Any, values: Any, position: Any, highest: Any, distance: Any) -> Any:
    """Compare the ``GROUP`` bytes (uint8) from ``position`` on: bit i is set if ``highest`` minus byte i, modulo 256,
    is at least ``distance``."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        array, position, highest, distance = arguments
        pointer = Lanes(context, builder).pointer(signature.args[0], array, position, BYTE, GROUP)
        below = builder.sub(repeated(builder, highest, GROUP), builder.load(pointer, align=1))
        return builder.bitcast(builder.icmp_unsigned(">=", below, repeated(builder, distance, GROUP)), LONG)

    return types.uint64(values, types.int64, types.uint8, types.uint8), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def trailing_zeros(typing_context: Any, mask: Any) -> Any:
    """The number of zero bits below the lowest set bit; 64 for 0."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def count_ones(typing_context: Any, mask: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate

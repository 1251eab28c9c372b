// fp16 values under a power-of-two scale, by integer arithmetic, so that host and device agree to the bit.
#pragma once

#include "portable.cuh"

// The fp16 pattern nearest to a value, ties to even; infinity beyond 65504. A NaN stays a NaN and keeps its upper bits.
EITHER u16 half_of(float value) {
    const u32 bits = bits_of(value), magnitude = bits & MAGNITUDE;
    const u16 sign = u16(bits >> 16 & 0x8000);
    if (magnitude > INFINITE) return u16(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
    if (magnitude >= 0x477FF000u) return u16(sign | 0x7C00);        // 65520, halfway to 2^16
    const bool is_normal = magnitude >= 0x38800000u;                // 2^-14
    if (magnitude < 0x33000000u) return sign;                       // 2^-25, which is a tie and rounds to zero
    // `kept` counts units in the last place of the fp16 result; the bits that are shifted out decide the rounding.
    const u32 exponent = magnitude >> 23, significand = (magnitude & 0x7FFFFFu) | 0x800000u;
    const u32 shift = is_normal ? 13 : 126 - exponent;
    u32 kept = significand >> shift;
    const u32 rest = significand & ((1u << shift) - 1), halfway = 1u << (shift - 1);
    kept += rest > halfway || (rest == halfway && (kept & 1));
    // A carry out of the significand increases the exponent, which is right.
    return u16(sign | (is_normal ? kept + ((exponent - 113) << 10) : kept));
}

// The value of an fp16 pattern: exact.
EITHER float value_of_half(u16 half) {
    const u32 sign = u32(half & 0x8000) << 16, exponent = half >> 10 & 31, significand = half & 0x3FF;
    if (exponent == 31) return float_of(sign | INFINITE | (significand ? QUIET : 0) | significand << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | significand << 13);
    const float magnitude = multiply(float(significand), float_of(103u << 23));   // units of 2^-24
    return float_of(sign | bits_of(magnitude));
}

// The types that a gradient may have.
struct Half { u16 pattern; };
struct Bfloat16 { u16 pattern; };

EITHER float widened(float value) { return value; }
EITHER float widened(Half value) { return value_of_half(value.pattern); }
EITHER float widened(Bfloat16 value) { return float_of(u32(value.pattern) << 16); }

// value * 2^exponent, by two exact factors, since 2^exponent may be out of the range of fp32. It is rounded once, for
// every result that is not zero or infinity in fp16 and fp32. Beyond +-252 all results are zero or infinity.
EITHER float scaled(float value, int exponent) {
    const int within = exponent < -252 ? -252 : exponent > 252 ? 252 : exponent;
    const int first = within / 2, second = within - first;
    const float result = multiply(multiply(value, float_of(u32(first + 127) << 23)), float_of(u32(second + 127) << 23));
    return magnitude_of(value) > INFINITE ? value : result;
}

// From fp16 to fp32. A finite value stays finite. (The largest fp32 numbers round to 2^15 in fp16, which scales back to
// 2^128.)
EITHER float value_of_scaled_half(u16 half, int exponent) {
    const float value = value_of_half(half), back = scaled(value, -exponent);
    return is_finite(value) ? limited(back) : back;
}

// The exponent that brings the largest finite magnitude to [2^14, 2^15); 15 if that magnitude is zero.
EITHER int exponent_for(u32 largest) {
    if (largest == 0) return 15;
    // frexp's exponent. That of a denormal follows from the position of its highest bit.
    int exponent = int(largest >> 23) - 126;
    if (largest < 0x800000u) for (exponent = -149; largest; largest >>= 1) exponent++;
    return 15 - exponent;
}

// The arithmetic of the block codes for one element: scales, codes and levels.
#pragma once

#include "half.cuh"

constexpr u32 POISONED = 0x7FC00000u;           // scale and values of a block with a NaN or an infinity
constexpr u16 POISONED_PATTERN = 0x7FC0;
constexpr u32 LARGEST_PATTERN = 0x7F7F;
constexpr float MULTIPLIED_MIN = 1.17549435e-38f;   // 2^-126
constexpr float MULTIPLIED_MAX = 8.50705917e37f;    // 2^126
constexpr int NONFINITE_CODE = -128;

// largest / 127, or the next number up if 127 times that is less than `largest`.
EITHER float scale_reaching(float largest) {
    const float scale = divide(largest, 127.0f);
    return multiply(scale, 127.0f) < largest ? float_of(bits_of(scale) + 1) : scale;
}

// Elements divided by their block's scale; codes are made of that. If the scale and its reciprocal are normal numbers,
// the element is multiplied by the reciprocal.
struct Divisor {
    float scale, reciprocal;
    bool multiplies;

    EITHER explicit Divisor(float of) {
        scale = of == 0.0f ? 1.0f : of;
        multiplies = scale >= MULTIPLIED_MIN && scale <= MULTIPLIED_MAX;
        reciprocal = divide(1.0f, multiplies ? scale : 1.0f);
    }
    EITHER float quotient(float x) const { return multiplies ? multiply(x, reciprocal) : divide(x, scale); }
};

EITHER i8 int8_code(float x, const Divisor &divisor) {
    return is_finite(x) ? i8(round_half_to_even(divisor.quotient(x))) : i8(NONFINITE_CODE);
}

EITHER float int8_value(i8 code, float scale) {
    const float value = multiply(float(code), scale);
    if (code == NONFINITE_CODE || magnitude_of(value) > INFINITE) return float_of(POISONED);
    return limited(value);
}

// NormalFloat-4. Source: QLoRA (Dettmers et al., 2023), appendix E.
__device__ constexpr float LEVELS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171229224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// The midpoint of level `below` and the next one, rounded to fp32.
template <int below> EITHER float boundary() {
    constexpr float middle = float((double(LEVELS[below]) + double(LEVELS[below + 1])) / 2);
    return middle;
}

// The number of boundaries less than a quotient, by binary search.
EITHER u32 nearest_level(float quotient) {
    const bool half = quotient > boundary<7>();
    const bool quarter = quotient > (half ? boundary<11>() : boundary<3>());
    const float of_eighths =
        half ? (quarter ? boundary<13>() : boundary<9>()) : (quarter ? boundary<5>() : boundary<1>());
    const bool eighth = quotient > of_eighths;
    const float upper =
        quarter ? (eighth ? boundary<14>() : boundary<12>()) : (eighth ? boundary<10>() : boundary<8>());
    const float lower = quarter ? (eighth ? boundary<6>() : boundary<4>()) : (eighth ? boundary<2>() : boundary<0>());
    return half * 8u + quarter * 4u + eighth * 2u + (quotient > (half ? upper : lower));
}

EITHER float nf4_value(float level, float scale) {
    const float value = multiply(level, scale);
    return magnitude_of(value) > INFINITE ? float_of(POISONED) : value;
}

// The nearest bf16 pattern of a magnitude, half to even; at most that of the largest finite number.
EITHER u16 bfloat16_of(float magnitude) {
    const u32 bits = bits_of(magnitude), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return u16(rounded < LARGEST_PATTERN ? rounded : LARGEST_PATTERN);
}

EITHER float onebit_value(u32 sign, u16 scale) { return float_of(u32(scale) << 16 ^ sign << 31); }

// What a type holds of a value that was decoded.
EITHER float held(float value, Half) { return value_of_half(half_of(value)); }
EITHER float held(float value, Bfloat16) {
    const u32 bits = bits_of(value);
    return magnitude_of(value) > INFINITE ? value : float_of((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u);
}

// What is lost of an element, which comes back as `decoded` in its own type.
template <typename Number> EITHER float lost_of(float x, float decoded) {
    const float lost = subtract(x, decoded), kept = held(decoded, Number());
    return is_finite(kept) ? add(is_finite(lost) ? lost : 0.0f, subtract(decoded, kept)) : 0.0f;
}
template <> EITHER float lost_of<float>(float x, float decoded) {
    const float lost = subtract(x, decoded);
    return is_finite(lost) ? lost : 0.0f;
}

// The types and the arithmetic of all kernels: fixed-width integers, and fp32 operations that round once each.
//
// The functions marked EITHER run on the device and, compiled by any C++ compiler without contraction, on the host,
// with the same bits: so they are tested without a GPU. Only the sign and payload of a NaN that an operation produces
// differ from machine to machine.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i64 = long long;

#if defined(__CUDACC__)
#define EITHER __host__ __device__ __forceinline__
#define SHARED(Type, name) __shared__ Type name
#else
#define EITHER inline
#endif

constexpr u32 LANES = 32;
constexpr u32 WHOLE_WARP = 0xFFFFFFFFu;

constexpr u32 MAGNITUDE = 0x7FFFFFFFu;
constexpr u32 INFINITE = 0x7F800000u;
constexpr u32 QUIET = 0x00400000u;
constexpr float LARGEST_FINITE = 3.402823466e38f;

#if defined(__CUDA_ARCH__)
EITHER u32 bits_of(float value) { return __float_as_uint(value); }
EITHER float float_of(u32 bits) { return __uint_as_float(bits); }
EITHER float add(float a, float b) { return __fadd_rn(a, b); }
EITHER float subtract(float a, float b) { return __fsub_rn(a, b); }
EITHER float multiply(float a, float b) { return __fmul_rn(a, b); }
EITHER float divide(float a, float b) { return __fdiv_rn(a, b); }
EITHER float square_root(float a) { return __fsqrt_rn(a); }
EITHER float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
EITHER float round_half_to_even(float a) { return rintf(a); }
#else
EITHER u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
EITHER float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
EITHER float add(float a, float b) { return a + b; }
EITHER float subtract(float a, float b) { return a - b; }
EITHER float multiply(float a, float b) { return a * b; }
EITHER float divide(float a, float b) { return a / b; }
EITHER float square_root(float a) { return __builtin_sqrtf(a); }
EITHER float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EITHER float round_half_to_even(float a) { return __builtin_rintf(a); }
#endif

EITHER u32 magnitude_of(float value) { return bits_of(value) & MAGNITUDE; }
EITHER bool is_finite(float value) { return magnitude_of(value) < INFINITE; }

// The nearest finite number; a NaN stays a NaN.
EITHER float limited(float value) {
    return value > LARGEST_FINITE ? LARGEST_FINITE : value < -LARGEST_FINITE ? -LARGEST_FINITE : value;
}

// A square root divided by a number c, with the bits of the division, of 1 / c in two parts. Source: kernels/division.py.
// In the second product the root is bounded, since an infinite one would give a NaN.
EITHER float divided_root(float root, float high, float low) {
    constexpr float BOUND = 1.2676506002282294e30f;     // 2^100
    return multiply_add(root, high, multiply(root < BOUND ? root : BOUND, low));
}

// The element that is encoded: its value plus `lost`, what earlier encodings lost of it, which is finite. A NaN keeps
// its payload, as on a CPU; the device's addition would give the canonical NaN.
EITHER float with_lost(float value, float lost) {
    return magnitude_of(value) > INFINITE ? float_of(bits_of(value) | QUIET) : add(value, lost);
}

// Bit patterns of bf16 and fp32, and their exponents apart from the other bits.
#include "grid.cuh"
#include "half.cuh"

// Sets a word, which must be zero before, if the low half of a value is not zero. If it stays zero, bf16 holds every
// value. Whole warps must call it.
extern "C" __global__ void find_low_halves(const u32 *patterns, u64 size, u32 *low) {
    u32 seen = 0;
    for (u64 at = first_element(); at < size; at += all_threads()) seen |= patterns[at] & 0xFFFFu;
    const u32 lanes = __ballot_sync(WHOLE_WARP, seen != 0);
    if (threadIdx.x % LANES == 0 && lanes) atomicOr(low, 1u);
}

extern "C" __global__ void narrow(const u32 *patterns, u64 size, u16 *out) {
    for (u64 at = first_element(); at < size; at += all_threads()) out[at] = u16(patterns[at] >> 16);
}

extern "C" __global__ void widen(const u16 *patterns, u64 size, u32 *out) {
    for (u64 at = first_element(); at < size; at += all_threads()) out[at] = u32(patterns[at]) << 16;
}

namespace {

// The eight bits below the sign bit; and the others, sign first, in one plane for each byte, the lowest byte first.
template <class Pattern>
__device__ __forceinline__ void split(const Pattern *patterns, u64 size, u8 *exponents, u8 *rest) {
    constexpr u32 WIDTH = sizeof(Pattern) * 8, FRACTION = WIDTH - 9;
    for (u64 at = first_element(); at < size; at += all_threads()) {
        const u32 pattern = patterns[at];
        const u32 others = pattern >> (WIDTH - 1) << FRACTION | (pattern & ((1u << FRACTION) - 1));
        exponents[at] = u8(pattern >> FRACTION);
#pragma unroll
        for (u32 plane = 0; plane < sizeof(Pattern) - 1; plane++) rest[plane * size + at] = u8(others >> 8 * plane);
    }
}

template <class Pattern>
__device__ __forceinline__ void join(const u8 *exponents, const u8 *rest, u64 size, Pattern *patterns) {
    constexpr u32 WIDTH = sizeof(Pattern) * 8, FRACTION = WIDTH - 9;
    for (u64 at = first_element(); at < size; at += all_threads()) {
        u32 others = 0;
#pragma unroll
        for (u32 plane = 0; plane < sizeof(Pattern) - 1; plane++) others |= u32(rest[plane * size + at]) << 8 * plane;
        const u32 fraction = others & ((1u << FRACTION) - 1);
        patterns[at] = Pattern(others >> FRACTION << (WIDTH - 1) | u32(exponents[at]) << FRACTION | fraction);
    }
}

}  // namespace

extern "C" __global__ void split_exponents_16(const u16 *patterns, u64 size, u8 *exponents, u8 *rest) {
    split(patterns, size, exponents, rest);
}

extern "C" __global__ void split_exponents_32(const u32 *patterns, u64 size, u8 *exponents, u8 *rest) {
    split(patterns, size, exponents, rest);
}

extern "C" __global__ void join_exponents_16(const u8 *exponents, const u8 *rest, u64 size, u16 *patterns) {
    join(exponents, rest, size, patterns);
}

extern "C" __global__ void join_exponents_32(const u8 *exponents, const u8 *rest, u64 size, u32 *patterns) {
    join(exponents, rest, size, patterns);
}

namespace {

// A bf16 or fp16 number: the pattern nearest to a value, ties to even. What is no number is found out by what it is not
// given back for.
template <class Number> __device__ __forceinline__ Number nearest(float value);

template <> __device__ __forceinline__ Half nearest<Half>(float value) { return Half{half_of(value)}; }

template <> __device__ __forceinline__ Bfloat16 nearest<Bfloat16>(float value) {
    const u32 bits = bits_of(value);
    return Bfloat16{u16((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}

// Zero, or a normal number.
__device__ __forceinline__ bool is_regular(float value) {
    const u32 magnitude = bits_of(value) & MAGNITUDE;
    return magnitude == 0 || magnitude - 0x00800000u < 0x7F000000u;
}

// Sets a word, which must be zero before, if a value is not given back. Whole warps must call it.
template <class Number>
__device__ __forceinline__ void narrow_scaled(
    const float *values, u64 size, float scale, float inverse, u16 *out, u32 *lost
) {
    u32 seen = 0;
    for (u64 at = first_element(); at < size; at += all_threads()) {
        const float value = values[at];
        const Number nearby = nearest<Number>(multiply(value, inverse));
        const float number = widened(nearby);
        const bool given_back = bits_of(multiply(number, scale)) == bits_of(value);
        const bool exact = given_back && is_regular(value) && is_regular(number);
        out[at] = exact ? nearby.pattern : u16(0);
        seen |= u32(!exact);
    }
    const u32 lanes = __ballot_sync(WHOLE_WARP, seen != 0);
    if (threadIdx.x % LANES == 0 && lanes) atomicOr(lost, 1u);
}

template <class Number>
__device__ __forceinline__ void widen_scaled(const u16 *patterns, u64 size, float scale, float *out) {
    for (u64 at = first_element(); at < size; at += all_threads())
        out[at] = multiply(widened(Number{patterns[at]}), scale);
}

}  // namespace

extern "C" __global__ void narrow_scaled_bfloat16(
    const float *values, u64 size, float scale, float inverse, u16 *out, u32 *lost
) {
    narrow_scaled<Bfloat16>(values, size, scale, inverse, out, lost);
}

extern "C" __global__ void narrow_scaled_float16(
    const float *values, u64 size, float scale, float inverse, u16 *out, u32 *lost
) {
    narrow_scaled<Half>(values, size, scale, inverse, out, lost);
}

extern "C" __global__ void widen_scaled_bfloat16(const u16 *patterns, u64 size, float scale, float *out) {
    widen_scaled<Bfloat16>(patterns, size, scale, out);
}

extern "C" __global__ void widen_scaled_float16(const u16 *patterns, u64 size, float scale, float *out) {
    widen_scaled<Half>(patterns, size, scale, out);
}

// What find_scale writes, and narrow_found reads.
struct Found {
    float scale;
    u32 lost;                                   // set if a value is not given back
};

constexpr u32 SAMPLED_TENSORS_MAX = 4;          // these numbers are those of reference/scale_search.py
constexpr u32 SAMPLES = 128;
constexpr u32 CANDIDATES = 2 * 128 * 3;
constexpr u32 LEAST = 1u << 23, END = 1u << 24;

struct Sampled {
    const u32 *values[SAMPLED_TENSORS_MAX];
    u64 sizes[SAMPLED_TENSORS_MAX];
};

namespace {

struct Search {
    u32 products[SAMPLED_TENSORS_MAX * SAMPLES];
    u32 first, least;                           // the first product's place, and the least scale in common
};

// Whether some bf16 number times the scale, rounded to 24 bits, is the product, but for a power of two.
__device__ __forceinline__ bool may_scale(u32 scale, u32 product) {
    bool fits = false;
    for (u32 shift = 7; shift <= 8; shift++) {
        const u64 target = u64(product) << shift;
        const u64 m = (2 * target + scale) / (2 * u64(scale));
        const u64 given = m * scale, apart = given > target ? given - target : target - given;
        fits |= m >= 128 && m <= 255 && apart <= 1u << (shift - 1);
    }
    return fits;
}

}  // namespace

// One block. A thread has one candidate.
extern "C" __global__ void find_scale(const __grid_constant__ Sampled sampled, Found *found) {
    SHARED(Search, search);
    if (threadIdx.x == 0) search.first = search.least = 0xFFFFFFFFu;
    __syncthreads();
    for (u32 place = threadIdx.x; place < SAMPLED_TENSORS_MAX * SAMPLES; place += blockDim.x) {
        const u32 tensor = place / SAMPLES;
        const u64 size = sampled.sizes[tensor];
        const u64 at = place % SAMPLES * (size / SAMPLES ? size / SAMPLES : 1);
        const u32 pattern = at < size ? sampled.values[tensor][at] & MAGNITUDE : 0;
        const bool normal = pattern - 0x00800000u < 0x7F000000u;
        search.products[place] = normal ? (pattern & (LEAST - 1)) | LEAST : 0;
        if (normal) atomicMin(&search.first, place);
    }
    __syncthreads();
    if (search.first != 0xFFFFFFFFu && threadIdx.x < CANDIDATES) {
        const u32 shift = 7 + threadIdx.x / (CANDIDATES / 2), m = 128 + threadIdx.x % 128;
        const u32 more = threadIdx.x / 128 % 3;
        const u64 target = (u64(search.products[search.first]) << shift) - (1u << (shift - 1));
        const u64 scale = (target + m - 1) / m + more;
        bool fits = scale >= LEAST && scale < END;
        for (u32 place = search.first; fits && place < SAMPLED_TENSORS_MAX * SAMPLES; place++)
            if (search.products[place]) fits = may_scale(u32(scale), search.products[place]);
        if (fits) atomicMin(&search.least, u32(scale));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool is_one = search.least == 0xFFFFFFFFu || search.least == LEAST;
        found->scale = is_one ? 1.0f : multiply(float(search.least), 5.9604644775390625e-8f);    // 2**-24
        found->lost = 0;
    }
}

// As narrow_scaled_bfloat16, by what find_scale has found.
extern "C" __global__ void narrow_found(const float *values, u64 size, Found *found, u16 *out) {
    const float scale = found->scale;
    narrow_scaled<Bfloat16>(values, size, scale, divide(1.0f, scale), out, &found->lost);
}

// Bit patterns of bf16 and fp32, and their exponents apart from the other bits.
#include "grid.cuh"

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

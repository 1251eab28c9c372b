// A magnitude that a given share of the elements reach, estimated from samples, without a round trip to the host.
#include "grid.cuh"
#include "half.cuh"

namespace {

constexpr u32 THREADS = 1024;
constexpr u32 WARPS = THREADS / LANES;

// For each of the three values above zero of the next two bits of the result: how many samples reach it.
struct Shared {
    u32 reach[WARPS][3];
};

// Consecutive samples in one run. There is one stratum for each run.
constexpr u32 TOGETHER = 4;

// The position of sample `number`. A hash of its run's number and the seed's keys gives the run's begin in its stratum.
// Source: the constants and shifts are those of lowbias32 (Wellons, hash-prospector, 2018).
EITHER u64 position_of(u32 number, u32 first_key, u32 second_key, u32 samples, u64 size) {
    const u32 run = number / TOGETHER;
    const u64 places = size / TOGETHER;
    u32 hashed = run ^ first_key;
    hashed ^= hashed >> 16;
    hashed *= 0x7FEB352Du;
    hashed ^= hashed >> 15 ^ second_key;
    hashed *= 0x846CA68Bu;
    hashed ^= hashed >> 16;
    return (run * places + (hashed * places >> 32)) / (samples / TOGETHER) * TOGETHER + number % TOGETHER;
}

// The magnitudes of the samples. If there are as many samples as values, each value is a sample.
template <class Element>
__device__ __forceinline__ void sample(
    const Element *values, u64 size, const float *residual, u32 first_key, u32 second_key, u32 samples,
    u32 *magnitudes) {
    for (u64 at = first_element(); at < samples; at += all_threads()) {
        const u64 from = samples == size ? at : position_of(u32(at), first_key, second_key, samples, size);
        float element = widened(values[from]);
        if (residual) element = with_lost(element, residual[from]);
        magnitudes[at] = magnitude_of(element);
    }
}

}  // namespace

extern "C" __global__ void sample_float32(
    const float *values, u64 size, const float *residual, u32 first_key, u32 second_key, u32 samples,
    u32 *magnitudes) {
    sample(values, size, residual, first_key, second_key, samples, magnitudes);
}

extern "C" __global__ void sample_float16(
    const Half *values, u64 size, const float *residual, u32 first_key, u32 second_key, u32 samples,
    u32 *magnitudes) {
    sample(values, size, residual, first_key, second_key, samples, magnitudes);
}

extern "C" __global__ void sample_bfloat16(
    const Bfloat16 *values, u64 size, const float *residual, u32 first_key, u32 second_key, u32 samples,
    u32 *magnitudes) {
    sample(values, size, residual, first_key, second_key, samples, magnitudes);
}

// The `wanted`-th largest magnitude, clipped to [the smallest denormal, infinity], by one block of threads. Each round
// finds two bits of the result, from the highest down: the largest number that at least `wanted` samples reach.
extern "C" __global__ void __launch_bounds__(THREADS) select_magnitude(
    const u32 *magnitudes, u32 samples, u32 wanted, float *threshold) {
    SHARED(Shared, shared);
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    u32 bound = 0;
    for (u32 shift = 32; shift;) {
        shift -= 2;
        const u32 step = 1u << shift;
        u32 reach[3] = {0, 0, 0};
        for (u32 at = threadIdx.x; at < samples; at += THREADS) {
            const u32 magnitude = magnitudes[at];
#pragma unroll
            for (u32 digit = 0; digit < 3; digit++) reach[digit] += magnitude >= bound + (digit + 1) * step;
        }
        for (u32 digit = 0; digit < 3; digit++) {
            const u32 of_warp = sum_over_warp(reach[digit]);
            if (lane == 0) shared.reach[warp][digit] = of_warp;
        }
        __syncthreads();
        u32 digits = 0;
        for (u32 digit = 0; digit < 3; digit++) {
            u32 all = 0;
            for (u32 other = 0; other < WARPS; other++) all += shared.reach[other][digit];
            digits += all >= wanted;
        }
        bound += digits * step;
        __syncthreads();
    }
    if (threadIdx.x == 0) *threshold = float_of(bound < 1 ? 1 : bound > INFINITE ? INFINITE : bound);
}

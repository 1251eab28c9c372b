// What the replays of a GPU's own Adam share: a step's scalars, an element's state, and the loop over both.
// The candidates, their names and their sources: kernels/gpu_adam.py.
#pragma once

#include "grid.cuh"
#include "steps.cuh"

constexpr u32 THREADS = 256;
constexpr u32 OWN = 4;                          // elements of a thread that are under way at a time
constexpr u32 TILE = THREADS * OWN;             // the same number as in cuda/gpu_adam.py

struct GpuStep {                                // ROW of kernels/gpu_adam.py
    double decay, beta1, beta2, weight1, weight2, eps;
    float multiplier, step_size, first, root, reciprocal, high, low;
    u32 flags;
};

constexpr u32 COUPLED = 1, DECAYS = 2, SMALL = 4, DIVIDES = 8;

// Which product of a sum of two is fused with the addition.
constexpr u32 MOMENT = 0, GRADIENT = 1, NEITHER = 2;

struct Placement {
    u32 first, second;                          // of the sums that make the first and the second moment
    u32 reciprocal;                             // a division by a number multiplies with its reciprocal
};

struct GpuState {
    float param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

// The root of the second moment divided by the root of its correction.
EITHER float corrected_root(float second, const GpuStep &step) {
    const float root = square_root(second);
    return step.flags & DIVIDES ? divide(root, step.root) : divided_root(root, step.high, step.low);
}

// All steps of a tile's elements. `apply(state, gradient, step)` takes one of an element's.
template <class Apply>
__device__ __forceinline__ void replay_tiles(
    float *param, float *exp_avg, float *exp_avg_sq, float *max_exp_avg_sq, u64 size, const Steps<GpuStep> &all,
    const Apply &apply) {
    for (u64 start = u64(blockIdx.x) * TILE; start < size; start += u64(gridDim.x) * TILE) {
        GpuState states[OWN];
#pragma unroll
        for (u32 own = 0; own < OWN; own++) {
            const u64 at = start + own * THREADS + threadIdx.x;
            if (at < size)
                states[own] = {param[at], exp_avg[at], exp_avg_sq[at], max_exp_avg_sq ? max_exp_avg_sq[at] : 0.0f};
            else states[own] = {};
        }
        for (u32 index = 0; index < all.count; index++) {
            float gradients[OWN];
#pragma unroll
            for (u32 own = 0; own < OWN; own++) {
                const u64 at = start + own * THREADS + threadIdx.x;
                gradients[own] = at < size ? all.values[index][at] : 0.0f;
            }
#pragma unroll
            for (u32 own = 0; own < OWN; own++) apply(states[own], gradients[own], all.steps[index]);
        }
#pragma unroll
        for (u32 own = 0; own < OWN; own++) {
            const u64 at = start + own * THREADS + threadIdx.x;
            if (at >= size) continue;
            param[at] = states[own].param;
            exp_avg[at] = states[own].exp_avg;
            exp_avg_sq[at] = states[own].exp_avg_sq;
            if (max_exp_avg_sq) max_exp_avg_sq[at] = states[own].max_exp_avg_sq;
        }
    }
}

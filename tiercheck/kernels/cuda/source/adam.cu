// All steps of Adam or AdamW in one read and one write of the state: a thread keeps an element's state in registers.
#include "adam.cuh"
#include "grid.cuh"
#include "steps.cuh"

namespace {

constexpr u32 THREADS = 256;
constexpr u32 OWN = 8;                          // elements of a thread, if gradients are sparse
constexpr u32 TILE = THREADS * OWN;             // the same number as in cuda/adam.py

struct Arrays {
    float *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq;

    __device__ State load(u64 at) const {
        return {param[at], exp_avg[at], exp_avg_sq[at], max_exp_avg_sq ? max_exp_avg_sq[at] : 0.0f};
    }
    __device__ void store(u64 at, const State &state) const {
        param[at] = state.param;
        exp_avg[at] = state.exp_avg;
        exp_avg_sq[at] = state.exp_avg_sq;
        if (max_exp_avg_sq) max_exp_avg_sq[at] = state.max_exp_avg_sq;
    }
};

struct Shared {
    u32 from[MOST_STEPS], to[MOST_STEPS];       // the range of a step's indices in the tile
    float gradient[TILE];
};

// How many of the ascending indices are less than `bound`.
EITHER u32 number_below(const u32 *indices, u32 size, u64 bound) {
    u32 from = 0, to = size;
    while (from < to) {
        const u32 middle = from + (to - from) / 2;
        if (indices[middle] < bound) from = middle + 1;
        else to = middle;
    }
    return from;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) replay_adam(
    float *param, float *exp_avg, float *exp_avg_sq, float *max_exp_avg_sq, u64 size, u64 vectors, u32 contracted,
    const __grid_constant__ Steps<Step> all) {
    const Arrays arrays{param, exp_avg, exp_avg_sq, max_exp_avg_sq};
    for (u64 at = first_element(); at < size; at += all_threads()) {
        State state = arrays.load(at);
#pragma unroll 4
        for (u32 index = 0; index < all.count; index++)
            apply(state, all.values[index][at], all.steps[index], contracted, at >= vectors, max_exp_avg_sq != nullptr);
        arrays.store(at, state);
    }
}

// The same if some gradients are sparse. A step's values for one tile are written into zeros in shared memory. If the
// indices do not ascend, the result is wrong, and nothing is written outside of the tile.
extern "C" __global__ void __launch_bounds__(THREADS) replay_adam_sparse(
    float *param, float *exp_avg, float *exp_avg_sq, float *max_exp_avg_sq, u64 size, u64 vectors, u32 contracted,
    const __grid_constant__ Steps<Step> all) {
    SHARED(Shared, shared);
    const Arrays arrays{param, exp_avg, exp_avg_sq, max_exp_avg_sq};
    const u64 start = u64(blockIdx.x) * TILE;
    for (u32 search = threadIdx.x; search < 2 * all.count; search += THREADS) {
        const u32 index = search / 2;
        if (all.sizes[index] == DENSE) continue;
        u32 &bound = search % 2 ? shared.to[index] : shared.from[index];
        bound = number_below(all.indices[index], all.sizes[index], start + search % 2 * TILE);
    }
    State states[OWN];
#pragma unroll
    for (u32 own = 0; own < OWN; own++) {
        const u64 at = start + own * THREADS + threadIdx.x;
        states[own] = at < size ? arrays.load(at) : State{};
    }
    __syncthreads();
    for (u32 index = 0; index < all.count; index++) {
        const u32 *indices = all.indices[index];
        const float *values = all.values[index];
        const bool sparse = all.sizes[index] != DENSE;
        if (sparse) {
#pragma unroll
            for (u32 own = 0; own < OWN; own++) shared.gradient[own * THREADS + threadIdx.x] = 0.0f;
            __syncthreads();
            for (u32 found = shared.from[index] + threadIdx.x; found < shared.to[index]; found += THREADS) {
                const u64 within = indices[found] - start;      // beyond the tile also if the index is before it
                if (within < TILE) shared.gradient[within] = values[found];
            }
            __syncthreads();
        }
#pragma unroll
        for (u32 own = 0; own < OWN; own++) {
            const u64 at = start + own * THREADS + threadIdx.x;
            if (at >= size) continue;
            const float gradient = sparse ? shared.gradient[own * THREADS + threadIdx.x] : values[at];
            apply(states[own], gradient, all.steps[index], contracted, at >= vectors, max_exp_avg_sq != nullptr);
        }
    }
#pragma unroll
    for (u32 own = 0; own < OWN; own++) {
        const u64 at = start + own * THREADS + threadIdx.x;
        if (at < size) arrays.store(at, states[own]);
    }
}

// The elements whose magnitude reaches a threshold, in order of index, in one read of the values.
//
// A survivor's position is the number of survivors before it, which a scan over tiles computes.
#include "half.cuh"
#include "scan.cuh"

namespace {

constexpr u32 ROWS = 16;                        // of 32 elements, for each warp
constexpr u32 TILE = THREADS * ROWS;            // the same number as in cuda/compaction.py

template <class Element>
__device__ __forceinline__ void compact_tile(
    const Element *values, u64 size, const float *threshold, float *residual, u32 *indices, float *survivors,
    u64 capacity, u32 *count, u32 *ticket, u64 *states) {
    SHARED(Scan, scan);
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, tile = next_tile(scan, ticket);
    const u64 start = u64(tile) * TILE + warp * (ROWS * LANES) + lane;
    const u32 least = bits_of(*threshold) & MAGNITUDE;

    float elements[ROWS];
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        const u64 at = start + row * LANES;
        elements[row] = at < size ? widened(values[at]) : 0.0f;
    }
    if (residual) {
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            const u64 at = start + row * LANES;
            if (at < size) residual[at] = elements[row] = with_lost(elements[row], residual[at]);
        }
    }

    u32 reached[ROWS];                          // one bit for each lane
    u32 of_warp = 0;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        const bool survives = start + row * LANES < size && magnitude_of(elements[row]) >= least;
        reached[row] = __ballot_sync(WHOLE_WARP, survives);
        of_warp += __popc(reached[row]);
    }
    const Counted found = counted(scan, states, tile, of_warp);
    if (threadIdx.x == 0 && u64(tile + 1) * TILE >= size) *count = found.so_far;

    u64 position = found.before_warp;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        const u64 at = position + lanes_before(reached[row], lane);
        if (reached[row] >> lane & 1 && at < capacity) {
            indices[at] = u32(start + row * LANES);
            survivors[at] = elements[row];
        }
        position += __popc(reached[row]);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) compact_float32(
    const float *values, u64 size, const float *threshold, float *residual, u32 *indices, float *survivors,
    u64 capacity, u32 *count, u32 *ticket, u64 *states) {
    compact_tile(values, size, threshold, residual, indices, survivors, capacity, count, ticket, states);
}

extern "C" __global__ void __launch_bounds__(THREADS) compact_float16(
    const Half *values, u64 size, const float *threshold, float *residual, u32 *indices, float *survivors,
    u64 capacity, u32 *count, u32 *ticket, u64 *states) {
    compact_tile(values, size, threshold, residual, indices, survivors, capacity, count, ticket, states);
}

extern "C" __global__ void __launch_bounds__(THREADS) compact_bfloat16(
    const Bfloat16 *values, u64 size, const float *threshold, float *residual, u32 *indices, float *survivors,
    u64 capacity, u32 *count, u32 *ticket, u64 *states) {
    compact_tile(values, size, threshold, residual, indices, survivors, capacity, count, ticket, states);
}

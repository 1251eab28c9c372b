// The elements whose magnitude reaches a threshold, in order of index, in one read of the values.
//
// A scan with decoupled look-back: a block takes a tile, counts its survivors, publishes the count, and learns from
// the tiles before its own how many survivors lie ahead of them. Source: Merrill and Garland, Single-pass Parallel
// Prefix Scan with Decoupled Look-back (NVIDIA technical report NVR-2016-002), section 4.
//
// The result does not depend on the order in which blocks run: sums of integers are exact, and every survivor's
// position is the number of survivors before it. Every wait ends: tiles are handed out in order by a ticket, so a
// block waits only for blocks that have started, and the one with the smallest tile waits for none.
// A tile's state is one 64-bit word, so that its flag and its count cannot be seen apart, and no fence is needed.
#include "grid.cuh"
#include "half.cuh"

namespace {

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / LANES;
constexpr u32 ROWS = 16;                        // of a warp's 32 elements
constexpr u32 TILE = THREADS * ROWS;            // cuda/compaction.py knows it too
constexpr u64 OWN_COUNT = u64(1) << 32;         // flags of a state; the low half is the count
constexpr u64 COUNT_SO_FAR = u64(2) << 32;
constexpr u64 NOT_YET = 0;

struct Shared {
    u32 tile;
    u32 before;                                 // survivors in all tiles before this one
    u32 of_warp[WARPS];
};

__device__ __forceinline__ u64 published(const u64 *state) {
    u64 seen;
    while ((seen = *const_cast<const volatile u64 *>(state)) == NOT_YET) __nanosleep(20);
    return seen;
}

// By one whole warp: how many survivors the tiles before `tile` have. Lane 0 looks at the nearest of 32.
__device__ u32 look_back(const u64 *states, u32 tile, u32 lane) {
    u32 found = 0;
    for (i64 nearest = i64(tile) - 1;; nearest -= LANES) {
        const i64 at = nearest - lane;
        const u64 state = at < 0 ? COUNT_SO_FAR : published(states + at);
        const u32 complete = __ballot_sync(WHOLE_WARP, (state & COUNT_SO_FAR) != 0);
        const u32 last = complete ? __ffs(complete) - 1 : LANES - 1;
        found += sum_over_warp(lane <= last ? u32(state) : 0);
        if (complete) return found;
    }
}

template <class Element>
__device__ __forceinline__ void compact_tile(
    const Element *values, u64 size, const float *threshold, float *residual, u32 *indices, float *survivors,
    u64 capacity, u32 *count, u32 *ticket, u64 *states) {
    SHARED(Shared, shared);
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    if (threadIdx.x == 0) shared.tile = atomicAdd(ticket, 1u);
    __syncthreads();
    const u32 tile = shared.tile;
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

    u32 reached[ROWS];                          // a bit a lane
    u32 of_warp = 0;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        const bool survives = start + row * LANES < size && magnitude_of(elements[row]) >= least;
        reached[row] = __ballot_sync(WHOLE_WARP, survives);
        of_warp += __popc(reached[row]);
    }
    if (lane == 0) shared.of_warp[warp] = of_warp;
    __syncthreads();

    u32 own = 0, before_warp = 0;
    for (u32 other = 0; other < WARPS; other++) {
        if (other == warp) before_warp = own;
        own += shared.of_warp[other];
    }
    if (warp == 0) {
        volatile u64 *state = states + tile;
        if (lane == 0 && tile != 0) *state = OWN_COUNT | own;
        const u32 before = look_back(states, tile, lane);
        if (lane == 0) {
            *state = COUNT_SO_FAR | (before + own);
            shared.before = before;
            if (u64(tile + 1) * TILE >= size) *count = before + own;
        }
    }
    __syncthreads();

    u64 position = u64(shared.before) + before_warp;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        const u64 at = position + __popc(reached[row] & ((1u << lane) - 1));
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

// A scan over tiles, in one launch: for each tile, the sum of the counts of all tiles before it.
//
// It uses decoupled look-back: a block takes a tile, counts in it, publishes the count, and reads the counts and sums
// that the blocks of earlier tiles have published. Source: Merrill and Garland, Single-pass Parallel Prefix Scan
// with Decoupled Look-back (NVIDIA technical report NVR-2016-002), section 4.
//
// The result does not depend on the order in which blocks run: sums of integers are exact. Every wait ends: tiles are
// handed out in order by a ticket, so a block waits only for blocks that have started, and the one with the smallest
// tile waits for none. A tile's state is one 64-bit word, so that its flag and its count are read together, and no
// fence is needed. Ticket and states must be zero before the launch.
#pragma once

#include "grid.cuh"

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / LANES;

struct Scan {                                   // in a block's shared memory
    u32 tile;
    u32 before;                                 // the count of all tiles before this one
    u32 of_warp[WARPS];
};

struct Counted {
    u32 before_warp;                            // that, and the count of this tile's warps before one's own
    u32 so_far;                                 // the count up to the tile's end
};

constexpr u64 OWN_COUNT = u64(1) << 32;         // flags of a state, whose low half is the count
constexpr u64 COUNT_SO_FAR = u64(2) << 32;
constexpr u64 NOT_YET = 0;

__device__ __forceinline__ u64 published(const u64 *state) {
    u64 seen;
    while ((seen = *const_cast<const volatile u64 *>(state)) == NOT_YET) __nanosleep(20);
    return seen;
}

// Called by a whole warp: the count of the tiles before `tile`. Of 32 tiles, lane 0 reads the nearest.
__device__ __forceinline__ u32 look_back(const u64 *states, u32 tile, u32 lane) {
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

// Called by a whole block: the tile that it takes.
__device__ __forceinline__ u32 next_tile(Scan &scan, u32 *ticket) {
    if (threadIdx.x == 0) scan.tile = atomicAdd(ticket, 1u);
    __syncthreads();
    return scan.tile;
}

// Called by a whole block, each warp of which has counted `of_warp`.
__device__ __forceinline__ Counted counted(Scan &scan, u64 *states, u32 tile, u32 of_warp) {
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    if (lane == 0) scan.of_warp[warp] = of_warp;
    __syncthreads();
    u32 own = 0, before_warp = 0;
    for (u32 other = 0; other < WARPS; other++) {
        if (other == warp) before_warp = own;
        own += scan.of_warp[other];
    }
    if (warp == 0) {
        volatile u64 *state = states + tile;
        if (lane == 0 && tile != 0) *state = OWN_COUNT | own;
        const u32 before = look_back(states, tile, lane);
        if (lane == 0) {
            *state = COUNT_SO_FAR | (before + own);
            scan.before = before;
        }
    }
    __syncthreads();
    return {scan.before + before_warp, scan.before + own};
}

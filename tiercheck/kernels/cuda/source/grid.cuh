// Where a thread stands in the grid, and what the 32 lanes of a warp find out together (all of them must take part).
#pragma once

#include "portable.cuh"

__device__ __forceinline__ u64 first_element() { return u64(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u64 all_threads() { return u64(gridDim.x) * blockDim.x; }

// How many of the lanes that a ballot names come before `lane`.
__device__ __forceinline__ u32 lanes_before(u32 named, u32 lane) { return __popc(named & ((1u << lane) - 1)); }

__device__ __forceinline__ u32 sum_over_warp(u32 value) {
    for (u32 distance = LANES / 2; distance; distance /= 2) value += __shfl_xor_sync(WHOLE_WARP, value, distance);
    return value;
}

__device__ __forceinline__ u32 largest_over_warp(u32 value) {
    for (u32 distance = LANES / 2; distance; distance /= 2) {
        const u32 other = __shfl_xor_sync(WHOLE_WARP, value, distance);
        value = other > value ? other : value;
    }
    return value;
}

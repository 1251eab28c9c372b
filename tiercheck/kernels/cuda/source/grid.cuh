// A thread's position in the grid, and operations of a whole warp: all 32 lanes must call them.
#pragma once

#include "portable.cuh"

__device__ __forceinline__ u64 first_element() { return u64(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u64 all_threads() { return u64(gridDim.x) * blockDim.x; }

// How many bits of a ballot are set for lanes before `lane`.
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

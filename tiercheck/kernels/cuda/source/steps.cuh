// What a launch of a replay is told: its steps and where their gradients lie, by value, so that nothing is uploaded.
#pragma once

#include "portable.cuh"

constexpr u32 MOST_STEPS = 64;  // some 4 KiB; since CUDA 12.1 a kernel's parameters may take 32

template <class Step> struct Steps {
    u64 count;
    const float *values[MOST_STEPS];
    const u32 *indices[MOST_STEPS];     // null: the values are all elements'
    u32 sizes[MOST_STEPS];              // of the indices
    Step steps[MOST_STEPS];
};

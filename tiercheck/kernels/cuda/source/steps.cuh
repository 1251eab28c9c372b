// The argument of a replay's launch: its steps and the addresses of their gradients. It is passed by value, so that
// nothing is copied to the device.
#pragma once

#include "portable.cuh"

constexpr u32 MOST_STEPS = 64;  // about 4 KiB; since CUDA 12.1 a kernel's parameters may take 32 KiB

constexpr u32 DENSE = 0xffffffff;    // the same number as in cuda/adam.py

template <class Step> struct Steps {
    u64 count;
    const float *values[MOST_STEPS];
    const u32 *indices[MOST_STEPS];
    u32 sizes[MOST_STEPS];              // of the indices; or DENSE
    Step steps[MOST_STEPS];
};

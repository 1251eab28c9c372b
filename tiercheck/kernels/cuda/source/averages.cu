// Weighted sums of tensors: one tensor a launch, the product and the sum each rounded.
#include "grid.cuh"
#include "half.cuh"

namespace {

template <class Number>
__device__ __forceinline__ void accumulate(const Number *values, u64 size, float weight, float *total) {
    for (u64 at = first_element(); at < size; at += all_threads())
        total[at] = add(total[at], multiply(weight, widened(values[at])));
}

}  // namespace

extern "C" __global__ void accumulate_float32(const float *values, u64 size, float weight, float *total) {
    accumulate(values, size, weight, total);
}

extern "C" __global__ void accumulate_bfloat16(const Bfloat16 *values, u64 size, float weight, float *total) {
    accumulate(values, size, weight, total);
}

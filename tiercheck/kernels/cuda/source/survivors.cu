// Survivors: as fp16 values and back, what their encoding lost, and writing them into a dense array. Their number is on
// the device: kernels work on the first min(*count, capacity) of them.
#include "half.cuh"
#include "grid.cuh"

namespace {

EITHER u64 number_of(const u32 *count, u64 capacity) {
    return count && *count < capacity ? *count : capacity;
}

}  // namespace

extern "C" __global__ void clear(u32 *words, u64 size) {
    for (u64 at = first_element(); at < size; at += all_threads()) words[at] = 0;
}

// Raises a word, which must be zero before, to the magnitude of the largest finite survivor. Whole warps must call it.
extern "C" __global__ void largest_finite(const float *survivors, const u32 *count, u64 capacity, u32 *largest) {
    const u64 size = number_of(count, capacity);
    u32 own = 0;
    for (u64 at = first_element(); at < size; at += all_threads()) {
        const u32 magnitude = magnitude_of(survivors[at]);
        if (magnitude < INFINITE && magnitude > own) own = magnitude;
    }
    own = largest_over_warp(own);
    if (threadIdx.x % LANES == 0 && own) atomicMax(largest, own);
}

extern "C" __global__ void to_half(
    const float *survivors, const u32 *count, u64 capacity, const u32 *largest, u16 *halves, int *exponent) {
    const u64 size = number_of(count, capacity);
    const int scale = exponent_for(*largest);
    if (first_element() == 0) *exponent = scale;
    for (u64 at = first_element(); at < size; at += all_threads()) halves[at] = half_of(scaled(survivors[at], scale));
}

extern "C" __global__ void from_half(
    const u16 *halves, const u32 *count, u64 capacity, const int *exponent, float *values) {
    const u64 size = number_of(count, capacity);
    for (u64 at = first_element(); at < size; at += all_threads())
        values[at] = value_of_scaled_half(halves[at], *exponent);
}

// residual[i] = survivor - decoded, or 0 if that is not finite.
extern "C" __global__ void settle(
    float *residual, u64 residual_size, const u32 *indices, const float *survivors, const float *decoded,
    const u32 *count, u64 capacity) {
    const u64 size = number_of(count, capacity);
    for (u64 at = first_element(); at < size; at += all_threads()) {
        const float lost = subtract(survivors[at], decoded[at]);
        if (indices[at] < residual_size) residual[indices[at]] = is_finite(lost) ? lost : 0.0f;
    }
}

// out[indices] = values. For an index beyond `out` nothing is written.
extern "C" __global__ void scatter(
    const u32 *indices, const float *values, const u32 *count, u64 capacity, float *out, u64 out_size) {
    const u64 size = number_of(count, capacity);
    for (u64 at = first_element(); at < size; at += all_threads())
        if (indices[at] < out_size) out[indices[at]] = values[at];
}

// out[indices] += values, one fp32 addition each. Each index must be there only once.
extern "C" __global__ void scatter_add(
    const u32 *indices, const float *values, const u32 *count, u64 capacity, float *out, u64 out_size) {
    const u64 size = number_of(count, capacity);
    for (u64 at = first_element(); at < size; at += all_threads())
        if (indices[at] < out_size) out[indices[at]] = add(out[indices[at]], values[at]);
}

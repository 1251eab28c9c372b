// The largest survivors, if more elements reached the threshold than were wanted; and how many numbers are not finite.
//
// That is rare: the threshold is estimated from many samples. So one block of threads does all of it, in five reads of
// the elements, and if there is nothing to do it ends at once. Neither way needs the host to know which one it was.
#include "grid.cuh"
#include "half.cuh"

namespace {

constexpr u32 THREADS = 1024;
constexpr u32 WARPS = THREADS / LANES;
constexpr u32 DIGITS = 256;                     // of a magnitude, which has four: eight bits each
constexpr u32 ABOVE_ALL = 0xFFFFFFFFu;

struct Shared {
    u32 of_digit[DIGITS];                       // how many elements have it, behind the digits that are known
    u32 bound;                                  // the digits of the least magnitude that are known
    u32 wanted;                                 // how many of the elements with these digits are wanted
    u32 larger_of_warp[WARPS], equal_of_warp[WARPS];
    u32 strange;                                // numbers that are not finite
};

// The least magnitude of the `wanted` largest, and in shared.wanted how many of those that have it are wanted.
template <class Element>
__device__ __forceinline__ u32 least_of(Shared &shared, const Element *elements, u64 size, u32 wanted) {
    if (threadIdx.x == 0) {
        shared.bound = 0;
        shared.wanted = wanted;
    }
    for (u32 shift = 32; shift;) {
        shift -= 8;
        for (u32 at = threadIdx.x; at < DIGITS; at += THREADS) shared.of_digit[at] = 0;
        __syncthreads();
        const u64 known = u64(shared.bound) >> shift >> 8;
        for (u64 at = threadIdx.x; at < size; at += THREADS) {
            const u32 magnitude = magnitude_of(widened(elements[at]));
            if (u64(magnitude) >> shift >> 8 == known) atomicAdd(&shared.of_digit[magnitude >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 digit = DIGITS - 1;
            while (shared.of_digit[digit] < shared.wanted) shared.wanted -= shared.of_digit[digit--];
            shared.bound += digit << shift;
        }
        __syncthreads();
    }
    return shared.bound;
}

// The elements above `least`, and the first shared.wanted that equal it, in order of index. With `residual`, an element
// that is not finite leaves zero there. Returns how many are not finite, of those that this thread has seen.
template <class Element>
__device__ __forceinline__ u32 keep(
    Shared &shared, const Element *elements, u64 size, u32 least, float *residual, u32 *indices, float *survivors) {
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, wanted = shared.wanted;
    u32 larger_before = 0, equal_before = 0, strange = 0;       // up to this row of the block
    for (u64 row = 0; row < size; row += THREADS) {
        const u64 at = row + threadIdx.x;
        const float element = at < size ? widened(elements[at]) : 0.0f;
        const bool is_larger = at < size && magnitude_of(element) > least;
        const bool is_equal = at < size && magnitude_of(element) == least;
        const u32 larger = __ballot_sync(WHOLE_WARP, is_larger), equal = __ballot_sync(WHOLE_WARP, is_equal);
        if (lane == 0) {
            shared.larger_of_warp[warp] = __popc(larger);
            shared.equal_of_warp[warp] = __popc(equal);
        }
        __syncthreads();
        u32 larger_here = larger_before + lanes_before(larger, lane), equal_here = equal_before + lanes_before(equal, lane);
        for (u32 other = 0; other < WARPS; other++) {
            larger_before += shared.larger_of_warp[other];
            equal_before += shared.equal_of_warp[other];
            if (other < warp) {
                larger_here += shared.larger_of_warp[other];
                equal_here += shared.equal_of_warp[other];
            }
        }
        if (is_larger || (is_equal && equal_here < wanted)) {
            const u32 to = larger_here + (equal_here < wanted ? equal_here : wanted);
            indices[to] = u32(at);
            survivors[to] = element;
        }
        if (at < size && !is_finite(element)) {
            strange++;
            if (residual) residual[at] = 0.0f;
        }
        __syncthreads();
    }
    return strange;
}

template <class Element>
__device__ __forceinline__ void keep_largest(
    const Element *values, u64 size, float *residual, u32 *indices, float *survivors, u64 capacity, u32 *count,
    u32 *nonfinite) {
    SHARED(Shared, shared);
    const u32 reached = *count;
    if (threadIdx.x == 0) shared.strange = shared.wanted = 0;
    __syncthreads();
    u32 strange = 0;
    if (reached <= capacity) {
        for (u64 at = threadIdx.x; at < reached; at += THREADS) strange += !is_finite(survivors[at]);
    } else if (residual) {
        const u32 least = capacity ? least_of(shared, residual, size, u32(capacity)) : ABOVE_ALL;
        strange = keep(shared, residual, size, least, residual, indices, survivors);
    } else {
        const u32 least = capacity ? least_of(shared, values, size, u32(capacity)) : ABOVE_ALL;
        strange = keep(shared, values, size, least, residual, indices, survivors);
    }
    if (strange) atomicAdd(&shared.strange, strange);
    __syncthreads();
    if (threadIdx.x == 0) {
        *nonfinite = shared.strange;
        if (reached > capacity) *count = u32(capacity);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) keep_largest_float32(
    const float *values, u64 size, float *residual, u32 *indices, float *survivors, u64 capacity, u32 *count,
    u32 *nonfinite) {
    keep_largest(values, size, residual, indices, survivors, capacity, count, nonfinite);
}

extern "C" __global__ void __launch_bounds__(THREADS) keep_largest_float16(
    const Half *values, u64 size, float *residual, u32 *indices, float *survivors, u64 capacity, u32 *count,
    u32 *nonfinite) {
    keep_largest(values, size, residual, indices, survivors, capacity, count, nonfinite);
}

extern "C" __global__ void __launch_bounds__(THREADS) keep_largest_bfloat16(
    const Bfloat16 *values, u64 size, float *residual, u32 *indices, float *survivors, u64 capacity, u32 *count,
    u32 *nonfinite) {
    keep_largest(values, size, residual, indices, survivors, capacity, count, nonfinite);
}

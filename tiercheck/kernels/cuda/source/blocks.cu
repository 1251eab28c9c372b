// Block codes: int8 and NF4 in blocks of 256, signs in blocks of 128. A warp takes a block; lane l holds the elements
// l, l + 32, l + 64, ... of it, so that every load and store of the warp is one contiguous piece of memory. Values are
// fp32, fp16 or bf16. What is lost of them is what decoding in their own type does not give back.
#include "blocks.cuh"
#include "grid.cuh"

namespace {

constexpr u32 THREADS = 256;
constexpr u32 BLOCK = 256;
constexpr u32 HALF = BLOCK / 2;
constexpr u32 ONEBIT_BLOCK = 128;
constexpr u32 SIGN_BYTES = ONEBIT_BLOCK / 8;
constexpr u32 ROWS = BLOCK / LANES;
constexpr u32 ONEBIT_ROWS = ONEBIT_BLOCK / LANES;

__device__ __forceinline__ u64 first_block() { return (u64(blockIdx.x) * blockDim.x + threadIdx.x) / LANES; }
__device__ __forceinline__ u64 all_warps() { return u64(gridDim.x) * (blockDim.x / LANES); }
__device__ __forceinline__ u32 own_lane() { return threadIdx.x % LANES; }

// A lane's elements of a block: values plus residuals, and zeros beyond the end.
template <u32 rows, typename Number>
__device__ __forceinline__ void load(
    float (&x)[rows], const Number *values, const float *residual, u64 first, u64 size) {
#pragma unroll
    for (u32 row = 0; row < rows; row++) {
        const u64 at = first + row * LANES;
        x[row] = at < size ? widened(values[at]) : 0.0f;
        if (residual && at < size) x[row] = with_lost(x[row], residual[at]);
    }
}

// The largest finite magnitude of the block, and whether all of its elements are finite.
template <u32 rows> __device__ __forceinline__ float largest_of(const float (&x)[rows], bool &all_finite) {
    u32 largest = 0;
    bool finite = true;
#pragma unroll
    for (u32 row = 0; row < rows; row++) {
        const u32 magnitude = magnitude_of(x[row]);
        if (magnitude >= INFINITE) finite = false;
        else if (magnitude > largest) largest = magnitude;
    }
    all_finite = __ballot_sync(WHOLE_WARP, finite) == WHOLE_WARP;
    return float_of(largest_over_warp(largest));
}

template <typename Number>
__device__ __forceinline__ void quantise_int8(
    const Number *values, u64 size, float *residual, i8 *codes, float *scales) {
    for (u64 block = first_block(); block * BLOCK < size; block += all_warps()) {
        const u64 first = block * BLOCK + own_lane();
        float x[ROWS];
        load(x, values, residual, first, size);
        bool all_finite;
        const float scale = scale_reaching(largest_of(x, all_finite));
        const Divisor divisor(scale);
        if (own_lane() == 0) scales[block] = scale;
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            const u64 at = first + row * LANES;
            if (at >= size) continue;
            const i8 code = int8_code(x[row], divisor);
            codes[at] = code;
            if (residual) residual[at] = lost_of<Number>(x[row], int8_value(code, scale));
        }
    }
}

template <typename Number>
__device__ __forceinline__ void quantise_nf4(
    const Number *values, u64 size, float *residual, u8 *codes, float *scales) {
    const float level = LEVELS[own_lane() % 16];    // lane c holds level c
    for (u64 block = first_block(); block * BLOCK < size; block += all_warps()) {
        const u64 first = block * BLOCK + own_lane();
        float x[ROWS];
        load(x, values, residual, first, size);
        bool all_finite;
        const float largest = largest_of(x, all_finite);
        const float scale = all_finite ? largest : float_of(POISONED);
        const Divisor divisor(all_finite ? largest : 0.0f);
        if (own_lane() == 0) scales[block] = scale;
        u32 code[ROWS];
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) code[row] = nearest_level(divisor.quotient(all_finite ? x[row] : 0.0f));
#pragma unroll
        for (u32 row = 0; row < ROWS / 2; row++)
            codes[block * HALF + row * LANES + own_lane()] = u8(code[row] | code[row + ROWS / 2] << 4);
        if (!residual) continue;
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            const float decoded = nf4_value(__shfl_sync(WHOLE_WARP, level, code[row]), scale);
            if (first + row * LANES < size) residual[first + row * LANES] = lost_of<Number>(x[row], decoded);
        }
    }
}

template <typename Number>
__device__ __forceinline__ void quantise_onebit(
    const Number *values, u64 size, float *residual, u8 *bits, u16 *scales) {
    for (u64 block = first_block(); block * ONEBIT_BLOCK < size; block += all_warps()) {
        const u64 start = block * ONEBIT_BLOCK, first = start + own_lane();
        float x[ONEBIT_ROWS], part[ONEBIT_ROWS];
        load(x, values, residual, first, size);
        bool finite = true;
#pragma unroll
        for (u32 row = 0; row < ONEBIT_ROWS; row++) finite = finite && is_finite(x[row]);
        const bool all_finite = __ballot_sync(WHOLE_WARP, finite) == WHOLE_WARP;

        u32 signs[ONEBIT_ROWS];
#pragma unroll
        for (u32 row = 0; row < ONEBIT_ROWS; row++) {
            signs[row] = __ballot_sync(WHOLE_WARP, all_finite && bits_of(x[row]) >> 31);
            part[row] = all_finite ? multiply(float_of(magnitude_of(x[row])), 1.0f / ONEBIT_BLOCK) : 0.0f;
        }
        // The second half is added to the first until one sum is left: rows, then lanes.
        float mean = add(add(part[0], part[2]), add(part[1], part[3]));
        for (u32 distance = LANES / 2; distance; distance /= 2)
            mean = add(mean, __shfl_xor_sync(WHOLE_WARP, mean, distance));
        if (size - start < ONEBIT_BLOCK) mean = multiply(mean, float(double(ONEBIT_BLOCK) / double(size - start)));
        const u16 scale = all_finite ? bfloat16_of(mean) : POISONED_PATTERN;

        if (own_lane() == 0) scales[block] = scale;
        if (own_lane() < SIGN_BYTES) {
            const u32 row = own_lane() / 4;         // each row has four bytes
            const u32 word = row == 0 ? signs[0] : row == 1 ? signs[1] : row == 2 ? signs[2] : signs[3];
            bits[block * SIGN_BYTES + own_lane()] = u8(word >> own_lane() % 4 * 8);
        }
        if (!residual) continue;
#pragma unroll
        for (u32 row = 0; row < ONEBIT_ROWS; row++) {
            const float decoded = onebit_value(signs[row] >> own_lane() & 1, scale);
            if (first + row * LANES < size) residual[first + row * LANES] = lost_of<Number>(x[row], decoded);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) quantise_int8_float32(
    const float *values, u64 size, float *residual, i8 *codes, float *scales) {
    quantise_int8(values, size, residual, codes, scales);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantise_int8_float16(
    const Half *values, u64 size, float *residual, i8 *codes, float *scales) {
    quantise_int8(values, size, residual, codes, scales);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantise_int8_bfloat16(
    const Bfloat16 *values, u64 size, float *residual, i8 *codes, float *scales) {
    quantise_int8(values, size, residual, codes, scales);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantise_nf4_float32(
    const float *values, u64 size, float *residual, u8 *codes, float *scales) {
    quantise_nf4(values, size, residual, codes, scales);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantise_nf4_float16(
    const Half *values, u64 size, float *residual, u8 *codes, float *scales) {
    quantise_nf4(values, size, residual, codes, scales);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantise_nf4_bfloat16(
    const Bfloat16 *values, u64 size, float *residual, u8 *codes, float *scales) {
    quantise_nf4(values, size, residual, codes, scales);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantise_onebit_float32(
    const float *values, u64 size, float *residual, u8 *bits, u16 *scales) {
    quantise_onebit(values, size, residual, bits, scales);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantise_onebit_float16(
    const Half *values, u64 size, float *residual, u8 *bits, u16 *scales) {
    quantise_onebit(values, size, residual, bits, scales);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantise_onebit_bfloat16(
    const Bfloat16 *values, u64 size, float *residual, u8 *bits, u16 *scales) {
    quantise_onebit(values, size, residual, bits, scales);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantise_int8(const i8 *codes, u64 size, const float *scales, float *values) {
    for (u64 at = first_element(); at < size; at += all_threads())
        values[at] = int8_value(codes[at], scales[at / BLOCK]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantise_nf4(const u8 *codes, u64 size, const float *scales, float *values) {
    const float level = LEVELS[own_lane() % 16];
    for (u64 block = first_block(); block * BLOCK < size; block += all_warps()) {
        const float scale = scales[block];
#pragma unroll
        for (u32 row = 0; row < ROWS / 2; row++) {
            const u32 both = codes[block * HALF + row * LANES + own_lane()];
            const u64 at = block * BLOCK + row * LANES + own_lane();
            const float low = nf4_value(__shfl_sync(WHOLE_WARP, level, both & 15), scale);
            const float high = nf4_value(__shfl_sync(WHOLE_WARP, level, both >> 4), scale);
            if (at < size) values[at] = low;
            if (at + HALF < size) values[at + HALF] = high;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantise_onebit(const u8 *bits, u64 size, const u16 *scales, float *values) {
    for (u64 at = first_element(); at < size; at += all_threads())
        values[at] = onebit_value(bits[at / 8] >> at % 8 & 1, scales[at / ONEBIT_BLOCK]);
}

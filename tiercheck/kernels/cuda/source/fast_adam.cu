// Adam as DeepSpeed's FusedAdam rounds it, which is compiled with --use_fast_math: the device's approximate division and
// square root, and denormals are zero. This is the only source with such arithmetic: no processor has it. On the host
// the operations are those of IEEE 754, so that the formula can be tested.
#include "gpu_adam.cuh"

namespace {

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ float fast_add(float a, float b) {
    float result;
    asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float fast_multiply(float a, float b) {
    float result;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float fast_multiply_add(float a, float b, float c) {
    float result;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
}
__device__ __forceinline__ float fast_divide(float a, float b) {
    float result;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float fast_root(float a) {
    float result;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
    return result;
}
#else
inline float fast_add(float a, float b) { return add(a, b); }
inline float fast_multiply(float a, float b) { return multiply(a, b); }
inline float fast_multiply_add(float a, float b, float c) { return multiply_add(a, b, c); }
inline float fast_divide(float a, float b) { return divide(a, b); }
inline float fast_root(float a) { return square_root(a); }
#endif

__device__ __forceinline__ float product_plus(bool contracts, float a, float b, float c) {
    return contracts ? fast_multiply_add(a, b, c) : fast_add(fast_multiply(a, b), c);
}

__device__ __forceinline__ float weighted(u32 fused, float beta, float moment, float weight, float g) {
    if (fused == MOMENT) return fast_multiply_add(beta, moment, fast_multiply(weight, g));
    if (fused == GRADIENT) return fast_multiply_add(weight, g, fast_multiply(beta, moment));
    return fast_add(fast_multiply(beta, moment), fast_multiply(weight, g));
}

__device__ __forceinline__ void take_fast(GpuState &s, float gradient, const GpuStep &step, const Placement &placed) {
    const bool contracts = placed.first != NEITHER;
    const float decay = float(step.decay);
    float g = step.multiplier == 1.0f ? gradient : multiply(gradient, step.multiplier);
    if (step.flags & COUPLED) g = product_plus(contracts, decay, s.param, g);
    s.exp_avg = weighted(placed.first, float(step.beta1), s.exp_avg, float(step.weight1), g);
    s.exp_avg_sq =
        weighted(placed.second, float(step.beta2), s.exp_avg_sq, fast_multiply(float(step.weight2), g), g);
    const float denominator = fast_add(fast_root(fast_divide(s.exp_avg_sq, step.root)), float(step.eps));
    float update = fast_divide(fast_divide(s.exp_avg, step.first), denominator);
    if (step.flags & DECAYS) update = product_plus(contracts, decay, s.param, update);
    s.param = product_plus(contracts, -step.step_size, update, s.param);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) replay_fast(
    float *param, float *exp_avg, float *exp_avg_sq, float *max_exp_avg_sq, u64 size, const Placement placed,
    const __grid_constant__ Steps<GpuStep> all) {
    const auto apply = [&](GpuState &s, float g, const GpuStep &step) { take_fast(s, g, step, placed); };
    replay_tiles(param, exp_avg, exp_avg_sq, max_exp_avg_sq, size, all, apply);
}

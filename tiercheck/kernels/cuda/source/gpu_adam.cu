// Adam as torch's optimizers on a GPU round it: in one fused kernel, with fp32 or fp64 scalars, or as separate
// operations. Every fused multiply-add is written as one.
#include "gpu_adam.cuh"

// Beside those of portable.cuh, in the same scope: inside of another one they would hide them.
#if defined(__CUDA_ARCH__)
EITHER double multiply(double a, double b) { return __dmul_rn(a, b); }
EITHER double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }
EITHER double add(double a, double b) { return __dadd_rn(a, b); }
#else
EITHER double multiply(double a, double b) { return a * b; }
EITHER double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
EITHER double add(double a, double b) { return a + b; }
#endif

namespace {

// In the type of the scalars, `Number`; what is stored is rounded to fp32.
template <class Number> EITHER Number product_plus(bool contracts, Number a, Number b, Number c) {
    return contracts ? multiply_add(a, b, c) : add(multiply(a, b), c);
}

template <class Number> EITHER Number weighted(u32 fused, Number beta, Number moment, Number weight, Number g) {
    if (fused == MOMENT) return multiply_add(beta, moment, multiply(weight, g));
    if (fused == GRADIENT) return multiply_add(weight, g, multiply(beta, moment));
    return add(multiply(beta, moment), multiply(weight, g));
}

template <class Number, bool EXPLICIT>
EITHER void take_fused(GpuState &s, float gradient, const GpuStep &step, const Placement &placed, bool amsgrad) {
    const Number decay = Number(step.decay), beta1 = Number(step.beta1), beta2 = Number(step.beta2);
    const Number weight1 = Number(step.weight1), weight2 = Number(step.weight2), eps = Number(step.eps);
    const bool contracts = placed.first != NEITHER;
    float g = multiply(gradient, step.multiplier);
    if (step.flags & COUPLED) g = float(product_plus(contracts, Number(s.param), decay, Number(g)));
    else if (step.flags & DECAYS)
        s.param = float(product_plus(contracts, -decay, Number(s.param), Number(s.param)));
    if (EXPLICIT) {
        const Number square = Number(multiply(g, g));
        s.exp_avg = float(
            multiply_add(beta1, Number(s.exp_avg), multiply_add(-beta1, Number(g), Number(g))));
        s.exp_avg_sq = float(multiply_add(beta2, Number(s.exp_avg_sq), multiply_add(-beta2, square, square)));
    } else {
        s.exp_avg = float(weighted(placed.first, beta1, Number(s.exp_avg), weight1, Number(g)));
        s.exp_avg_sq = float(
            weighted(placed.second, beta2, Number(s.exp_avg_sq), multiply(weight2, Number(g)), Number(g)));
    }
    float second = s.exp_avg_sq;
    if (amsgrad)                                // as std::max: a NaN leaves the maximum as it is
        second = s.max_exp_avg_sq = s.max_exp_avg_sq < second ? second : s.max_exp_avg_sq;
    const float denominator = float(add(Number(corrected_root(second, step)), eps));
    s.param = subtract(s.param, divide(multiply(step.step_size, s.exp_avg), denominator));
}

EITHER void take_operations(
    GpuState &s, float gradient, const GpuStep &step, const Placement &placed, bool amsgrad) {
    const float decay = float(step.decay), weight1 = float(step.weight1), weight2 = float(step.weight2);
    float g = multiply(gradient, step.multiplier);
    if (step.flags & COUPLED) g = multiply_add(decay, s.param, g);
    else if (step.flags & DECAYS) s.param = multiply(s.param, decay);
    s.exp_avg = multiply_add(weight1, subtract(g, s.exp_avg), step.flags & SMALL ? s.exp_avg : g);
    const float decayed = multiply(s.exp_avg_sq, float(step.beta2));
    s.exp_avg_sq = placed.second == GRADIENT ? multiply_add(multiply(weight2, g), g, decayed)
                                             : multiply_add(weight2, multiply(g, g), decayed);
    float second = s.exp_avg_sq;
    if (amsgrad) {                              // a NaN in either makes the maximum NaN
        const float largest = s.max_exp_avg_sq;
        second = s.max_exp_avg_sq = largest > second || largest != largest ? largest : second;
    }
    const float corrected =
        placed.reciprocal ? multiply(square_root(second), step.reciprocal) : corrected_root(second, step);
    s.param = multiply_add(step.step_size, divide(s.exp_avg, add(corrected, float(step.eps))), s.param);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) replay_explicit_32(
    float *param, float *exp_avg, float *exp_avg_sq, float *max_exp_avg_sq, u64 size, const Placement placed,
    const __grid_constant__ Steps<GpuStep> all) {
    const bool amsgrad = max_exp_avg_sq != nullptr;
    const auto apply = [&](GpuState &s, float g, const GpuStep &step) {
        take_fused<float, true>(s, g, step, placed, amsgrad);
    };
    replay_tiles(param, exp_avg, exp_avg_sq, max_exp_avg_sq, size, all, apply);
}

extern "C" __global__ void __launch_bounds__(THREADS) replay_explicit_64(
    float *param, float *exp_avg, float *exp_avg_sq, float *max_exp_avg_sq, u64 size, const Placement placed,
    const __grid_constant__ Steps<GpuStep> all) {
    const bool amsgrad = max_exp_avg_sq != nullptr;
    const auto apply = [&](GpuState &s, float g, const GpuStep &step) {
        take_fused<double, true>(s, g, step, placed, amsgrad);
    };
    replay_tiles(param, exp_avg, exp_avg_sq, max_exp_avg_sq, size, all, apply);
}

extern "C" __global__ void __launch_bounds__(THREADS) replay_weighted_32(
    float *param, float *exp_avg, float *exp_avg_sq, float *max_exp_avg_sq, u64 size, const Placement placed,
    const __grid_constant__ Steps<GpuStep> all) {
    const bool amsgrad = max_exp_avg_sq != nullptr;
    const auto apply = [&](GpuState &s, float g, const GpuStep &step) {
        take_fused<float, false>(s, g, step, placed, amsgrad);
    };
    replay_tiles(param, exp_avg, exp_avg_sq, max_exp_avg_sq, size, all, apply);
}

extern "C" __global__ void __launch_bounds__(THREADS) replay_weighted_64(
    float *param, float *exp_avg, float *exp_avg_sq, float *max_exp_avg_sq, u64 size, const Placement placed,
    const __grid_constant__ Steps<GpuStep> all) {
    const bool amsgrad = max_exp_avg_sq != nullptr;
    const auto apply = [&](GpuState &s, float g, const GpuStep &step) {
        take_fused<double, false>(s, g, step, placed, amsgrad);
    };
    replay_tiles(param, exp_avg, exp_avg_sq, max_exp_avg_sq, size, all, apply);
}

extern "C" __global__ void __launch_bounds__(THREADS) replay_operations(
    float *param, float *exp_avg, float *exp_avg_sq, float *max_exp_avg_sq, u64 size, const Placement placed,
    const __grid_constant__ Steps<GpuStep> all) {
    const bool amsgrad = max_exp_avg_sq != nullptr;
    const auto apply = [&](GpuState &s, float g, const GpuStep &step) {
        take_operations(s, g, step, placed, amsgrad);
    };
    replay_tiles(param, exp_avg, exp_avg_sq, max_exp_avg_sq, size, all, apply);
}

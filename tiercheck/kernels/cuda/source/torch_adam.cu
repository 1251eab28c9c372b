// Adam, modelled on the rounding of torch's fused CUDA kernel. Its scalars are doubles: an operation of an fp32 value
// and a scalar is computed in double, and rounded to fp32 when it is stored. Releases of torch differ in how their
// compiler fused these operations, and in how the moments are written. Only an experiment can say which form a release
// follows, if either.
// Source: torch, aten/src/ATen/native/cuda/fused_adam_utils.cuh, adam_math (its formula).
#include "grid.cuh"
#include "steps.cuh"

namespace {

constexpr u32 THREADS = 256;

struct TorchStep {
    double decay;               // lr * weight_decay, or (COUPLED) weight_decay
    double beta1, beta2, eps;
    float multiplier, step_size, root_correction;
    u32 flags;
};

constexpr u32 COUPLED = 1;
constexpr u32 DECAYS = 2;

struct State {
    float param, exp_avg, exp_avg_sq;
};

#if defined(__CUDA_ARCH__)
EITHER double multiply_doubles(double a, double b) { return __dmul_rn(a, b); }
EITHER double multiply_add_doubles(double a, double b, double c) { return __fma_rn(a, b, c); }
EITHER double add_doubles(double a, double b) { return __dadd_rn(a, b); }
#else
EITHER double multiply_doubles(double a, double b) { return a * b; }
EITHER double multiply_add_doubles(double a, double b, double c) { return __builtin_fma(a, b, c); }
EITHER double add_doubles(double a, double b) { return a + b; }
#endif

// beta * moment + (1 - beta) * g, and the same for squares: the gradient is multiplied by its weight ...
EITHER void weigh(State &s, float g, const TorchStep &step) {
    const double weight1 = add_doubles(1.0, -step.beta1), weight2 = add_doubles(1.0, -step.beta2);
    s.exp_avg = float(multiply_add_doubles(step.beta1, s.exp_avg, multiply_doubles(weight1, g)));
    const double square = multiply_doubles(multiply_doubles(weight2, g), g);
    s.exp_avg_sq = float(multiply_add_doubles(step.beta2, s.exp_avg_sq, square));
}

// ... or beta times the gradient is subtracted from it.
EITHER void complement(State &s, float g, const TorchStep &step) {
    s.exp_avg = float(multiply_add_doubles(step.beta1, s.exp_avg, multiply_add_doubles(-step.beta1, g, g)));
    const float square = multiply(g, g);
    const double weighted = multiply_add_doubles(-step.beta2, square, square);
    s.exp_avg_sq = float(multiply_add_doubles(step.beta2, s.exp_avg_sq, weighted));
}

EITHER void apply(State &s, float gradient, const TorchStep &step, bool complements) {
    float g = multiply(gradient, step.multiplier);
    if (step.flags & COUPLED) g = float(multiply_add_doubles(s.param, step.decay, g));
    else if (step.flags & DECAYS) s.param = float(multiply_add_doubles(-step.decay, s.param, s.param));
    if (complements) complement(s, g, step);
    else weigh(s, g, step);
    const float denominator = float(add_doubles(divide(square_root(s.exp_avg_sq), step.root_correction), step.eps));
    s.param = subtract(s.param, divide(multiply(step.step_size, s.exp_avg), denominator));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) replay_torch_adam(
    float *param, float *exp_avg, float *exp_avg_sq, u64 size, u32 complements,
    const __grid_constant__ Steps<TorchStep> all) {
    for (u64 at = first_element(); at < size; at += all_threads()) {
        State state{param[at], exp_avg[at], exp_avg_sq[at]};
        for (u32 index = 0; index < all.count; index++)
            apply(state, all.values[index][at], all.steps[index], complements);
        param[at] = state.param;
        exp_avg[at] = state.exp_avg;
        exp_avg_sq[at] = state.exp_avg_sq;
    }
}

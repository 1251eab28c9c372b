// One element's step of Adam or AdamW, with the rounding of torch's fused CPU kernel, as the reference states it.
#pragma once

#include "portable.cuh"

// A step's scalars. cuda/adam.py writes them.
struct Step {
    float decay;                // the parameter's factor, or (COUPLED) the factor of the parameter that is added to g
    float multiplier;           // the gradient's factor
    float weight1;              // the weight of the lerp's branch
    float weight2;
    float beta2;
    float divisor;              // (DIVIDES) the root's; else the first part of its reciprocal. All fits 4 KiB so.
    float reciprocal_low;
    float eps;
    float negative_step_size;
    u32 flags;
};

constexpr u32 COUPLED = 1;      // L2 decay
constexpr u32 SMALL = 2;        // weight1 is less than a half: the lerp starts from the moment
constexpr u32 DIVIDES = 4;      // the reciprocal's parts do not give the bits of the division

struct State {
    float param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

// `contracted`: torch's compiler fused multiplications into additions. `tail`: the element is behind torch's last whole
// vector, where another product of the second moment is fused, and the maximum is kept if the second moment is a NaN.
EITHER void apply(State &s, float gradient, const Step &step, bool contracted, bool tail, bool amsgrad) {
    const auto fused = [contracted](float a, float b, float c) {
        return contracted ? multiply_add(a, b, c) : add(multiply(a, b), c);
    };
    float g = multiply(gradient, step.multiplier);
    if (step.flags & COUPLED) g = fused(s.param, step.decay, g);
    else s.param = multiply(s.param, step.decay);
    s.exp_avg = fused(step.weight1, subtract(g, s.exp_avg), step.flags & SMALL ? s.exp_avg : g);
    const float scaled = multiply(step.weight2, g);
    s.exp_avg_sq = contracted && tail ? fused(s.exp_avg_sq, step.beta2, multiply(scaled, g))
                                      : fused(scaled, g, multiply(s.exp_avg_sq, step.beta2));
    float second = s.exp_avg_sq;
    if (amsgrad) {
        const float largest = s.max_exp_avg_sq;
        const bool kept = largest > second || largest != largest || (tail && second != second);
        second = s.max_exp_avg_sq = kept ? largest : second;
    }
    const float root = square_root(second);
    const float corrected =
        step.flags & DIVIDES ? divide(root, step.divisor) : divided_root(root, step.divisor, step.reciprocal_low);
    const float denominator = add(corrected, step.eps);
    s.param = add(s.param, divide(multiply(step.negative_step_size, s.exp_avg), denominator));
}

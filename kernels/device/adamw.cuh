// The arithmetic of AdamW, which does not know how its moments are stored; include/optimizer.h has the formula.
#pragma once

#include <math.h>

#include "multi_tensor.cuh"

namespace mp {

// Hyperparameters, and where the numbers lie that differ from step to step.
struct AdamStep {
  const void* step;
  const float *grad_scale, *skip;
  const double* lr;
  double log_beta1, log_beta2, weight_decay;
  float beta1, rest1, beta2, rest2, eps;
  int32_t step_is_int64;

  __device__ bool is_skipped() const { return skip != nullptr && !(*skip == 0.0f); }
  __device__ double number() const {
    return step_is_int64 ? static_cast<double>(*static_cast<const int64_t*>(step))
                         : static_cast<double>(*static_cast<const float*>(step));
  }
};

inline AdamStep adam_step(
    const void* step, int32_t step_is_int64, const float* grad_scale, const float* skip, const double* lr,
    double beta1, double beta2, double eps, double weight_decay) {
  AdamStep a = {};
  a.step = step;
  a.step_is_int64 = step_is_int64;
  a.grad_scale = grad_scale;
  a.skip = skip;
  a.lr = lr;
  a.log_beta1 = log(beta1);
  a.log_beta2 = log(beta2);
  a.weight_decay = weight_decay;
  a.beta1 = static_cast<float>(beta1);
  a.rest1 = static_cast<float>(1.0 - beta1);
  a.beta2 = static_cast<float>(beta2);
  a.rest2 = static_cast<float>(1.0 - beta2);
  a.eps = static_cast<float>(eps);
  return a;
}

// What depends on the step, the same for every element.
struct Corrected {
  float scale, decay, rate, root;  // of gradients; of masters; lr / (1 - beta1^step); 1 / sqrt(1 - beta2^step)
};

__device__ inline Corrected corrected(const AdamStep& a) {
  const double step = a.number(), lr = *a.lr;
  // 1 - beta^step, accurate also where it is small and where it is nearly 1.
  return Corrected{
      a.grad_scale != nullptr ? *a.grad_scale : 1.0f, static_cast<float>(fma(-lr, a.weight_decay, 1.0)),
      static_cast<float>(lr / -expm1(step * a.log_beta1)),
      static_cast<float>(1.0 / sqrt(-expm1(step * a.log_beta2)))};
}

__device__ inline void update(
    const AdamStep& a, const Corrected& c, float grad, float& master, float& exp_avg, float& exp_avg_sq) {
  const float g = grad * c.scale;
  // Two forms of the same mean: each is exact at its end, where the other would cancel.
  exp_avg = a.rest1 < 0.5f ? exp_avg + a.rest1 * (g - exp_avg) : g + a.beta1 * (exp_avg - g);
  exp_avg_sq = a.beta2 * exp_avg_sq + a.rest2 * (g * g);
  master = c.decay * master - c.rate * (exp_avg / (sqrtf(exp_avg_sq) * c.root + a.eps));
}

}  // namespace mp

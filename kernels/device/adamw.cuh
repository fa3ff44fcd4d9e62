// Arguments of the kernels that take a step of AdamW, and what a block computes once; include/adam.h has the rest.
#pragma once

#include "adam.h"
#include "multi_tensor.cuh"

namespace mp {

// Hyperparameters, and where the numbers lie that differ from step to step.
struct AdamStep : AdamRates {
  const void* step;
  const float *grad_scale, *skip;
  const double* lr;
  double log_beta1, log_beta2, weight_decay;
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
  return AdamStep{adam_rates(beta1, beta2, eps), step, grad_scale, skip, lr, log(beta1), log(beta2), weight_decay,
                  step_is_int64};
}

__device__ inline Corrected corrected(const AdamStep& a) {
  const float scale = a.grad_scale != nullptr ? *a.grad_scale : 1.0f;
  return corrected(a.number(), *a.lr, a.log_beta1, a.log_beta2, a.weight_decay, scale);
}

__device__ inline void update(
    const AdamStep& a, const Corrected& c, float grad, float& master, float& exp_avg, float& exp_avg_sq) {
  adam_update(a, c, from_old(a), grad, master, exp_avg, exp_avg_sq);
}

}  // namespace mp

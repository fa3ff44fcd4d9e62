// The arithmetic of AdamW, which does not know how its moments are stored, and the chunks that threads take.
#pragma once

#include <algorithm>

#include "common.h"

namespace mp {

// Elements that a thread takes at once. What a chunk computes depends on nothing but the chunk.
constexpr int64_t kChunk = 1 << 14;
// Elements that stay in the first cache between the passes over them.
constexpr int64_t kStrip = 512;

struct Chunk {
  int64_t tensor, start, size;
};

inline std::vector<Chunk> chunks_of(int64_t count, const int64_t* sizes) {
  std::vector<Chunk> out;
  for (int64_t t = 0; t < count; t++) {
    for (int64_t at = 0; at < sizes[t]; at += kChunk) out.push_back({t, at, std::min(kChunk, sizes[t] - at)});
  }
  return out;
}

struct Factors {
  float scale, decay, beta1, rest1, beta2, rest2, rate, root, eps;
};

inline double number_of_step(const void* step, int32_t step_is_int64) {
  return step_is_int64 ? static_cast<double>(*static_cast<const int64_t*>(step))
                       : static_cast<double>(*static_cast<const float*>(step));
}

inline Factors factors_of(
    const void* step, int32_t step_is_int64, const float* grad_scale, const double* lr, double beta1, double beta2,
    double eps, double weight_decay) {
  const double number = number_of_step(step, step_is_int64);
  // 1 - beta^step, accurate also where it is small and where it is nearly 1.
  const double correction1 = -std::expm1(number * std::log(beta1)), correction2 = -std::expm1(number * std::log(beta2));
  return Factors{
      grad_scale != nullptr ? *grad_scale : 1.0f, static_cast<float>(1.0 - *lr * weight_decay),
      static_cast<float>(beta1), static_cast<float>(1.0 - beta1), static_cast<float>(beta2),
      static_cast<float>(1.0 - beta2), static_cast<float>(*lr / correction1),
      static_cast<float>(1.0 / std::sqrt(correction2)), static_cast<float>(eps)};
}

// MEAN_FROM_OLD: which of two forms of the same mean; each is exact at its end, where the other would cancel.
template <bool MEAN_FROM_OLD>
inline void update_strip(
    const Factors& f, const float* __restrict grad, float* __restrict master, float* __restrict exp_avg,
    float* __restrict exp_avg_sq, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float g = grad[i] * f.scale, old = exp_avg[i];
    const float m = MEAN_FROM_OLD ? old + f.rest1 * (g - old) : g + f.beta1 * (old - g);
    const float v = f.beta2 * exp_avg_sq[i] + f.rest2 * (g * g);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] = f.decay * master[i] - f.rate * (m / (std::sqrt(v) * f.root + f.eps));
  }
}

}  // namespace mp

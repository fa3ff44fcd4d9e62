// Strips of AdamW, which do not know how its moments are stored, and the chunks that threads take.
#pragma once

#include <algorithm>

#include "adam.h"
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
  AdamRates rates;
  Corrected step;
};

inline double number_of_step(const void* step, int32_t step_is_int64) {
  return step_is_int64 ? static_cast<double>(*static_cast<const int64_t*>(step))
                       : static_cast<double>(*static_cast<const float*>(step));
}

inline Factors factors_of(
    const void* step, int32_t step_is_int64, const float* grad_scale, const double* lr, double beta1, double beta2,
    double eps, double weight_decay) {
  const float scale = grad_scale != nullptr ? *grad_scale : 1.0f;
  return Factors{
      adam_rates(beta1, beta2, eps),
      corrected(number_of_step(step, step_is_int64), *lr, std::log(beta1), std::log(beta2), weight_decay, scale)};
}

template <bool FROM_OLD>
inline void update_strip(
    const Factors& f, const float* __restrict grad, float* __restrict master, float* __restrict exp_avg,
    float* __restrict exp_avg_sq, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    float p = master[i], m = exp_avg[i], v = exp_avg_sq[i];
    adam_update(f.rates, f.step, FROM_OLD, grad[i], p, m, v);
    master[i] = p;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
  }
}

// As the hyperparameters ask for.
inline auto strip_of(const Factors& f) { return from_old(f.rates) ? update_strip<true> : update_strip<false>; }

}  // namespace mp

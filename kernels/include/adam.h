// The arithmetic of AdamW and Lion, for device and CPU sources; optimizer.h and narrow_adamw.h have the formulas.
#pragma once

#include <math.h>

#include "both.h"

namespace mp {

struct AdamRates {
  float beta1, rest1, beta2, rest2, eps;  // rest: 1 - beta
};

inline AdamRates adam_rates(double beta1, double beta2, double eps) {
  return AdamRates{
      static_cast<float>(beta1), static_cast<float>(1.0 - beta1), static_cast<float>(beta2),
      static_cast<float>(1.0 - beta2), static_cast<float>(eps)};
}

// What depends on the step, the same for every element.
struct Corrected {
  float scale, decay, rate, root;  // of gradients; of masters; lr / (1 - beta1^step); 1 / sqrt(1 - beta2^step)
};

// 1 - beta^step is accurate also where it is small and where it is nearly 1.
MP_BOTH inline Corrected corrected(
    double step, double lr, double log_beta1, double log_beta2, double weight_decay, float scale) {
  return Corrected{
      scale, static_cast<float>(fma(-lr, weight_decay, 1.0)), static_cast<float>(lr / -expm1(step * log_beta1)),
      static_cast<float>(1.0 / sqrt(-expm1(step * log_beta2)))};
}

// from_old: which of two forms of the same mean; each is exact at its end, where the other would cancel.
MP_BOTH inline bool from_old(const AdamRates& a) { return a.rest1 < 0.5f; }

MP_BOTH inline void adam_update(
    const AdamRates& a, const Corrected& c, bool from_old, float grad, float& master, float& exp_avg,
    float& exp_avg_sq) {
  const float g = grad * c.scale;
  exp_avg = from_old ? exp_avg + a.rest1 * (g - exp_avg) : g + a.beta1 * (exp_avg - g);
  exp_avg_sq = a.beta2 * exp_avg_sq + a.rest2 * (g * g);
  master = c.decay * master - c.rate * (exp_avg / (sqrtf(exp_avg_sq) * c.root + a.eps));
}

MP_BOTH inline void lion_update(
    const AdamRates& a, float scale, float decay, float lr, float grad, float& master, float& exp_avg) {
  const float g = grad * scale, mean = a.beta1 * exp_avg + a.rest1 * g;
  const float sign = mean > 0.0f ? 1.0f : mean < 0.0f ? -1.0f : mean;  // 0 and NaN stay what they are
  master = decay * master - lr * sign;
  exp_avg = a.beta2 * exp_avg + a.rest2 * g;
}

}  // namespace mp

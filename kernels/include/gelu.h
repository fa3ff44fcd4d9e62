// GELU, the sigmoid and their slopes in fp32, for device and CPU sources. Only the slope of the erf form is not here: what
// is cheapest differs.
//
// Include it after common.cuh or vmath.h, which bring power_of_2, power_of_2_of_negative and reciprocal. No branches:
// both sides of a choice are computed, so that a compiler can vectorise the loop around a call.
#pragma once

#include <math.h>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define MP_SCALAR __device__ inline
#else
#define MP_SCALAR inline
#endif

namespace mp {

constexpr float kTanhLinear = 1.59576912f;     // 2 sqrt(2 / pi)
constexpr float kTanhCubic = 0.0713548163f;    // 0.044715 * kTanhLinear

MP_SCALAR float sigmoid(float x) { return reciprocal(1.0f + power_of_2(-kLog2E * x)); }

struct Sigmoid {
  float at, slope;  // s(x), and s (1 - s)
};

// From log2(e^-|x|), without overflow or cancellation; negative: x < 0.
MP_SCALAR Sigmoid sigmoid_of(float log2_of_small, bool negative) {
  const float e = power_of_2_of_negative(log2_of_small), large = reciprocal(1.0f + e), small = e * large;
  return Sigmoid{negative ? small : large, large * small};
}

// Phi(-|x|) = erfc(|x| / sqrt(2)) / 2 as 2^Q(|x|): Q is a minimax fit of log2, weighted so that the error of x Phi(x) is
// under 2.1e-8 everywhere. Q falls for all |x|, to -infinity, so that there is no bound to check.
MP_SCALAR float normal(float x) {
  const float size = fabsf(x);
  float q = -2.127108246e-6f;
  q = q * size + 3.109781392e-5f;
  q = q * size - 1.479926286e-4f;
  q = q * size - 2.257895831e-4f;
  q = q * size + 7.174209692e-3f;
  q = q * size - 5.256872624e-2f;
  q = q * size - 4.591855109e-1f;
  q = q * size - 1.151107907f;
  q = q * size - 9.999999404e-1f;
  const float tail = power_of_2_of_negative(q);
  return x < 0.0f ? tail : 1.0f - tail;
}

// The tanh form is x s(2u) with u = sqrt(2 / pi) (x + 0.044715 x³): nothing cancels for x < 0.
MP_SCALAR float gelu_tanh(float x) {
  return x * reciprocal(1.0f + power_of_2(x * (-kLog2E * kTanhLinear - kLog2E * kTanhCubic * (x * x))));
}

// s + x s (1 - s) 2u'
MP_SCALAR float gelu_tanh_slope(float x) {
  const float z = x * x, log2_of_small = fabsf(x) * (-kLog2E * kTanhLinear - kLog2E * kTanhCubic * z);
  const Sigmoid s = sigmoid_of(log2_of_small, x < 0.0f);
  return s.at + x * s.slope * (kTanhLinear + 3.0f * kTanhCubic * z);
}

template <bool APPROXIMATE>
MP_SCALAR float gelu(float x) {
  return APPROXIMATE ? gelu_tanh(x) : x * normal(x);
}

}  // namespace mp

// exp, 2^x and tanh in fp32 that the compiler vectorises, unlike calls of libm; within 2 ulp (tested).
// Not named math.h: this folder is on the include path, and <math.h> would find it.
//
// No branches, tables or float-to-int conversions that trap: both sides of a choice are computed. NaN gives NaN, the
// infinities their limits. Polynomials: minimax fits whose error is under 5e-9 of the result.
#pragma once

#include "common.h"

namespace mp {

// e^r of |r| ≤ ln(2)/2.
inline float exp_small(float r) {
  float p = 1.382074552e-3f;
  p = p * r + 8.369248360e-3f;
  p = p * r + 4.166828096e-2f;
  p = p * r + 1.666651666e-1f;
  p = p * r + 4.999999404e-1f;
  return 1.0f + (r + r * r * p);
}

// e^r of r = x - n ln(2), |r| ≤ ln(2)/2, for a whole n.
inline float exp_rest(float x, float n) {
  // ln(2) in two parts; n times the first, of 9 bits, is exact.
  return exp_small((x - n * 0.693359375f) - n * -2.12194440e-4f);
}

// e^x = 2^n e^r with |r| ≤ ln(2)/2. Subnormal results are kept: 2^n is applied in two factors.
inline float exp_float(float x) {
  // Bounds beyond which the result is 0 or infinite anyhow; a NaN passes both comparisons.
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which lies in the low bits
  const float shifted = x * 1.44269504f + magic;
  const float n = shifted - magic;
  const float p = exp_rest(x, n);
  const int32_t whole = static_cast<int32_t>(bits_of_float(shifted)) - static_cast<int32_t>(0x4b400000);
  const int32_t half = whole >> 1;
  const float first = float_of_bits(static_cast<uint32_t>(half + 127) << 23);
  const float second = float_of_bits(static_cast<uint32_t>(whole - half + 127) << 23);
  return p * first * second;
}

// The same for x ≤ 0 (or a rounding above), results below 1.2e-38 flushed to 0: half the work.
inline float exp_of_negative(float x) {
  x = x < -88.1f ? -88.1f : x;             // there n is -127, whose exponent field is that of 0
  const float magic = 12582912.0f + 127.0f;  // n arrives with the exponent's bias
  const float shifted = x * 1.44269504f + magic;
  const float n = shifted - magic;
  const float p = exp_rest(x, n);
  return p * float_of_bits(bits_of_float(shifted) << 23);
}

// 2^x for x ≤ 0 (or a rounding above); results below 1.2e-38 are 0.
inline float power_of_2_of_negative(float x) {
  x = x < -127.0f ? -127.0f : x;  // whose exponent field is that of 0
  const float magic = 12582912.0f + 127.0f;
  const float shifted = x + magic;
  return exp_small((x - (shifted - magic)) * 0.693147181f) * float_of_bits(bits_of_float(shifted) << 23);
}

// 2^x, from 2^127.5 on infinite.
inline float power_of_2(float x) {
  return power_of_2_of_negative(x > 128.0f ? 128.0f : x);  // 128: the exponent field of infinity
}

inline float reciprocal(float x) { return 1.0f / x; }

// x + x³ P(x²) near 0, 1 - 2 / (e^2|x| + 1) elsewhere.
inline float tanh_float(float x) {
  const float size = std::fabs(x), z = x * x;
  float p = -5.692296196e-3f;
  p = p * z + 2.062816732e-2f;
  p = p * z - 5.373651534e-2f;
  p = p * z + 1.333140582e-1f;
  p = p * z - 3.333328068e-1f;
  const float near = x + x * z * p;
  const float far = std::copysign(1.0f - 2.0f / (exp_float(2.0f * size) + 1.0f), x);
  return size < 0.625f ? near : far;
}

}  // namespace mp

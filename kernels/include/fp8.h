// The arithmetic of 8-bit floats, for device and CPU sources: scales from largest elements, rounding to nearest even.
// Integers alone, but for the addition that rounds subnormal numbers: the same bits everywhere.
#pragma once

#include <stdint.h>

#include "number.h"
#include "quantise.h"

namespace mp {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kSmallest = 27u << 23;  // 2^-100 stands for the largest element of a tensor of zeros

// A format as numbers: one kernel serves all four.
struct Format {
  int32_t code;
  uint32_t shift;    // bits of a float's mantissa that are dropped
  uint32_t rounding; // added before: the exponent's other bias, and half a unit but one
  uint32_t normal;   // the smallest normal number, as a float's bits
  uint32_t magic;    // the float whose unit is that of subnormal numbers
  uint32_t beyond;   // code of what is out of range
  uint32_t nan;      // code
  uint32_t zeros;    // 1: there is a negative zero
  uint32_t largest;  // the largest number, as a float's bits
};

// Exponent bias and mantissa bits of a format; the largest number's mantissa.
constexpr Format make_format(
    int32_t code, uint32_t bias, uint32_t mantissa, uint32_t top_exponent, uint32_t top_mantissa, uint32_t beyond,
    uint32_t nan, uint32_t zeros) {
  return Format{
      code,
      23 - mantissa,
      ((bias - 127u) << 23) + (1u << (22 - mantissa)) - 1u,
      (128u - bias) << 23,
      (128u - bias - mantissa + 23u) << 23,
      beyond,
      nan,
      zeros,
      ((127u + top_exponent) << 23) | (top_mantissa << (23 - mantissa)),
  };
}

// False for a code that is no format.
inline bool format_of(int32_t code, Format& out) {
  switch (code) {
    case MP_E4M3FN: out = make_format(code, 7, 3, 8, 6, 0x7e, 0x7f, 1); return true;      // 448
    case MP_E5M2: out = make_format(code, 15, 2, 15, 3, 0x7c, 0x7f, 1); return true;      // 57344
    case MP_E4M3FNUZ: out = make_format(code, 8, 3, 7, 7, 0x80, 0x80, 0); return true;    // 240
    case MP_E5M2FNUZ: out = make_format(code, 16, 2, 15, 3, 0x80, 0x80, 0); return true;  // 57344
    default: return false;
  }
}

// The code of a float.
MP_BOTH inline uint32_t encode(float value, const Format& f) {
  const uint32_t bits = bits_of_float(value), size = bits & 0x7fffffffu, sign = (bits >> 24) & 0x80u;
  const uint32_t small = bits_of_float(float_of_bits(size) + float_of_bits(f.magic)) - f.magic;
  const uint32_t rounded = (size + f.rounding + ((size >> f.shift) & 1u)) >> f.shift;
  const uint32_t most = size > kInfinity ? f.nan : f.beyond;
  uint32_t code = size < f.normal ? small : rounded;
  code = code < most ? code : most;
  return code + f.zeros != 0u ? code | sign : code;
}

// Bits of the scale for the bits of a largest magnitude. A NaN's are above infinity's, so a maximum of bits finds it.
MP_BOTH inline uint32_t scale_bits(uint32_t largest, const Format& f) {
  if (largest >= kInfinity) return largest == kInfinity ? 0u : kInfinity;
  const uint32_t size = largest < kSmallest ? kSmallest : largest;
  const uint32_t exceeds = (size & 0x7fffffu) > (f.largest & 0x7fffffu) ? 1u : 0u;
  return (127u + (f.largest >> 23) - (size >> 23) - exceeds) << 23;
}

// Bits of 1 / x, where x is a power of two whose inverse is normal, 0 or infinity.
MP_BOTH inline uint32_t inverse_bits(uint32_t bits) {
  return bits == 0u ? kInfinity : bits == kInfinity ? 0u : (254u << 23) - bits;
}

}  // namespace mp

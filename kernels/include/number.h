// Number types of tensors, for device and CPU sources: floats as bits, and bf16 rounded to nearest even in integers.
#pragma once

#include <stdint.h>
#include <string.h>

#include "both.h"

namespace mp {

constexpr float kLog2E = 1.44269504f;

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

MP_BOTH inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

MP_BOTH inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

MP_BOTH inline float to_float(float x) { return x; }
MP_BOTH inline float to_float(bf16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }

// A NaN stays one.
MP_BOTH inline bf16 bf16_of_float(float x) {
  const uint32_t bits = bits_of_float(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return bf16{static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

}  // namespace mp

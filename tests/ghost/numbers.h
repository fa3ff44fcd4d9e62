// Numbers in memory, by the codes of cudaDataType: read as float or double, written rounded to nearest even.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "compute.h"

enum class Number { f32 = 0, f64 = 1, f16 = 2, bf16 = 14 };

inline float bf16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float out;
  memcpy(&out, &wide, sizeof out);
  return out;
}

inline uint16_t bf16_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
T number_at(const void* base, Number type, size_t index) {
  switch (type) {
    case Number::f32: return static_cast<T>(static_cast<const float*>(base)[index]);
    case Number::f64: return static_cast<T>(static_cast<const double*>(base)[index]);
    case Number::f16: return static_cast<T>(static_cast<const _Float16*>(base)[index]);
    case Number::bf16: return static_cast<T>(bf16_value(static_cast<const uint16_t*>(base)[index]));
  }
  ghost_stop("nobody computes with numbers of cudaDataType %d", static_cast<int>(type));
}

template <typename T>
void put_number(void* base, Number type, size_t index, T value) {
  switch (type) {
    case Number::f32: static_cast<float*>(base)[index] = static_cast<float>(value); return;
    case Number::f64: static_cast<double*>(base)[index] = static_cast<double>(value); return;
    case Number::f16: static_cast<_Float16*>(base)[index] = static_cast<_Float16>(value); return;
    case Number::bf16: static_cast<uint16_t*>(base)[index] = bf16_bits(static_cast<float>(value)); return;
  }
  ghost_stop("nobody computes with numbers of cudaDataType %d", static_cast<int>(type));
}

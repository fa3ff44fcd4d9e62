// What every CPU source shares: number types, rows as floats, threads.
//
// The loops are written so that the compiler vectorises them; one library is built a level of the instruction set.
// Threads come from OpenMP, whose runtime is the one that torch has loaded (same soname), so torch.set_num_threads
// holds here too. Sums over rows are made in fixed slots, whatever the number of threads: the bits do not depend on it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "mp.h"
#include "number.h"

namespace mp {

inline float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  // 2^112 moves the exponent's bias from 15 to 127 and normalises subnormals; infinity and NaN keep theirs.
  const float scaled = float_of_bits(rest) * float_of_bits(0x77800000u);
  const uint32_t special = rest >= 0x0f800000u ? 0x7f800000u | rest : bits_of_float(scaled);
  return float_of_bits(sign | special);
}

template <typename T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline bf16 from_float<bf16>(float x) {
  return bf16_of_float(x);
}

template <>
inline f16 from_float<f16>(float x) {
  const uint32_t bits = bits_of_float(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return f16{static_cast<uint16_t>(sign | 0x7e00u)};
  if (size >= 0x477ff000u) return f16{static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 65520 or more
  if (size < 0x38800000u) {  // subnormal: adding 1/2 lets the float unit round at 2^-24, to nearest even
    const float shifted = float_of_bits(size) + 0.5f;
    return f16{static_cast<uint16_t>(sign | (bits_of_float(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = size - 0x38000000u + 0xfffu + ((size >> 13) & 1u);
  return f16{static_cast<uint16_t>(sign | (rounded >> 13))};
}

// The value that a tensor of T would hold.
template <typename T>
inline float rounded(float x) {
  return to_float(from_float<T>(x));
}

template <typename T>
inline void widen(const T* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = to_float(from[i]);
}

template <typename T>
inline void narrow(const float* from, T* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = from_float<T>(from[i]);
}

#if defined(__F16C__)
template <>
inline void widen<f16>(const f16* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  for (; i < n; i++) to[i] = to_float(from[i]);
}

template <>
inline void narrow<f16>(const float* from, f16* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to + i),
        _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  for (; i < n; i++) to[i] = from_float<f16>(from[i]);
}
#endif

// A row of T as floats: the row itself for float, a copy in `buffer` otherwise.
template <typename T>
inline const float* row_as_floats(const T* row, float* buffer, int64_t n) {
  if constexpr (std::is_same_v<T, float>) {
    return row;
  } else {
    widen(row, buffer, n);
    return buffer;
  }
}

// Where to write a row of floats that is to be stored as T: the row itself for float, `buffer` otherwise.
template <typename T>
inline float* row_for_floats(T* row, float* buffer) {
  if constexpr (std::is_same_v<T, float>) {
    return row;
  } else {
    return buffer;
  }
}

// Ends row_for_floats.
template <typename T>
inline void put_row(const float* floats, T* row, int64_t n) {
  if constexpr (!std::is_same_v<T, float>) narrow(floats, row, n);
}

// Contiguous parts into which the rows are cut where sums over rows are kept by part.
constexpr int64_t kSlots = 16;
inline int64_t slots_of(int64_t rows) { return rows < 1 ? 1 : rows < kSlots ? rows : kSlots; }

// Below this many elements, threads cost more than they bring.
constexpr int64_t kParallelFrom = 1 << 14;

// Calls `with(T{})` for the number type of a dtype code.
template <typename F>
inline int32_t for_dtype(int32_t dtype, F with) {
  switch (dtype) {
    case MP_F32: return with(float{});
    case MP_F16: return with(f16{});
    case MP_BF16: return with(bf16{});
    default: return MP_BAD_DTYPE;
  }
}

}  // namespace mp

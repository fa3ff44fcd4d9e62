// Products of matrices in tiles that stay in registers, and the packing of rows into whole tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace mp {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
// The same in memory, where it may lie at any float.
typedef float Unaligned __attribute__((vector_size(kLanes * sizeof(float)), aligned(alignof(float)), may_alias));

constexpr int64_t kDown = 4, kAcross = 2 * kLanes;  // a tile of the result, in registers

inline int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline Lanes load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Lanes value) { *reinterpret_cast<Unaligned*>(to) = value; }

// c [kDown, kAcross] = a b, or c += a b, over `depth`: a(i, k) at a[i * down + k * along], b(k, j) at b[k * width + j].
template <bool ADD>
inline __attribute__((always_inline)) void tile(
    const float* a, int64_t down, int64_t along, const float* b, int64_t width, int64_t depth, float* c,
    int64_t pitch) {
  Lanes left[kDown] = {}, right[kDown] = {};
  for (int64_t k = 0; k < depth; k++) {
    const Lanes b0 = load(b + k * width), b1 = load(b + k * width + kLanes);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kDown; i++) {
      const float x = a[i * down + k * along];
      left[i] += x * b0;
      right[i] += x * b1;
    }
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < kDown; i++) {
    float* to = c + i * pitch;
    store(to, ADD ? load(to) + left[i] : left[i]);
    store(to + kLanes, ADD ? load(to + kLanes) + right[i] : right[i]);
  }
}

// Where the rows of one head are.
template <typename T>
struct Rows {
  T* data;
  int64_t step, size;
  T* at(int64_t row) const { return data + row * step; }
  Rows moved(int64_t by) const { return {data + by, step, size}; }
};

template <typename T>
Rows<T> rows_of(T* data, const int64_t* strides, int64_t sample, int64_t group, int64_t d) {
  return {data + sample * strides[1] + group * strides[2], strides[0], d};
}

// Rows [from, from + count) as floats times `scale`, `pitch` apart, zeros behind them and in the rows up to `upto`.
template <typename T>
void pack(const Rows<const T>& rows, int64_t from, int64_t count, int64_t upto, float scale, float* to, int64_t pitch) {
  for (int64_t r = 0; r < count; r++, to += pitch) {
    widen(rows.at(from + r), to, rows.size);
    for (int64_t c = 0; c < rows.size; c++) to[c] *= scale;
    std::fill(to + rows.size, to + pitch, 0.0f);
  }
  std::fill(to, to + (upto - count) * pitch, 0.0f);
}

// to [cols, rows] of from [rows, cols], both multiples of 4.
inline void transpose(const float* from, int64_t rows, int64_t cols, float* to) {
  for (int64_t r = 0; r < rows; r += 4) {
    for (int64_t c = 0; c < cols; c += 4) {
      const float* at = from + r * cols + c;
#if defined(__SSE__)
      __m128 a = _mm_loadu_ps(at), b = _mm_loadu_ps(at + cols), d = _mm_loadu_ps(at + 2 * cols),
             e = _mm_loadu_ps(at + 3 * cols);
      _MM_TRANSPOSE4_PS(a, b, d, e);
      _mm_storeu_ps(to + c * rows + r, a);
      _mm_storeu_ps(to + (c + 1) * rows + r, b);
      _mm_storeu_ps(to + (c + 2) * rows + r, d);
      _mm_storeu_ps(to + (c + 3) * rows + r, e);
#else
      for (int64_t j = 0; j < 4; j++) {
        for (int64_t i = 0; i < 4; i++) to[(c + j) * rows + r + i] = at[i * cols + j];
      }
#endif
    }
  }
}

inline float largest(const float* v, int64_t n) {
  constexpr int64_t kMany = 16;
  float most[kMany];
  for (int64_t j = 0; j < kMany; j++) most[j] = -std::numeric_limits<float>::infinity();
  int64_t c = 0;
  for (; c + kMany <= n; c += kMany) {
    for (int64_t j = 0; j < kMany; j++) most[j] = v[c + j] > most[j] ? v[c + j] : most[j];
  }
  for (; c < n; c++) most[0] = v[c] > most[0] ? v[c] : most[0];
  for (int64_t j = 1; j < kMany; j++) most[0] = most[j] > most[0] ? most[j] : most[0];
  return most[0];
}

}  // namespace mp

// Rows of tokens at the places of their experts; include/expert_rows.h says what they compute.
//
// A product and its sum are rounded one by one, as torch's ops round them: no fused multiply-add in this file.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include "expert_rows.h"

#include <algorithm>

#include "common.h"
#include "stream_copy.h"

namespace mp {
namespace {

constexpr int kChunk = 64;  // columns whose sums stay in registers
constexpr int64_t kBlock = 8 * kChunk;  // columns of an inner product that are added in float
constexpr int kParts = 16;  // of an inner product: its bits are those of every instruction set
typedef float Parts __attribute__((vector_size(kParts * sizeof(float))));

template <typename T>
int32_t gather(int64_t rows, int64_t cols, const T* x, const int64_t* source, T* out) {
  const int64_t bytes = cols * static_cast<int64_t>(sizeof(T));
  const RowWriter write(out, bytes, rows);
#pragma omp parallel if (rows * cols > kParallelFrom)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      if (row + 1 < rows) prefetch_row(x + source[row + 1] * cols, bytes);
      write(out + row * cols, x + source[row] * cols, bytes);
    }
    write.finish();
  }
  return MP_OK;
}

// What the sum of one token is made of.
template <typename T>
struct Choices {
  const T* y;
  int64_t cols, k;
  const int64_t* place;  // [k]
  const float* weight;   // [k] or NULL
};

// n columns from `at` on; n is a constant where this is inlined for whole chunks.
template <typename T>
inline __attribute__((always_inline)) void sum_chunk(
    const Choices<T>& a, int64_t at, int n, const RowWriter& write, T* out) {
  float total[kChunk] = {}, row[kChunk];
  alignas(kLine) T rounded[kChunk];
  for (int64_t j = 0; j < a.k; j++) {
    if (a.place[j] < 0) continue;
    const float w = a.weight != nullptr ? a.weight[j] : 1.0f;
    const T* in = a.y + a.place[j] * a.cols + at;
    if (at + n < a.cols) prefetch(reinterpret_cast<const char*>(in) + kAhead, n * sizeof(T));
    widen(in, row, n);
    for (int c = 0; c < n; c++) total[c] += w * row[c];
  }
  narrow(total, rounded, n);
  write(out + at, rounded, n * sizeof(T));
}

template <typename T>
int32_t sum(
    int64_t tokens, int64_t cols, int64_t k, const T* y, const int64_t* place, const float* weight, T* out) {
  const RowWriter write(out, cols * sizeof(T), tokens);
#pragma omp parallel if (tokens * cols * k > kParallelFrom)
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
      const Choices<T> a{y, cols, k, place + token * k, weight != nullptr ? weight + token * k : nullptr};
      T* to = out + token * cols;
      for (int64_t j = k; j < 2 * k && token + 1 < tokens; j++) {  // those of the next one
        if (a.place[j] >= 0) prefetch_row(y + a.place[j] * cols, cols * sizeof(T));
      }
      int64_t at = 0;
      for (; at + kChunk <= cols; at += kChunk) sum_chunk(a, at, kChunk, write, to);
      if (at < cols) sum_chunk(a, at, static_cast<int>(cols - at), write, to);
    }
    write.finish();
  }
  return MP_OK;
}

// dy = w * grad, n columns; adds the products of grad and y to `part`.
template <typename T>
inline __attribute__((always_inline)) void backward_chunk(
    const T* grad, const T* y, float w, int n, const RowWriter& write, T* dy, Parts& part) {
  float g[kChunk] = {}, other[kChunk] = {}, product[kChunk];
  alignas(kLine) T rounded[kChunk];
  widen(grad, g, n);
  widen(y, other, n);
  for (int from = 0; from < kChunk; from += kParts) {
    Parts a, b;
    memcpy(&a, g + from, sizeof(a));
    memcpy(&b, other + from, sizeof(b));
    part += a * b;
  }
  for (int c = 0; c < n; c++) product[c] = w * g[c];
  narrow(product, rounded, n);
  write(dy, rounded, n * sizeof(T));
}

inline double sum_of(const Parts& part) {
  float sum = 0.0f;
  for (int i = 0; i < kParts; i++) sum += part[i];
  return sum;
}

// One row of the backward pass; returns the inner product of grad and y, in blocks whose sums are added in double.
template <typename T>
float backward_row(const T* grad, const T* y, float w, int64_t cols, const RowWriter& write, T* dy) {
  double dot = 0.0;
  int64_t at = 0;
  while (at + kChunk <= cols) {
    Parts part = {};
    const int64_t end = std::min(at + kBlock, cols - kChunk + 1);
    for (; at < end; at += kChunk) backward_chunk(grad + at, y + at, w, kChunk, write, dy + at, part);
    dot += sum_of(part);
  }
  if (at < cols) {
    Parts part = {};
    backward_chunk(grad + at, y + at, w, static_cast<int>(cols - at), write, dy + at, part);
    dot += sum_of(part);
  }
  return static_cast<float>(dot);
}

template <typename T>
int32_t backward(
    int64_t tokens, int64_t cols, int64_t k, const T* grad, const T* y, const int64_t* place, const float* weight,
    T* dy, float* dweight) {
  const RowWriter write(dy, cols * sizeof(T), tokens * k);
#pragma omp parallel if (tokens * cols * k > kParallelFrom)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tokens * k; i++) {
      if (i + 1 < tokens * k && place[i + 1] >= 0) prefetch_row(y + place[i + 1] * cols, cols * sizeof(T));
      const int64_t row = place[i] * cols;
      dweight[i] =
          place[i] < 0 ? 0.0f : backward_row(grad + i / k * cols, y + row, weight[i], cols, write, dy + row);
    }
    write.finish();
  }
  return MP_OK;
}

bool good_sizes(int64_t rows, int64_t cols, int64_t k) {
  return rows >= 0 && cols >= 1 && k >= 1 && k <= MP_MOST_CHOICES;
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_gather_rows(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, const void* x, const int64_t* source, void* out,
    int64_t) {
  if (!mp::good_sizes(rows, cols, 1)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::gather<T>(rows, cols, static_cast<const T*>(x), source, static_cast<T*>(out));
  });
}

extern "C" int32_t mp_sum_rows(
    void* stream, int32_t dtype, int64_t tokens, int64_t cols, int64_t k, const void* y, const int64_t* place,
    const float* weight, void* out, int64_t) {
  if (!mp::good_sizes(tokens, cols, k)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::sum<T>(tokens, cols, k, static_cast<const T*>(y), place, weight, static_cast<T*>(out));
  });
}

extern "C" int32_t mp_sum_rows_backward(
    void* stream, int32_t dtype, int64_t tokens, int64_t cols, int64_t k, const void* grad, const void* y,
    const int64_t* place, const float* weight, void* dy, float* dweight, int64_t) {
  if (!mp::good_sizes(tokens, cols, k)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::backward<T>(
        tokens, cols, k, static_cast<const T*>(grad), static_cast<const T*>(y), place, weight, static_cast<T*>(dy),
        dweight);
  });
}

// Cross-entropy over a split vocabulary; include/cross_entropy.h says what is computed.
//
// A row goes through in blocks that stay in the first-level cache: of each the maximum, then the sum of exp, so that
// memory is read once.
#include "cross_entropy.h"

#include <algorithm>
#include <limits>

#include "common.h"
#include "sums.h"
#include "vmath.h"

namespace mp {
namespace {

constexpr int64_t kBlock = 2048;
constexpr float kLow = -std::numeric_limits<float>::infinity();

inline float shift_of(float maximum) { return maximum == kLow ? 0.0f : maximum; }

inline float highest(const float* x, int64_t n) {
  float most = kLow;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
  return most;
}

inline double sum_of_exp(const float* x, float shift, int64_t n) {
  return sum_in_blocks(n, [=](int64_t i) { return exp_float(x[i] - shift); });
}

template <typename T>
int32_t statistics(
    int64_t rows, int64_t cols, int64_t offset, int64_t extent, const T* logits, const int64_t* labels,
    float* maximum, float* total, float* target) {
#pragma omp parallel for schedule(static) if (rows * extent > kParallelFrom)
  for (int64_t row = 0; row < rows; row++) {
    alignas(64) float buffer[kBlock];
    const T* x = logits + row * cols;
    float most = kLow;
    double sum = 0.0;
    for (int64_t at = 0; at < extent; at += kBlock) {
      const int64_t n = std::min(kBlock, extent - at);
      const float* in = row_as_floats(x + at, buffer, n);
      const float here = highest(in, n);
      if (here > most) {
        sum = most == kLow ? sum : sum * exp_float(most - here);
        most = here;
      }
      sum += sum_of_exp(in, shift_of(most), n);
    }
    const int64_t column = labels[row] - offset;
    maximum[row] = most;
    total[row] = static_cast<float>(sum);
    target[row] = column >= 0 && column < extent ? to_float(x[column]) : 0.0f;
  }
  return MP_OK;
}

template <typename T>
int32_t gradient(
    int64_t rows, int64_t cols, int64_t offset, int64_t extent, T* logits, const int64_t* labels,
    const float* maximum, const float* total, const float* grad) {
#pragma omp parallel for schedule(static) if (rows * cols > kParallelFrom)
  for (int64_t row = 0; row < rows; row++) {
    alignas(64) float buffer[kBlock];
    T* x = logits + row * cols;
    const float most = maximum[row], scale = grad[row] / total[row];
    const int64_t column = labels[row] - offset;
    for (int64_t at = 0; at < extent; at += kBlock) {
      const int64_t n = std::min(kBlock, extent - at);
      const float* in = row_as_floats(x + at, buffer, n);
      float* out = row_for_floats(x + at, buffer);
#pragma omp simd
      for (int64_t i = 0; i < n; i++) out[i] = exp_float(in[i] - most) * scale;
      if (column >= at && column < at + n) out[column - at] -= grad[row];
      put_row(out, x + at, n);
    }
    for (int64_t at = extent; at < cols; at++) x[at] = from_float<T>(0.0f);
  }
  return MP_OK;
}

bool sizes_fit(int64_t rows, int64_t cols, int64_t extent) {
  return rows >= 0 && cols >= 1 && extent >= 0 && extent <= cols;
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_cross_entropy_statistics(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, int64_t offset, int64_t extent, const void* logits,
    const int64_t* labels, float* maximum, float* total, float* target) {
  if (!mp::sizes_fit(rows, cols, extent)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::statistics<T>(
        rows, cols, offset, extent, static_cast<const T*>(logits), labels, maximum, total, target);
  });
}

extern "C" int32_t mp_cross_entropy_gradient(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, int64_t offset, int64_t extent, void* logits,
    const int64_t* labels, const float* maximum, const float* total, const float* grad) {
  if (!mp::sizes_fit(rows, cols, extent)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::gradient<T>(rows, cols, offset, extent, static_cast<T*>(logits), labels, maximum, total, grad);
  });
}

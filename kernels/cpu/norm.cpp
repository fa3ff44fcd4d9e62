// LayerNorm and RMSNorm with the residual add; include/norm.h says what they compute.
#include "norm.h"

#include "common.h"
#include "sums.h"

namespace mp {
namespace {

template <typename T>
int32_t forward(
    bool rms, int64_t rows, int64_t cols, float eps, const T* x, const T* residual, const T* weight, const T* bias,
    T* y, T* sum, float* mean, float* rstd) {
  std::vector<float> scale(cols), shift(cols, 0.0f);
  widen(weight, scale.data(), cols);
  if (bias != nullptr) widen(bias, shift.data(), cols);
#pragma omp parallel if (rows * cols > kParallelFrom)
  {
    std::vector<float> own(cols), more(cols), out(cols);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      const float* in = row_as_floats(x + row * cols, own.data(), cols);
      if (residual != nullptr) {
        const float* add = row_as_floats(residual + row * cols, more.data(), cols);
        for (int64_t c = 0; c < cols; c++) own[c] = rounded<T>(in[c] + add[c]);
        narrow(own.data(), sum + row * cols, cols);
        in = own.data();
      }
      const float average =
          rms ? 0.0f : static_cast<float>(sum_in_blocks(cols, [=](int64_t c) { return in[c]; }) / cols);
      const double squares =
          sum_in_blocks(cols, [=](int64_t c) { return (in[c] - average) * (in[c] - average); });
      const float inverse = 1.0f / std::sqrt(static_cast<float>(squares / cols) + eps);
      float* to = row_for_floats(y + row * cols, out.data());
      for (int64_t c = 0; c < cols; c++) to[c] = (in[c] - average) * inverse * scale[c] + shift[c];
      put_row(to, y + row * cols, cols);
      if (!rms) mean[row] = average;
      rstd[row] = inverse;
    }
  }
  return MP_OK;
}

template <typename T>
int32_t backward(
    bool rms, int64_t rows, int64_t cols, const T* dy, const T* dsum, const T* sum, const T* weight, const float* mean,
    const float* rstd, T* dx, T* dweight, T* dbias, float* partial, int64_t* kept) {
  std::vector<float> scale(cols);
  widen(weight, scale.data(), cols);
  const int64_t slots = slots_of(rows);
#pragma omp parallel for schedule(static) if (rows * cols > kParallelFrom)
  for (int64_t slot = 0; slot < slots; slot++) {
    std::vector<float> a(cols), b(cols), m(cols), out(cols);
    RowSums sums(partial + slot * 2 * cols, 2 * cols);
    for (int64_t row = slot * rows / slots; row < (slot + 1) * rows / slots; row++) {
      const float* in = row_as_floats(sum + row * cols, a.data(), cols);
      const float* d = row_as_floats(dy + row * cols, b.data(), cols);
      const float average = rms ? 0.0f : mean[row], inverse = rstd[row];
      const float* weights = scale.data();
      // Two loops: the compiler vectorises a reduction, and sums into arrays, but not both at once.
      const TwoSums sum_of_row = two_sums_in_blocks(cols, [=](int64_t c) {
        const float g = d[c] * weights[c];
        return TwoTerms{g * (in[c] - average), g};
      });
      const float along = static_cast<float>(sum_of_row.first * inverse / cols);
      const float shift = rms ? 0.0f : static_cast<float>(sum_of_row.second / cols);
      float *to = row_for_floats(dx + row * cols, out.data()), *dw = sums.next(), *db = dw + cols;
#pragma omp simd
      for (int64_t c = 0; c < cols; c++) {
        const float n = (in[c] - average) * inverse;
        dw[c] += d[c] * n;
        db[c] += d[c];
        to[c] = inverse * (d[c] * weights[c] - shift - n * along);
      }
      if (dsum != nullptr) {
        const float* skip = row_as_floats(dsum + row * cols, m.data(), cols);
        for (int64_t c = 0; c < cols; c++) to[c] += skip[c];
      }
      put_row(to, dx + row * cols, cols);
    }
    sums.finish();
  }
  for (int64_t slot = 1; slot < slots; slot++) {
    const float* more = partial + slot * 2 * cols;
#pragma omp simd
    for (int64_t c = 0; c < 2 * cols; c++) partial[c] += more[c];
  }
  if (kept != nullptr) {
    *kept = 1;
    return MP_OK;
  }
  narrow(partial, dweight, cols);
  if (dbias != nullptr) narrow(partial + cols, dbias, cols);
  return MP_OK;
}

}  // namespace
}  // namespace mp

extern "C" int64_t mp_norm_workspace(int64_t rows, int64_t cols) { return mp::slots_of(rows) * 2 * cols; }

extern "C" int32_t mp_norm_forward(
    void* stream, int32_t dtype, int32_t rms, int64_t rows, int64_t cols, float eps, const void* x,
    const void* residual, const void* weight, const void* bias, void* y, void* sum, float* mean, float* rstd) {
  if (rows < 0 || cols < 1) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::forward<T>(
        rms, rows, cols, eps, static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight),
        static_cast<const T*>(bias), static_cast<T*>(y), static_cast<T*>(sum), mean, rstd);
  });
}

extern "C" int32_t mp_norm_backward(
    void* stream, int32_t dtype, int32_t rms, int64_t rows, int64_t cols, const void* dy, const void* dsum,
    const void* sum, const void* weight, const float* mean, const float* rstd, void* dx, void* dweight, void* dbias,
    float* workspace, int64_t* kept) {
  if (rows < 1 || cols < 1) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::backward<T>(
        rms, rows, cols, static_cast<const T*>(dy), static_cast<const T*>(dsum), static_cast<const T*>(sum),
        static_cast<const T*>(weight), mean, rstd, static_cast<T*>(dx), static_cast<T*>(dweight),
        static_cast<T*>(dbias), workspace, kept);
  });
}

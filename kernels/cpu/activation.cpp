// GELU of x + bias and SwiGLU; include/activation.h says what they compute.
#include "activation.h"

#include "sums.h"
#include "vmath.h"
// After the functions that it takes from there.
#include "gelu.h"

namespace mp {
namespace {

// Phi(x) + x phi(x) with one exponential in place of normal()'s and another: erfc(|x| / sqrt(2)) / 2 is
// e^(-x²/2) t P(t) with t = 1 / (1 + 0.21 |x|), P a minimax fit within 2e-8.
inline float normal_slope(float x) {
  const float density = exp_of_negative(-0.5f * x * x), t = 1.0f / (1.0f + 0.21f * std::fabs(x));
  float p = -7.165452629e-02f;
  p = p * t + 2.835801133e-01f;
  p = p * t - 3.302361686e-01f;
  p = p * t + 3.493813736e-01f;
  p = p * t - 9.391155204e-02f;
  p = p * t + 1.248667745e-01f;
  p = p * t + 6.919375408e-02f;
  p = p * t + 8.506862296e-02f;
  p = p * t + 8.371159053e-02f;
  const float tail = density * (p * t);
  return (x < 0.0f ? tail : 1.0f - tail) + x * (0.398942280f * density);  // the constant: 1 / sqrt(2 pi)
}

template <bool APPROXIMATE>
inline float gelu_slope(float x) {
  return APPROXIMATE ? gelu_tanh_slope(x) : normal_slope(x);
}

template <typename T, bool APPROXIMATE>
int32_t gelu_forward(int64_t rows, int64_t cols, const T* x, const T* bias, T* y) {
  std::vector<float> shift(cols, 0.0f);
  if (bias != nullptr) widen(bias, shift.data(), cols);
#pragma omp parallel if (rows * cols > kParallelFrom)
  {
    std::vector<float> own(cols), out(cols);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      const float *in = row_as_floats(x + row * cols, own.data(), cols), *add = shift.data();
      float* to = row_for_floats(y + row * cols, out.data());
      for (int64_t c = 0; c < cols; c++) to[c] = gelu<APPROXIMATE>(in[c] + add[c]);
      put_row(to, y + row * cols, cols);
    }
  }
  return MP_OK;
}

template <typename T, bool APPROXIMATE>
int32_t gelu_backward(
    int64_t rows, int64_t cols, const T* dy, const T* x, const T* bias, T* dx, T* dbias, float* partial,
    int64_t* kept) {
  std::vector<float> shift(cols, 0.0f);
  if (bias != nullptr) widen(bias, shift.data(), cols);
  const int64_t slots = slots_of(rows);
#pragma omp parallel for schedule(static) if (rows * cols > kParallelFrom)
  for (int64_t slot = 0; slot < slots; slot++) {
    std::vector<float> a(cols), b(cols), out(cols), unused(dbias != nullptr ? 0 : cols);
    RowSums sums(dbias != nullptr ? partial + slot * cols : unused.data(), cols);
    for (int64_t row = slot * rows / slots; row < (slot + 1) * rows / slots; row++) {
      const float* in = row_as_floats(x + row * cols, a.data(), cols);
      const float *d = row_as_floats(dy + row * cols, b.data(), cols), *add = shift.data();
      float *to = row_for_floats(dx + row * cols, out.data()), *sum = sums.next();
      for (int64_t c = 0; c < cols; c++) {
        const float g = d[c] * gelu_slope<APPROXIMATE>(in[c] + add[c]);
        to[c] = g;
        sum[c] += g;
      }
      put_row(to, dx + row * cols, cols);
    }
    sums.finish();
  }
  if (dbias == nullptr) return MP_OK;
  for (int64_t slot = 1; slot < slots; slot++) {
    for (int64_t c = 0; c < cols; c++) partial[c] += partial[slot * cols + c];
  }
  if (kept != nullptr) {
    *kept = 1;
  } else {
    narrow(partial, dbias, cols);
  }
  return MP_OK;
}

template <typename T>
int32_t swiglu_forward(int64_t rows, int64_t cols, const T* x, T* y) {
#pragma omp parallel if (rows * cols > kParallelFrom)
  {
    std::vector<float> own(2 * cols), out(cols);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      const float *gate = row_as_floats(x + row * 2 * cols, own.data(), 2 * cols), *up = gate + cols;
      float* to = row_for_floats(y + row * cols, out.data());
      for (int64_t c = 0; c < cols; c++) to[c] = gate[c] * sigmoid(gate[c]) * up[c];
      put_row(to, y + row * cols, cols);
    }
  }
  return MP_OK;
}

// silu' = s + gate s (1 - s), s = sigmoid(gate).
template <typename T>
int32_t swiglu_backward(int64_t rows, int64_t cols, const T* dy, const T* x, T* dx) {
#pragma omp parallel if (rows * cols > kParallelFrom)
  {
    std::vector<float> own(2 * cols), grad(cols), out(2 * cols);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      const float *gate = row_as_floats(x + row * 2 * cols, own.data(), 2 * cols), *up = gate + cols;
      const float* d = row_as_floats(dy + row * cols, grad.data(), cols);
      float *dgate = row_for_floats(dx + row * 2 * cols, out.data()), *dup = dgate + cols;
      for (int64_t c = 0; c < cols; c++) {
        const float g = gate[c];
        const Sigmoid s = sigmoid_of(-kLog2E * std::fabs(g), g < 0.0f);
        dgate[c] = d[c] * up[c] * (s.at + g * s.slope);
        dup[c] = d[c] * g * s.at;
      }
      put_row(dgate, dx + row * 2 * cols, 2 * cols);
    }
  }
  return MP_OK;
}

bool bad(int64_t rows, int64_t cols) { return rows < 0 || cols < 1 || cols > (1 << 24); }

}  // namespace
}  // namespace mp

extern "C" int64_t mp_bias_gelu_workspace(int64_t rows, int64_t cols) { return mp::slots_of(rows) * cols; }

extern "C" int32_t mp_bias_gelu_forward(
    void* stream, int32_t dtype, int32_t approximate, int64_t rows, int64_t cols, const void* x, const void* bias,
    void* y) {
  if (mp::bad(rows, cols)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto run = approximate ? mp::gelu_forward<T, true> : mp::gelu_forward<T, false>;
    return run(rows, cols, static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(y));
  });
}

extern "C" int32_t mp_bias_gelu_backward(
    void* stream, int32_t dtype, int32_t approximate, int64_t rows, int64_t cols, const void* dy, const void* x,
    const void* bias, void* dx, void* dbias, float* workspace, int64_t* kept) {
  if (mp::bad(rows, cols)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto run = approximate ? mp::gelu_backward<T, true> : mp::gelu_backward<T, false>;
    return run(
        rows, cols, static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const T*>(bias),
        static_cast<T*>(dx), static_cast<T*>(dbias), workspace, kept);
  });
}

extern "C" int32_t mp_swiglu_forward(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, const void* x, void* y) {
  if (mp::bad(rows, cols)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::swiglu_forward<T>(rows, cols, static_cast<const T*>(x), static_cast<T*>(y));
  });
}

extern "C" int32_t mp_swiglu_backward(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, const void* dy, const void* x, void* dx) {
  if (mp::bad(rows, cols)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::swiglu_backward<T>(
        rows, cols, static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<T*>(dx));
  });
}

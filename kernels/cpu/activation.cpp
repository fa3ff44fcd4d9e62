// GELU of x + bias and SwiGLU; include/activation.h says what they compute.
#include "activation.h"

#include "vmath.h"

namespace mp {
namespace {

constexpr float kTanhLinear = 0.797884561f;    // sqrt(2 / pi)
constexpr float kTanhCubic = 0.0356774081f;    // 0.044715 * sqrt(2 / pi)
constexpr float kNormalAtZero = 0.398942280f;  // 1 / sqrt(2 pi)

// Phi(x): erfc(|x| / sqrt(2)) / 2 as e^Q(|x|), Q a minimax fit of the log as in device/activation.cu, falling to
// -infinity; cheaper than erf, and the tail keeps its digits.
inline float normal(float x) {
  const float size = std::fabs(x);
  float q = -1.474399083e-06f;
  q = q * size + 2.155536204e-05f;
  q = q * size - 1.025806733e-04f;
  q = q * size - 1.565054129e-04f;
  q = q * size + 4.972783221e-03f;
  q = q * size - 3.643786438e-02f;
  q = q * size - 3.182831422e-01f;
  q = q * size - 7.978872003e-01f;
  q = q * size - 6.931471392e-01f;
  const float tail = exp_of_negative(q);
  return x < 0.0f ? tail : 1.0f - tail;
}

// Phi(x) + x phi(x) with one exponential: erfc(|x| / sqrt(2)) / 2 = e^(-x²/2) t P(t) with t = 1 / (1 + 0.21 |x|), P a
// minimax fit within 2e-8.
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
  return (x < 0.0f ? tail : 1.0f - tail) + x * (kNormalAtZero * density);
}

// gelu in the tanh form is x * sigmoid(2u) with u = x (kTanhLinear + kTanhCubic x²): nothing cancels for x < 0.
template <bool APPROXIMATE>
inline float gelu(float x) {
  if constexpr (APPROXIMATE) {
    return x / (1.0f + exp_float(-2.0f * x * (kTanhLinear + kTanhCubic * x * x)));
  } else {
    return x * normal(x);
  }
}

template <bool APPROXIMATE>
inline float gelu_slope(float x) {
  if constexpr (APPROXIMATE) {
    // s = sigmoid(2u), t = 1 - s from e^-2|u|, which cannot overflow; gelu' = s + x s t 2u'.
    const float z = x * x, e = exp_of_negative(-2.0f * std::fabs(x) * (kTanhLinear + kTanhCubic * z));
    const float large = 1.0f / (1.0f + e), small = e * large;
    return (x < 0.0f ? small : large) + x * (large * small) * (2.0f * kTanhLinear + 6.0f * kTanhCubic * z);
  } else {
    return normal_slope(x);
  }
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
    int64_t rows, int64_t cols, const T* dy, const T* x, const T* bias, T* dx, T* dbias, float* partial) {
  std::vector<float> shift(cols, 0.0f);
  if (bias != nullptr) widen(bias, shift.data(), cols);
  const int64_t slots = slots_of(rows);
#pragma omp parallel for schedule(static) if (rows * cols > kParallelFrom)
  for (int64_t slot = 0; slot < slots; slot++) {
    std::vector<float> a(cols), b(cols), out(cols), unused(dbias != nullptr ? 0 : cols);
    float* sum = dbias != nullptr ? partial + slot * cols : unused.data();
    memset(sum, 0, cols * sizeof(float));
    for (int64_t row = slot * rows / slots; row < (slot + 1) * rows / slots; row++) {
      const float* in = row_as_floats(x + row * cols, a.data(), cols);
      const float *d = row_as_floats(dy + row * cols, b.data(), cols), *add = shift.data();
      float* to = row_for_floats(dx + row * cols, out.data());
      for (int64_t c = 0; c < cols; c++) {
        const float g = d[c] * gelu_slope<APPROXIMATE>(in[c] + add[c]);
        to[c] = g;
        sum[c] += g;
      }
      put_row(to, dx + row * cols, cols);
    }
  }
  if (dbias == nullptr) return MP_OK;
  for (int64_t slot = 1; slot < slots; slot++) {
    for (int64_t c = 0; c < cols; c++) partial[c] += partial[slot * cols + c];
  }
  narrow(partial, dbias, cols);
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
      for (int64_t c = 0; c < cols; c++) to[c] = gate[c] / (1.0f + exp_float(-gate[c])) * up[c];
      put_row(to, y + row * cols, cols);
    }
  }
  return MP_OK;
}

// silu' = s + gate s (1 - s) with s = sigmoid(gate); 1 - s from e^-|gate|, without cancellation.
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
        const float g = gate[c], e = exp_of_negative(-std::fabs(g)), large = 1.0f / (1.0f + e), small = e * large;
        const float s = g < 0.0f ? small : large;
        dgate[c] = d[c] * up[c] * (s + g * (large * small));
        dup[c] = d[c] * g * s;
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
    const void* bias, void* dx, void* dbias, float* workspace) {
  if (mp::bad(rows, cols)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto run = approximate ? mp::gelu_backward<T, true> : mp::gelu_backward<T, false>;
    return run(
        rows, cols, static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const T*>(bias),
        static_cast<T*>(dx), static_cast<T*>(dbias), workspace);
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

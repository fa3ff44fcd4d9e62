// Multi-tensor AdamW, squared norm and accumulation; include/optimizer.h says what they compute.
#include "optimizer.h"

#include <algorithm>

#include "adamw.h"

namespace mp {
namespace {

bool sizes_fit(int64_t count, const int64_t* sizes) {
  return count >= 0 && std::all_of(sizes, sizes + count, [](int64_t n) { return n >= 0; });
}

// In float over strips, a vector's lanes side by side (32 elements each in the narrowest vectors), then in double. In
// half precision four strips at once, because an addition waits for the last of its strip; floats come no faster.
template <typename T>
double squares(const T* from, int64_t n) {
  constexpr int64_t kShort = 128;
  double total = 0.0;
  float buffer[4 * kShort];
  int64_t at = 0;
  for (; sizeof(T) == 2 && at + 4 * kShort <= n; at += 4 * kShort) {
    const float* x = row_as_floats(from + at, buffer, 4 * kShort);
    float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
#pragma omp simd reduction(+ : a, b, c, d)
    for (int64_t i = 0; i < kShort; i++) {
      a += x[i] * x[i];
      b += x[kShort + i] * x[kShort + i];
      c += x[2 * kShort + i] * x[2 * kShort + i];
      d += x[3 * kShort + i] * x[3 * kShort + i];
    }
    total += a;
    total += b;
    total += c;
    total += d;
  }
  for (; at < n; at += kShort) {
    const int64_t here = std::min(kShort, n - at);
    const float* x = row_as_floats(from + at, buffer, here);
    float part = 0.0f;
#pragma omp simd reduction(+ : part)
    for (int64_t i = 0; i < here; i++) part += x[i] * x[i];
    total += part;
  }
  return total;
}

template <typename W, typename G>
void update(
    const Factors& f, W* weight, float* master, const G* grad, float* exp_avg, float* exp_avg_sq, int64_t n) {
  float buffer[kStrip];
  for (int64_t at = 0; at < n; at += kStrip) {
    const int64_t here = std::min(kStrip, n - at);
    const float* g = row_as_floats(grad + at, buffer, here);
    const auto strip = strip_of(f);
    strip(f, g, master + at, exp_avg + at, exp_avg_sq + at, here);
    if (weight != nullptr) narrow(master + at, weight + at, here);
  }
}

template <typename W, typename G>
int32_t adamw(
    const Factors& f, int64_t count, void* const* weights, float* const* masters, const void* const* grads,
    float* const* exp_avg, float* const* exp_avg_sq, const int64_t* sizes) {
  const std::vector<Chunk> chunks = chunks_of(count, sizes);
  const int64_t n = static_cast<int64_t>(chunks.size());
#pragma omp parallel for schedule(static) if (n > 1)
  for (int64_t i = 0; i < n; i++) {
    const auto [t, start, size] = chunks[i];
    W* weight = weights == nullptr ? nullptr : static_cast<W*>(weights[t]) + start;
    update(
        f, weight, masters[t] + start, static_cast<const G*>(grads[t]) + start, exp_avg[t] + start,
        exp_avg_sq[t] + start, size);
  }
  return MP_OK;
}

}  // namespace
}  // namespace mp

extern "C" int64_t mp_square_norm_workspace(int64_t count, const int64_t* sizes) {
  int64_t chunks = 0;
  for (int64_t t = 0; t < count; t++) chunks += (sizes[t] + mp::kChunk - 1) / mp::kChunk;
  return chunks;
}

extern "C" int32_t mp_square_norm(
    void* stream, int32_t dtype, int64_t count, const void* const* tensors, const int64_t* sizes, double* workspace,
    double* out) {
  if (!mp::sizes_fit(count, sizes)) return MP_BAD_SIZE;
  const std::vector<mp::Chunk> chunks = mp::chunks_of(count, sizes);
  const int64_t n = static_cast<int64_t>(chunks.size());
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
#pragma omp parallel for schedule(static) if (n > 1)
    for (int64_t i = 0; i < n; i++) {
      const auto [t, start, size] = chunks[i];
      workspace[i] = mp::squares(static_cast<const T*>(tensors[t]) + start, size);
    }
    double total = 0.0;
    for (int64_t i = 0; i < n; i++) total += workspace[i];
    *out = total;
    return static_cast<int32_t>(MP_OK);
  });
}

extern "C" int32_t mp_adamw(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, float* const* exp_avg, float* const* exp_avg_sq, const int64_t* sizes, const void* step,
    int32_t step_is_int64, const float* grad_scale, const float* skip, const double* lr, double beta1, double beta2,
    double eps, double weight_decay) {
  if (!mp::sizes_fit(count, sizes)) return MP_BAD_SIZE;
  if (skip != nullptr && !(*skip == 0.0f)) return MP_OK;
  const mp::Factors f = mp::factors_of(step, step_is_int64, grad_scale, lr, beta1, beta2, eps, weight_decay);
  return mp::for_dtype(grad_dtype, [&](auto grad) {
    return mp::for_dtype(weights == nullptr ? static_cast<int32_t>(MP_F32) : weight_dtype, [&](auto weight) {
      return mp::adamw<decltype(weight), decltype(grad)>(
          f, count, weights, masters, grads, exp_avg, exp_avg_sq, sizes);
    });
  });
}

extern "C" int32_t mp_add_gradients(
    void* stream, int32_t grad_dtype, int64_t count, float* const* sums, const void* const* grads,
    const int64_t* sizes) {
  if (!mp::sizes_fit(count, sizes)) return MP_BAD_SIZE;
  return mp::for_dtype(grad_dtype, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t t = 0; t < count; t++) {
      const T* grad = static_cast<const T*>(grads[t]);
      for (int64_t i = 0; i < sizes[t]; i++) sums[t][i] += mp::to_float(grad[i]);
    }
    return static_cast<int32_t>(MP_OK);
  });
}

extern "C" int32_t mp_add_slots(
    void*, int32_t dtype, int64_t count, float* const* sums, const float* const* partial, const int64_t* slots,
    const int64_t* strides, const int64_t* sizes) {
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t t = 0; t < count; t++) {
      for (int64_t c = 0; c < sizes[t]; c++) {
        float sum = 0.0f;
        for (int64_t slot = 0; slot < slots[t]; slot++) sum += partial[t][slot * strides[t] + c];
        sums[t][c] += mp::to_float(mp::from_float<T>(sum));
      }
    }
    return static_cast<int32_t>(MP_OK);
  });
}

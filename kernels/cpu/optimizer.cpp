// Multi-tensor AdamW, squared norm and accumulation; include/optimizer.h says what they compute.
#include "optimizer.h"

#include <algorithm>

#include "common.h"

namespace mp {
namespace {

// Elements that a thread takes at once. What a chunk computes depends on nothing but the chunk.
constexpr int64_t kChunk = 1 << 14;
// Elements that stay in the first cache between the passes over them.
constexpr int64_t kStrip = 512;

struct Chunk {
  int64_t tensor, start, size;
};

std::vector<Chunk> chunks_of(int64_t count, const int64_t* sizes) {
  std::vector<Chunk> out;
  for (int64_t t = 0; t < count; t++) {
    for (int64_t at = 0; at < sizes[t]; at += kChunk) out.push_back({t, at, std::min(kChunk, sizes[t] - at)});
  }
  return out;
}

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

struct Factors {
  float scale, decay, beta1, rest1, beta2, rest2, rate, root, eps;
};

// MEAN_FROM_OLD: which of two forms of the same mean; each is exact at its end, where the other would cancel.
template <bool MEAN_FROM_OLD>
void update_strip(
    const Factors& f, const float* __restrict grad, float* __restrict master, float* __restrict exp_avg,
    float* __restrict exp_avg_sq, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float g = grad[i] * f.scale, old = exp_avg[i];
    const float m = MEAN_FROM_OLD ? old + f.rest1 * (g - old) : g + f.beta1 * (old - g);
    const float v = f.beta2 * exp_avg_sq[i] + f.rest2 * (g * g);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] = f.decay * master[i] - f.rate * (m / (std::sqrt(v) * f.root + f.eps));
  }
}

template <typename W, typename G>
void update(
    const Factors& f, W* weight, float* master, const G* grad, float* exp_avg, float* exp_avg_sq, int64_t n) {
  float buffer[kStrip];
  for (int64_t at = 0; at < n; at += kStrip) {
    const int64_t here = std::min(kStrip, n - at);
    const float* g = row_as_floats(grad + at, buffer, here);
    const auto strip = f.rest1 < 0.5f ? update_strip<true> : update_strip<false>;
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
  const double number = step_is_int64 ? static_cast<double>(*static_cast<const int64_t*>(step))
                                      : static_cast<double>(*static_cast<const float*>(step));
  // 1 - beta^step, accurate also where it is small and where it is nearly 1.
  const double correction1 = -std::expm1(number * std::log(beta1)), correction2 = -std::expm1(number * std::log(beta2));
  const mp::Factors f{
      grad_scale != nullptr ? *grad_scale : 1.0f, static_cast<float>(1.0 - *lr * weight_decay),
      static_cast<float>(beta1), static_cast<float>(1.0 - beta1), static_cast<float>(beta2),
      static_cast<float>(1.0 - beta2), static_cast<float>(*lr / correction1),
      static_cast<float>(1.0 / std::sqrt(correction2)), static_cast<float>(eps)};
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

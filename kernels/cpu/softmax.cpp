// Causal softmax and its gradient; include/softmax.h says what they compute.
#include "softmax.h"

#include <limits>

#include "common.h"
#include "mask_row.h"
#include "sums.h"
#include "vmath.h"

namespace mp {
namespace {

// Partial results of a loop over a row, joined in a fixed order.
constexpr int64_t kLanes = 16;

// The largest of n values; a NaN may be left out (the exponentials keep it).
float largest(const float* v, int64_t n) {
  float most[kLanes];
  for (int64_t j = 0; j < kLanes; j++) most[j] = -std::numeric_limits<float>::infinity();
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    for (int64_t j = 0; j < kLanes; j++) most[j] = v[c + j] > most[j] ? v[c + j] : most[j];
  }
  for (; c < n; c++) most[0] = v[c] > most[0] ? v[c] : most[0];
  for (int64_t j = 1; j < kLanes; j++) most[0] = most[j] > most[0] ? most[j] : most[0];
  return most[0];
}

// Dropout factors of the rows of [batch * heads, queries, cols]; off() where there is no dropout.
struct Mask {
  const mp_probability_mask* mask;
  int64_t queries, cols;
  Keep keep;

  Mask(const mp_probability_mask* mask, int64_t queries, int64_t cols)
      : mask(mask), queries(queries), cols(cols), keep{} {
    if (mask != nullptr) keep = keep_of(mask->op_key, mask->threshold);
  }
  bool off() const { return mask == nullptr; }
  void factors(MaskRow& room, int64_t row, int64_t live, float* factor) const {
    const int64_t matrix = row / queries, head = mask->head_offset + matrix % mask->heads;
    const int64_t start = (head * cols + row % queries + cols - queries) * cols;
    room.factors(keep, mask->keys[matrix / mask->heads], start, live, factor);
  }
};

template <typename T>
int32_t forward(
    int64_t matrices, int64_t queries, int64_t cols, float scale, const T* x, T* y, const Mask& mask, T* dropped) {
#pragma omp parallel if (matrices * queries * cols > kParallelFrom)
  {
    std::vector<float> a(cols), e(cols), out(cols), factor(mask.off() ? 0 : cols);
    MaskRow room(mask.off() ? 0 : cols);
    // Rows differ in length: dealt out in turn.
#pragma omp for schedule(static, 1)
    for (int64_t row = 0; row < matrices * queries; row++) {
      const int64_t live = row % queries + 1 + cols - queries;
      const float* in = row_as_floats(x + row * cols, a.data(), live);
      for (int64_t c = 0; c < live; c++) e[c] = in[c] * scale;
      const float top = largest(e.data(), live);
      float* const exps = e.data();
      const float sum = static_cast<float>(
          sum_in_blocks(live, [=](int64_t c) { return exps[c] = exp_float(exps[c] - top); }));
      const float inverse = 1.0f / sum;
      float* to = row_for_floats(y + row * cols, out.data());
      for (int64_t c = 0; c < live; c++) to[c] = e[c] * inverse;
      put_row(to, y + row * cols, live);
      memset(static_cast<void*>(y + row * cols + live), 0, (cols - live) * sizeof(T));
      if (mask.off()) continue;
      mask.factors(room, row, live, factor.data());
      const float* probs = row_as_floats(y + row * cols, a.data(), live);
      to = row_for_floats(dropped + row * cols, out.data());
      for (int64_t c = 0; c < live; c++) to[c] = probs[c] * factor[c];
      put_row(to, dropped + row * cols, live);
      memset(static_cast<void*>(dropped + row * cols + live), 0, (cols - live) * sizeof(T));
    }
  }
  return MP_OK;
}

template <typename T>
int32_t backward(
    int64_t matrices, int64_t queries, int64_t cols, float scale, const T* dy, const T* y, const Mask& mask, T* dx) {
#pragma omp parallel if (matrices * queries * cols > kParallelFrom)
  {
    std::vector<float> a(cols), b(cols), out(cols), factor(mask.off() ? 0 : cols);
    MaskRow room(mask.off() ? 0 : cols);
#pragma omp for schedule(static, 1)
    for (int64_t row = 0; row < matrices * queries; row++) {
      const int64_t live = row % queries + 1 + cols - queries;
      const float* grads = row_as_floats(dy + row * cols, a.data(), live);
      const float* probs = row_as_floats(y + row * cols, b.data(), live);
      if (!mask.off()) {
        mask.factors(room, row, live, factor.data());
        for (int64_t c = 0; c < live; c++) a[c] = rounded<T>(grads[c] * factor[c]);
        grads = a.data();
      }
      const TwoSums sums =
          two_sums_in_blocks(live, [=](int64_t c) { return TwoTerms{grads[c] * probs[c], probs[c]}; });
      const float mean = static_cast<float>(sums.first / sums.second);
      float* to = row_for_floats(dx + row * cols, out.data());
      for (int64_t c = 0; c < live; c++) to[c] = scale * probs[c] * (grads[c] - mean);
      put_row(to, dx + row * cols, live);
      memset(static_cast<void*>(dx + row * cols + live), 0, (cols - live) * sizeof(T));
    }
  }
  return MP_OK;
}

bool good_sizes(int64_t matrices, int64_t queries, int64_t cols, const mp_probability_mask* mask) {
  return matrices >= 0 && queries >= 1 && cols >= queries &&
         (mask == nullptr || (mask->heads >= 1 && mask->threshold >= 1 && mask->threshold < 65536));
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_softmax_forward(
    void* stream, int32_t dtype, int64_t matrices, int64_t queries, int64_t cols, float scale, const void* x, void* y,
    const mp_probability_mask* mask, void* dropped) {
  if (!mp::good_sizes(matrices, queries, cols, mask)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::forward<T>(
        matrices, queries, cols, scale, static_cast<const T*>(x), static_cast<T*>(y), {mask, queries, cols},
        static_cast<T*>(dropped));
  });
}

extern "C" int32_t mp_softmax_backward(
    void* stream, int32_t dtype, int64_t matrices, int64_t queries, int64_t cols, float scale, const void* dy,
    const void* y, const mp_probability_mask* mask, void* dx) {
  if (!mp::good_sizes(matrices, queries, cols, mask)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::backward<T>(
        matrices, queries, cols, scale, static_cast<const T*>(dy), static_cast<const T*>(y), {mask, queries, cols},
        static_cast<T*>(dx));
  });
}

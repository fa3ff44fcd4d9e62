// Bias, dropout and residual add; include/dropout.h says what they compute.
#include "dropout.h"

#include "common.h"
#include "mask_row.h"
#include "sums.h"

namespace mp {
namespace {

struct Mask {
  const int64_t* keys;
  Keep keep;
  int64_t seq_offset, width, width_offset;

  // Scale or 0 of each element of a row [cols].
  void factors(MaskRow& room, int64_t row, int64_t batch, int64_t cols, float* factor) const {
    room.factors(keep, keys[row % batch], (row / batch + seq_offset) * width + width_offset, cols, factor);
  }
};

template <typename T>
int32_t forward(
    int64_t seq, int64_t batch, int64_t cols, const T* x, const T* bias, const T* residual, const Mask& mask, T* out) {
  std::vector<float> shift(cols, 0.0f);
  if (bias != nullptr) widen(bias, shift.data(), cols);
#pragma omp parallel if (seq * batch * cols > kParallelFrom)
  {
    std::vector<float> a(cols), b(cols, 0.0f), to(cols), factor(cols, 1.0f);
    MaskRow room(cols);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < seq * batch; row++) {
      const float* in = row_as_floats(x + row * cols, a.data(), cols);
      const float* more = residual != nullptr ? row_as_floats(residual + row * cols, b.data(), cols) : b.data();
      float* sum = row_for_floats(out + row * cols, to.data());
      if (mask.keep.threshold != 0) mask.factors(room, row, batch, cols, factor.data());
      for (int64_t c = 0; c < cols; c++) sum[c] = more[c] + factor[c] * (in[c] + shift[c]);
      put_row(sum, out + row * cols, cols);
    }
  }
  return MP_OK;
}

template <typename T>
int32_t backward(
    int64_t seq, int64_t batch, int64_t cols, const T* dout, const Mask& mask, T* dx, T* dbias, float* partial,
    int64_t* kept) {
  const int64_t rows = seq * batch, slots = slots_of(rows);
#pragma omp parallel for schedule(static) if (rows * cols > kParallelFrom)
  for (int64_t slot = 0; slot < slots; slot++) {
    std::vector<float> a(cols), to(cols), factor(cols, 1.0f);
    MaskRow room(cols);
    RowSums sums(dbias != nullptr ? partial + slot * cols : nullptr, dbias != nullptr ? cols : 0);
    for (int64_t row = slot * rows / slots; row < (slot + 1) * rows / slots; row++) {
      const float* in = row_as_floats(dout + row * cols, a.data(), cols);
      if (dx != nullptr) {
        mask.factors(room, row, batch, cols, factor.data());
        float* grad = row_for_floats(dx + row * cols, to.data());
        for (int64_t c = 0; c < cols; c++) grad[c] = factor[c] * in[c];
        put_row(grad, dx + row * cols, cols);
        in = grad;
      }
      if (dbias != nullptr) {
        float* total = sums.next();
        for (int64_t c = 0; c < cols; c++) total[c] += in[c];
      }
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

bool good_sizes(int64_t seq, int64_t batch, int64_t cols, int32_t threshold) {
  return seq >= 0 && batch >= 0 && cols >= 1 && threshold >= 0 && threshold < 65536;
}

}  // namespace
}  // namespace mp

extern "C" int64_t mp_dropout_workspace(int64_t rows, int64_t cols) { return mp::slots_of(rows) * cols; }

extern "C" int32_t mp_dropout_forward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t cols, const void* x, const void* bias,
    const void* residual, const int64_t* keys, int64_t op_key, int32_t threshold, int64_t seq_offset, int64_t width,
    int64_t width_offset, void* out) {
  if (!mp::good_sizes(seq, batch, cols, threshold)) return MP_BAD_SIZE;
  const mp::Mask mask{keys, mp::keep_of(op_key, threshold), seq_offset, width, width_offset};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::forward<T>(
        seq, batch, cols, static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<const T*>(residual), mask,
        static_cast<T*>(out));
  });
}

extern "C" int32_t mp_dropout_backward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t cols, const void* dout, const int64_t* keys,
    int64_t op_key, int32_t threshold, int64_t seq_offset, int64_t width, int64_t width_offset, void* dx, void* dbias,
    float* workspace, int64_t* kept) {
  if (!mp::good_sizes(seq, batch, cols, threshold) || seq * batch == 0) return MP_BAD_SIZE;
  if (threshold == 0 && dbias == nullptr) return MP_OK;
  const mp::Mask mask{keys, mp::keep_of(op_key, threshold), seq_offset, width, width_offset};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::backward<T>(
        seq, batch, cols, static_cast<const T*>(dout), mask, static_cast<T*>(dx), static_cast<T*>(dbias), workspace,
        kept);
  });
}

// Bias, dropout, residual add and the norm that follows; include/residual_norm.h says what they compute.
//
// One after the other: a pass less over memory would save little beside the arithmetic of a CPU.
#include "residual_norm.h"

#include "dropout.h"
#include "norm.h"

extern "C" int32_t mp_residual_norm_forward(
    void* stream, int32_t dtype, int32_t rms, int64_t seq, int64_t batch, int64_t cols, float eps, const void* x,
    const void* x_bias, const void* residual, const int64_t* keys, int64_t op_key, int32_t threshold,
    int64_t seq_offset, const void* weight, const void* bias, void* y, void* sum, float* mean, float* rstd) {
  const int32_t code = mp_dropout_forward(
      stream, dtype, seq, batch, cols, x, x_bias, residual, keys, op_key, threshold, seq_offset, cols, 0, sum);
  if (code != MP_OK) return code;
  return mp_norm_forward(
      stream, dtype, rms, seq * batch, cols, eps, sum, nullptr, weight, bias, y, nullptr, mean, rstd);
}

extern "C" int64_t mp_residual_norm_workspace(int64_t rows, int64_t cols) {
  return mp_norm_workspace(rows, cols) + mp_dropout_workspace(rows, cols);
}

extern "C" int32_t mp_residual_norm_backward(
    void* stream, int32_t dtype, int32_t rms, int64_t seq, int64_t batch, int64_t cols, const void* dy,
    const void* dsum, const void* sum, const void* weight, const float* mean, const float* rstd, const int64_t* keys,
    int64_t op_key, int32_t threshold, int64_t seq_offset, void* dsum_total, void* dx, void* dweight, void* dbias,
    void* dx_bias, float* workspace, int64_t* kept) {
  const int32_t code = mp_norm_backward(
      stream, dtype, rms, seq * batch, cols, dy, dsum, sum, weight, mean, rstd, dsum_total, dweight, dbias, workspace,
      kept);
  if (code != MP_OK) return code;
  // Beside the norm's sums, where those are kept.
  return mp_dropout_backward(
      stream, dtype, seq, batch, cols, dsum_total, keys, op_key, threshold, seq_offset, cols, 0, dx, dx_bias,
      workspace + (dbias == nullptr ? 1 : 2) * cols, kept);
}

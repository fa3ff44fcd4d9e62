/* Bias, dropout and residual add of [seq, batch, cols], and the norm that follows, in one pass each way.
 *
 * sum = residual + mask * scale * (x + x_bias), rounded to dtype; y = norm(sum) * weight (+ bias). The mask is that of
 * dropout.h for rows that are whole (width = cols, width_offset = 0), the norm that of norm.h; the bits of y, sum, mean
 * and rstd are those that the two give one after the other.
 */
#ifndef MP_RESIDUAL_NORM_H
#define MP_RESIDUAL_NORM_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* threshold: 0 (nothing is dropped, keys may be NULL) to 65535. x_bias and bias may be NULL.
 * Moves the least bytes possible, x and residual once in, y and sum once out, up to 16,384 columns in half precision
 * (8,192 in fp32); beyond, or unaligned, it is the two functions one after the other. */
int32_t mp_residual_norm_forward(
    void* stream, int32_t dtype, int32_t rms, int64_t seq, int64_t batch, int64_t cols, float eps, const void* x,
    const void* x_bias, const void* residual, const int64_t* keys, int64_t op_key, int32_t threshold,
    int64_t seq_offset, const void* weight, const void* bias, void* y, void* sum, float* mean, float* rstd);

/* dsum_total = gradient of `sum` through the norm, plus dsum where that is given: the gradient of residual, rounded to
 * dtype. dx = mask * scale * dsum_total (threshold 0: dx is dsum_total, and NULL here). dweight, dbias, dx_bias [cols]
 * in dtype; the last two may be NULL. workspace: mp_residual_norm_workspace floats; kept: see mp.h. In one pass up to 8,192 columns in
 * half precision (4,096 in fp32). */
int32_t mp_residual_norm_backward(
    void* stream, int32_t dtype, int32_t rms, int64_t seq, int64_t batch, int64_t cols, const void* dy,
    const void* dsum, const void* sum, const void* weight, const float* mean, const float* rstd, const int64_t* keys,
    int64_t op_key, int32_t threshold, int64_t seq_offset, void* dsum_total, void* dx, void* dweight, void* dbias,
    void* dx_bias, float* workspace, int64_t* kept);

/* Floats of workspace of mp_residual_norm_backward on the current device; rows = seq * batch. */
int64_t mp_residual_norm_workspace(int64_t rows, int64_t cols);

#ifdef __cplusplus
}
#endif
#endif

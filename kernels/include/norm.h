/* LayerNorm (arXiv 1607.06450) and RMSNorm (arXiv 1910.07467) of the rows of [rows, cols], with the residual add. */
#ifndef MP_NORM_H
#define MP_NORM_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* sum = x + residual, rounded to dtype (residual and sum both NULL: sum is x); y = norm(sum) * weight (+ bias).
 * rms != 0: RMSNorm, no mean (NULL). mean, rstd: [rows] float, kept for the backward pass.
 * Moves the least bytes possible: x, residual once in; y, sum once out. */
int32_t mp_norm_forward(
    void* stream, int32_t dtype, int32_t rms, int64_t rows, int64_t cols, float eps, const void* x,
    const void* residual, const void* weight, const void* bias, void* y, void* sum, float* mean, float* rstd);

/* dx = gradient of `sum` through the norm, plus dsum where that is given: the gradient of x and of residual.
 * dweight, dbias [cols] in dtype (dbias NULL: no bias). workspace: mp_norm_workspace floats. kept: see mp.h. */
int32_t mp_norm_backward(
    void* stream, int32_t dtype, int32_t rms, int64_t rows, int64_t cols, const void* dy, const void* dsum,
    const void* sum, const void* weight, const float* mean, const float* rstd, void* dx, void* dweight, void* dbias,
    float* workspace, int64_t* kept);

/* Floats of workspace of mp_norm_backward on the current device. */
int64_t mp_norm_workspace(int64_t rows, int64_t cols);

#ifdef __cplusplus
}
#endif
#endif

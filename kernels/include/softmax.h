/* Causal softmax of attention scores [matrices, queries, cols], cols >= queries: row i sees the columns up to
 * i + cols - queries, the others get 0 and are never read. */
#ifndef MP_SOFTMAX_H
#define MP_SOFTMAX_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* y = softmax(scale * x) of the live part of each row, zeros beyond. */
int32_t mp_softmax_forward(
    void* stream, int32_t dtype, int64_t matrices, int64_t queries, int64_t cols, float scale, const void* x, void* y);

/* dx = scale * y * (dy - sum(dy * y) / sum(y)), zeros beyond. sum(y) is 1 but for the rounding of y to dtype; dividing
 * by it keeps the gradient of a row that is nearly one-hot, where the difference is as small as that rounding. */
int32_t mp_softmax_backward(
    void* stream, int32_t dtype, int64_t matrices, int64_t queries, int64_t cols, float scale, const void* dy,
    const void* y, void* dx);

#ifdef __cplusplus
}
#endif
#endif

/* Causal softmax of attention scores [matrices, queries, cols], cols >= queries: row i sees the columns up to
 * i + cols - queries, the others get 0 and are never read. With a mask, dropout of the probabilities: matrices are then
 * batch * heads, and cols are the keys. */
#ifndef MP_SOFTMAX_H
#define MP_SOFTMAX_H
#include "mask.h"
#ifdef __cplusplus
extern "C" {
#endif

/* y = softmax(scale * x) of the live part of each row, zeros beyond. With a mask also dropped = mask * scale of the mask
 * * y, from the rounded y (mask and dropped both NULL: no dropout). */
int32_t mp_softmax_forward(
    void* stream, int32_t dtype, int64_t matrices, int64_t queries, int64_t cols, float scale, const void* x, void* y,
    const struct mp_probability_mask* mask, void* dropped);

/* dx = scale * y * (dy - sum(dy * y) / sum(y)), zeros beyond. sum(y) is 1 but for the rounding of y to dtype; dividing
 * by it keeps the gradient of a row that is nearly one-hot, where the difference is as small as that rounding. With a
 * mask dy is that of dropped; the product with the mask and its scale is rounded to dtype. */
int32_t mp_softmax_backward(
    void* stream, int32_t dtype, int64_t matrices, int64_t queries, int64_t cols, float scale, const void* dy,
    const void* y, const struct mp_probability_mask* mask, void* dx);

#ifdef __cplusplus
}
#endif
#endif

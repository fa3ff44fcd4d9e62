/* Rows of tokens at the places of their experts: copied there, summed back, and the gradients of the sum.
 *
 * Rows have `cols` elements of dtype. place [tokens, k] names the rows of each token, -1 one that was dropped, which
 * counts for nothing. No row is read or written that no index names; `named` rows may be, and debug builds alone stop at
 * an index of others. No atomics: the bits do not depend on the number of threads or blocks.
 */
#ifndef MP_EXPERT_ROWS_H
#define MP_EXPERT_ROWS_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* out [rows, cols], out[r] = x[source[r]]. Each row is read and written once. */
int32_t mp_gather_rows(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, const void* x, const int64_t* source, void* out,
    int64_t named);

/* out [tokens, cols], out[t] = the sum over j of weight[t, j] * y[place[t, j]]: products and sums are rounded to float
 * one by one, in the order of j from +0 on, and the sum once to dtype. weight NULL: 1 each. k: 1 to MP_MOST_CHOICES.
 * (k + 1) * tokens rows are moved. */
int32_t mp_sum_rows(
    void* stream, int32_t dtype, int64_t tokens, int64_t cols, int64_t k, const void* y, const int64_t* place,
    const float* weight, void* out, int64_t named);

/* dy [rows, cols], dy[place[t, j]] = weight[t, j] * grad[t]: whole where place names each row once. dweight
 * [tokens, k] = the inner product of grad[t] and y[place[t, j]], in float; 0 where place is -1. Moves (2 k + 1) * tokens
 * rows; where k is above 8, grad once for each 8. */
int32_t mp_sum_rows_backward(
    void* stream, int32_t dtype, int64_t tokens, int64_t cols, int64_t k, const void* grad, const void* y,
    const int64_t* place, const float* weight, void* dy, float* dweight, int64_t named);

#define MP_MOST_CHOICES 32

#ifdef __cplusplus
}
#endif
#endif

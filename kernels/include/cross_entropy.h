/* Cross-entropy over a split vocabulary: a rank's statistics of its logits [rows, cols], and the gradient over them.
 *
 * Columns [0, extent) are live, this rank's part of the vocabulary from id `offset` on; the rest is padding.
 */
#ifndef MP_CROSS_ENTROPY_H
#define MP_CROSS_ENTROPY_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Of each row: maximum, total = sum of exp(x - maximum), and target = x[label - offset], 0 where that column is not
 * live. Without a live column above -infinity: maximum -infinity and total 0. maximum passes over a NaN, which makes
 * total NaN; so does +infinity. Reads the logits once. */
int32_t mp_cross_entropy_statistics(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, int64_t offset, int64_t extent, const void* logits,
    const int64_t* labels, float* maximum, float* total, float* target);

/* logits = (exp(logits - maximum) / total - onehot(label - offset)) * grad, 0 in the padding; maximum and total are
 * those of the whole vocabulary, grad [rows] that of the losses. Reads and writes the logits once. */
int32_t mp_cross_entropy_gradient(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, int64_t offset, int64_t extent, void* logits,
    const int64_t* labels, const float* maximum, const float* total, const float* grad);

#ifdef __cplusplus
}
#endif
#endif

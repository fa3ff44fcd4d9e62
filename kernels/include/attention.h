/* Causal attention with grouped queries, fused: scores and probabilities are never stored whole. CPU libraries only:
 * on a GPU torch brings kernels of this kind.
 *
 * q, dq, out and dout [seq, batch, groups, per_group, d]; k, v, dk and dv [keys, batch, groups, d]. The last dimension
 * is contiguous; `strides` are those of the others, in elements: four of q and dq, three of k, v, dk and dv. causal:
 * row i sees the keys up to i, and seq = keys. rows [batch, groups, per_group, 2, seq]: the largest of a row's scores,
 * and the inverse of the sum of e^(score - largest). Their one logarithm would be rounded where scores are large, and
 * the probabilities of the backward pass with it. mask: dropout of the probabilities, causal attention only; NULL: none.
 * Its heads are groups * per_group, in that order.
 */
#ifndef MP_ATTENTION_H
#define MP_ATTENTION_H
#include "mask.h"
#ifdef __cplusplus
extern "C" {
#endif

struct mp_attention_shape {
  int64_t seq, keys, batch, groups, per_group, d;
  int32_t causal;
  float scale;
};

/* out, contiguous, and rows. */
int32_t mp_attention_forward(
    void* stream, int32_t dtype, const struct mp_attention_shape* shape, const void* q, const int64_t* q_strides,
    const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides,
    const struct mp_probability_mask* mask, void* out, float* rows);

/* dq, dk and dv from contiguous dout and out. */
int32_t mp_attention_backward(
    void* stream, int32_t dtype, const struct mp_attention_shape* shape, const void* dout, const void* q,
    const int64_t* q_strides, const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides,
    const void* out, const float* rows, const struct mp_probability_mask* mask, void* dq, const int64_t* dq_strides,
    void* dk, const int64_t* dk_strides, void* dv, const int64_t* dv_strides);

#ifdef __cplusplus
}
#endif
#endif

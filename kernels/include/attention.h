/* Causal attention with grouped queries, fused: scores and probabilities are never stored whole, and products leave out
 * what no query of a tile sees.
 *
 * q, dq, out and dout [seq, batch, groups, per_group, d]; k, v, dk and dv [keys, batch, groups, d]. The last dimension
 * is contiguous; `strides` are those of the others, in elements: four of q and dq, three of k, v, dk and dv. causal:
 * row i sees the keys up to i, and seq = keys. rows [batch, groups, per_group, 2, seq]: the largest of a row's scores,
 * and the inverse of the sum of e^(score - largest). Their one logarithm would be rounded where scores are large, and
 * the probabilities of the backward pass with it. dropout: of the probabilities, causal attention only; NULL: none. Its
 * heads are groups * per_group, in that order; keys are then all positions of the sequence, and query i is at end[i] - 1
 * where the mask has `end`. mask: NULL: what `causal` says.
 *
 * A CPU takes every dtype and head size, a GPU (CUDA from sm_80 on, CDNA2) halves, head sizes of up to 128 that are
 * multiples of 8, tensors of 16-byte pieces (strides multiples of 8 elements), masks without sinks and soft-cap, and a
 * positive scale. A GPU's `rows` have the largest score in units of the logarithm of 2: they are for its own backward
 * pass.
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

/* What a query sees, and what happens to its scores; causal attention only. Query i of a sample sees the key rows
 * low <= j < high, with high = end[i], at most `keys` (end NULL: i + 1, and seq = keys), and low the larger of first[i]
 * and end[i] - window. A query that sees nothing has zeros. `rows` then has the largest of capped scores and sink.
 */
struct mp_attention_mask {
  const int32_t* first; /* [batch, seq]; NULL: 0 */
  const int32_t* end;   /* [seq]; NULL: see above */
  const float* sinks;   /* [groups * per_group]: a score without a key and a value; NULL: none */
  int64_t window;       /* 0: none */
  float softcap;        /* softcap * tanh(score / softcap) in place of a score; 0: none */
};

/* out, contiguous, and rows. */
int32_t mp_attention_forward(
    void* stream, int32_t dtype, const struct mp_attention_shape* shape, const void* q, const int64_t* q_strides,
    const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides,
    const struct mp_probability_mask* dropout, const struct mp_attention_mask* mask, void* out, float* rows);

/* dq, dk and dv from contiguous dout and out; dsinks [batch, groups * per_group], of each sample, where mask has sinks.
 * along [batch, groups * per_group, seq]: room for a GPU's own use, dout . out of each query; a CPU needs none. */
int32_t mp_attention_backward(
    void* stream, int32_t dtype, const struct mp_attention_shape* shape, const void* dout, const void* q,
    const int64_t* q_strides, const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides,
    const void* out, const float* rows, const struct mp_probability_mask* dropout, const struct mp_attention_mask* mask,
    void* dq, const int64_t* dq_strides, void* dk, const int64_t* dk_strides, void* dv, const int64_t* dv_strides,
    float* dsinks, float* along);

#ifdef __cplusplus
}
#endif
#endif

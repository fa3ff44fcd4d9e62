/* Bias, dropout and residual add of [seq, batch, cols], with a mask made of counters.
 *
 * Element (s, b, c) stands at position (s + seq_offset) * width + width_offset + c of its sample. One hash serves four
 * neighbours: random_bits(position >> 2, keys[b], op_key); position & 3 says which 16 bits of it, from the low end.
 * Dropped where those are < threshold; the others are scaled by 65536 / (65536 - threshold), so the expectation is
 * exact. threshold: 0 (nothing is dropped, keys may be NULL) to 65535.
 */
#ifndef MP_DROPOUT_H
#define MP_DROPOUT_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* out = residual + mask * scale * (x + bias); bias [cols] and residual may be NULL. keys: [batch]. */
int32_t mp_dropout_forward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t cols, const void* x, const void* bias,
    const void* residual, const int64_t* keys, int64_t op_key, int32_t threshold, int64_t seq_offset, int64_t width,
    int64_t width_offset, void* out);

/* dx = mask * scale * dout (threshold 0: dx is dout, and NULL here), dbias [cols] its column sums (NULL: no bias;
 * then workspace may be NULL too). workspace: mp_dropout_workspace floats; kept: see mp.h. */
int32_t mp_dropout_backward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t cols, const void* dout, const int64_t* keys,
    int64_t op_key, int32_t threshold, int64_t seq_offset, int64_t width, int64_t width_offset, void* dx, void* dbias,
    float* workspace, int64_t* kept);

/* Floats of workspace of mp_dropout_backward on the current device; rows = seq * batch. */
int64_t mp_dropout_workspace(int64_t rows, int64_t cols);

#ifdef __cplusplus
}
#endif
#endif

/* Split of the fused query-key-value projection, with rotary position embedding (arXiv 2104.09864). */
#ifndef MP_ROTARY_H
#define MP_ROTARY_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* qkv [seq, batch, groups, per_group + 2, size], a group's rows its query heads, key, value; to
 * q [seq, batch, groups * per_group, size], k and v [seq, batch, groups, size]. Queries and keys of position s are
 * rotated by row s of cos, sin [seq, size / 2] float: element i pairs with i + size / 2. Both NULL: split only.
 * size: even, at most 512; batch * groups * (per_group + 2): at most 2^24. */
int32_t mp_rotary_forward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size,
    const void* qkv, const float* cos, const float* sin, void* q, void* k, void* v);

/* dqkv from dq, dk, dv, rotated back. Their last dimension is contiguous; the other strides, in elements, are
 * strides[9]: seq, batch, head of dq, of dk, of dv (read before the call returns). */
int32_t mp_rotary_backward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size,
    const void* dq, const void* dk, const void* dv, const int64_t* strides, const float* cos, const float* sin,
    void* dqkv);

/* The same without rotation, and dbias [groups * (per_group + 2) * size], the sums of dqkv over seq and batch, both at
 * least 1. workspace: mp_split_workspace floats for rows = seq * batch and cols the elements of dbias; kept: see mp.h. */
int64_t mp_split_workspace(int64_t rows, int64_t cols);
int32_t mp_split_backward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size,
    const void* dq, const void* dk, const void* dv, const int64_t* strides, void* dqkv, void* dbias, float* workspace,
    int64_t* kept);

#ifdef __cplusplus
}
#endif
#endif

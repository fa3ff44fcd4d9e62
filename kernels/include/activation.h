/* GELU (arXiv 1606.08415) of x + bias, and SwiGLU (arXiv 2002.05202) on the packed projection. */
#ifndef MP_ACTIVATION_H
#define MP_ACTIVATION_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* y = gelu(x + bias) for x, y [rows, cols], bias [cols] (NULL: none). approximate != 0: the tanh form, else erf. */
int32_t mp_bias_gelu_forward(
    void* stream, int32_t dtype, int32_t approximate, int64_t rows, int64_t cols, const void* x, const void* bias,
    void* y);

/* dx = dy * gelu'(x + bias), dbias [cols] in dtype = the sum of dx over rows, before dx is rounded (NULL: not wanted;
 * then no workspace either). workspace: mp_bias_gelu_workspace floats; kept: see mp.h. */
int32_t mp_bias_gelu_backward(
    void* stream, int32_t dtype, int32_t approximate, int64_t rows, int64_t cols, const void* dy, const void* x,
    const void* bias, void* dx, void* dbias, float* workspace,
    int64_t* kept);

/* Floats of workspace of mp_bias_gelu_backward on the current device, whatever its dtype and pointers. */
int64_t mp_bias_gelu_workspace(int64_t rows, int64_t cols);

/* y [rows, cols] = silu(gate) * up for x [rows, 2 cols], whose rows are gate, then up. */
int32_t mp_swiglu_forward(void* stream, int32_t dtype, int64_t rows, int64_t cols, const void* x, void* y);

/* dx [rows, 2 cols] from dy [rows, cols] and x. */
int32_t mp_swiglu_backward(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, const void* dy, const void* x, void* dx);

#ifdef __cplusplus
}
#endif
#endif

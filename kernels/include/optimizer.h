/* AdamW (arXiv 1711.05101), the squared norm and the accumulation of many tensors at once. Arrays of pointers and sizes
 * lie on the host and are read before the functions return; what the pointers name, `step`, `lr`, `grad_scale` and
 * `skip` lie on the device, so that a recorded launch (a CUDA graph) takes those of its own step.
 */
#ifndef MP_OPTIMIZER_H
#define MP_OPTIMIZER_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* out[0] = sum of squares of all elements of `count` tensors of a dtype, infinity and NaN included. Squares are added
 * in float over at most 32 elements, then in double, in an order that only the sizes (and the device) decide.
 * An element beyond 1.8e19 counts as infinite. workspace: mp_square_norm_workspace doubles. Reads each element once. */
int32_t mp_square_norm(
    void* stream, int32_t dtype, int64_t count, const void* const* tensors, const int64_t* sizes, double* workspace,
    double* out);

/* Doubles of workspace of mp_square_norm on the current device. */
int64_t mp_square_norm_workspace(int64_t count, const int64_t* sizes);

/* Update number `step` (from 1; float, or int64_t where step_is_int64) of `count` tensors, with g = grad * grad_scale:
 *   master *= 1 - lr weight_decay
 *   exp_avg += (1 - beta1) (g - exp_avg);  exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g^2
 *   master -= lr / (1 - beta1^step) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)
 *   weight = master, rounded to weight_dtype
 * weights NULL: there are none, the masters are the weights. grad_scale NULL: 1. Where skip is given and not 0 (a NaN
 * is not 0) nothing is written. Reads master, exp_avg, exp_avg_sq, grad and writes the first three and weight, each
 * once: 28 bytes an element with float gradients and no weights, 30 with half weights, 28 with both half. */
int32_t mp_adamw(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, float* const* exp_avg, float* const* exp_avg_sq, const int64_t* sizes, const void* step,
    int32_t step_is_int64, const float* grad_scale, const float* skip, const double* lr, double beta1, double beta2,
    double eps, double weight_decay);

/* sums[i] += grads[i] for `count` tensors, grads of a dtype. Reads both and writes the sum, each once. */
int32_t mp_add_gradients(
    void* stream, int32_t grad_dtype, int64_t count, float* const* sums, const void* const* grads,
    const int64_t* sizes);

/* sums[i][c] += sum of partial[i][slot * strides[i] + c] over slots[i] slots, rounded to dtype, for c below sizes[i] and
 * `count` tensors: to the bit what the gradient would have added that the slots were kept of (mp.h). Reads the slots and
 * the sum and writes the sum, each once, in one launch for up to 64 tensors. */
int32_t mp_add_slots(
    void* stream, int32_t dtype, int64_t count, float* const* sums, const float* const* partial, const int64_t* slots,
    const int64_t* strides, const int64_t* sizes);

#ifdef __cplusplus
}
#endif
#endif

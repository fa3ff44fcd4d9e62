/* AdamW (include/optimizer.h) with moments in bf16 or in 8 bits, and Lion. Arrays lie on the host, what their pointers
 * name, `step`, `lr`, `grad_scale` and `skip` on the device, as there. Moments are computed in float from what is stored;
 * the master's update takes them as computed, and what is stored is then rounded from them.
 */
#ifndef MP_NARROW_ADAMW_H
#define MP_NARROW_ADAMW_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Which elements of the whole, unsplit tensor a range has: element j is element e of this rank's part, e = start + j, and
 * of the whole tensor number e / run * stride + e % run + first. key: of the tensor's random numbers. */
typedef struct {
  int64_t start, run, stride, first, key;
} mp_place;

/* Moments bf16, rounded stochastically: up with the probability of the distance to the lower neighbour. Of the 64 bits of
 * random_bits(number of the element, key, step), include/counter.h, the lowest 16 are exp_avg's and the next exp_avg_sq's.
 * 20 bytes an element with float gradients and no weights, 22 with half weights. */
int32_t mp_adamw_bf16(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, uint16_t* const* exp_avg, uint16_t* const* exp_avg_sq, const int64_t* sizes,
    const mp_place* places, const void* step, int32_t step_is_int64, const float* grad_scale, const float* skip,
    const double* lr, double beta1, double beta2, double eps, double weight_decay);

/* Elements that share a scale. */
#define MP_STATE_BLOCK 128

/* Moments as codes of a byte: values[code] * scale, with a scale for each MP_STATE_BLOCK elements: the largest absolute
 * value, at least 1e-12. signed_values, unsigned_values: 256 floats each, ascending, of exp_avg and of exp_avg_sq. Of the
 * two values around value / scale the nearer one is taken, the upper one at the middle. Sizes are multiples of
 * MP_STATE_BLOCK. 16.1 bytes an element with float gradients and no weights, 18.1 with half weights. */
int32_t mp_adamw_8bit(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, uint8_t* const* exp_avg, float* const* exp_avg_scale, uint8_t* const* exp_avg_sq,
    float* const* exp_avg_sq_scale, const int64_t* sizes, const float* signed_values, const float* unsigned_values,
    const void* step, int32_t step_is_int64, const float* grad_scale, const float* skip, const double* lr, double beta1,
    double beta2, double eps, double weight_decay);

/* Lion (arXiv 2302.06675), with g = grad * grad_scale:
 *   master = (1 - lr weight_decay) master - lr sign(beta1 exp_avg + (1 - beta1) g)
 *   exp_avg = beta2 exp_avg + (1 - beta2) g
 * 20 bytes an element with float gradients and no weights, 22 with half weights. */
int32_t mp_lion(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, float* const* exp_avg, const int64_t* sizes, const float* grad_scale, const float* skip,
    const double* lr, double beta1, double beta2, double weight_decay);

#ifdef __cplusplus
}
#endif
#endif

/* Matrices [rows, cols] in 8 bits with scales (arXiv 2209.05433).
 *
 * Of a tensor, a row or a column: scale = the largest power of two that leaves |x| * scale within the format, where
 * less than 2^-100 counts as 2^-100; 0 where an element is infinite, infinity where one is NaN. values = x * scale,
 * rounded to nearest even; what is beyond the format's range becomes infinity in e5m2, the largest number in e4m3fn (as
 * torch 2.13 has it; 2.11 makes it NaN) and NaN in the others. Only a known scale and an infinite one get there. Of a
 * NaN's sign nothing is said. inverse = 1 / scale, float. dtype: MP_F32 or MP_BF16.
 */
#ifndef MP_QUANTISE_H
#define MP_QUANTISE_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Of OCP's (NVIDIA, gfx950, CPUs) and of gfx942, whose have neither infinities nor a negative zero. */
enum mp_fp8_format { MP_E4M3FN = 0, MP_E5M2 = 1, MP_E4M3FNUZ = 2, MP_E5M2FNUZ = 3 };

/* One scale for the tensor. values [rows, cols] and transposed [cols, rows]: one of them may be NULL.
 * known NULL: inverse [1] is written, workspace has mp_fp8_tensor_workspace floats, and x is read twice: 5 bytes an
 * element of bf16 for one of the two, 6 for both. known [1]: 1 / scale, where it is known already; then inverse and
 * workspace may be NULL, and x is read once: 3 or 4 bytes. */
int32_t mp_fp8_tensor(
    void* stream, int32_t dtype, int32_t format, int64_t rows, int64_t cols, const void* x, const float* known,
    void* values, void* transposed, float* inverse, float* workspace);

/* Floats of workspace of mp_fp8_tensor on the current device. */
int64_t mp_fp8_tensor_workspace(int64_t rows, int64_t cols);

/* A scale for each row: values [rows, cols], inverse [rows]. Reads x once, 3 bytes an element of bf16 (twice, from
 * cache if a row fits one, where rows are wider than 16384 elements, not aligned, or float). */
int32_t mp_fp8_rows(
    void* stream, int32_t dtype, int32_t format, int64_t rows, int64_t cols, const void* x, void* values,
    float* inverse);

/* A scale for each column: transposed [cols, rows], inverse [cols]. Reads x twice, 5 bytes an element of bf16.
 * workspace: mp_fp8_columns_workspace floats. */
int32_t mp_fp8_columns(
    void* stream, int32_t dtype, int32_t format, int64_t rows, int64_t cols, const void* x, void* transposed,
    float* inverse, float* workspace);

/* Floats of workspace of mp_fp8_columns on the current device. */
int64_t mp_fp8_columns_workspace(int64_t rows, int64_t cols);

#ifdef __cplusplus
}
#endif
#endif

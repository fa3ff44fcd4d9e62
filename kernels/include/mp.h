/* The C ABI of the kernel libraries: libmp_cpu, libmp_cuda, libmp_rocm, and the emulated ones of the tests.
 *
 * Raw pointers, sizes, a dtype code and a stream; no type of torch, CUDA or HIP. Tensors are contiguous and row-major.
 * A function only enqueues work on the stream (NULL on a CPU, where it returns when the work is done) and allocates
 * nothing; a workspace comes from the caller. It returns 0, a negative code of below, or the runtime's own error code.
 * Where a function that sums a parameter's gradient over rows is given `kept`, it may leave the last sum to
 * mp_add_slots: *kept is then the number of slots at the start of the workspace, [slots, gradients, cols] in the order of
 * the function's arguments, and those gradients are not written. Else they are, and *kept stays as it was.
 * Statistics, sums and the arithmetic inside a kernel are float; `dtype` is that of the tensors given as void*.
 */
#ifndef MP_H
#define MP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MP_ABI 10

enum mp_dtype { MP_F32 = 0, MP_F16 = 1, MP_BF16 = 2 };
enum mp_code { MP_OK = 0, MP_BAD_DTYPE = -1, MP_BAD_SIZE = -2 };

/* MP_ABI of the library. */
int32_t mp_abi(void);
/* What the library was built for: "cpu x86-64-v3", "sm_80 sm_90", "gfx90a", "emulated 64". */
const char* mp_target(void);
/* Text of a code that a function returned. */
const char* mp_error(int32_t code);

#ifdef __cplusplus
}
#endif
#endif

/* Functions that libmp_binding.so exports for matrix products by cublasLt or hipBLASLt; Python calls them by ctypes. */
#ifndef MP_PRODUCTS_H
#define MP_PRODUCTS_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* What follows a product. `vector` is [columns of the result], `aux` has the result's shape and dtype. */
enum mp_epilogue {
  MP_PLAIN = 0,
  MP_BIAS = 1,          /* vector is added to each row */
  MP_GELU_AUX_BIAS = 2, /* the same; the sum is kept in aux, and GeLU of it (tanh form) is the result */
  MP_DGELU = 3,         /* times the derivative of that GeLU at aux */
  MP_DGELU_BGRAD = 4,   /* the same; its sum over rows is written to vector */
  MP_EPILOGUES = 5
};

/* Most algorithms that a product is asked for, and bytes that one may use beside its operands. */
#define MP_CANDIDATES 8
#define MP_WORKSPACE (32 << 20)

/* Opens the library for tensors of a CPU (side 0: a stand-in of tests) or a GPU (1), by a path or, where it is NULL, by
 * the names of what this process has loaded. NULL, or what is wrong (valid until the next call). */
const char* megatron_port_lt_open(const char* path, int32_t side);
/* Closes it. Its plans and handles are left to the process. */
void megatron_port_lt_close(int32_t side);
/* Its name, "cublasLt" or "hipblasLt"; NULL where none is open. */
const char* megatron_port_lt_name(int32_t side);
/* Its version as it states it; 0 where none is open. */
int64_t megatron_port_lt_version(int32_t side);
/* Times that it was asked for algorithms since it was opened. */
int64_t megatron_port_lt_asked(int32_t side);

#ifdef __cplusplus
}
#endif
#endif

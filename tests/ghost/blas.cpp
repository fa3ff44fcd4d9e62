// cuBLAS and cuBLASLt that compute nothing: products are logged with their sizes.
#include <cstddef>
#include <cstring>

#include "events.h"

// Declared here and not by cublas_v2.h: the ABI is all that is needed, and enumerations pass as int.
extern "C" {

int cublasCreate_v2(void** handle) {
  *handle = ghost_handle();
  return 0;
}
int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
size_t cublasLtGetVersion() { return 130100; }
int cublasLtMatmulDescCreate(void** out, int, int) {
  *out = ghost_handle();
  return 0;
}
int cublasLtMatmulPreferenceCreate(void** out) {
  *out = ghost_handle();
  return 0;
}
int cublasLtMatrixLayoutCreate(void** out, int, unsigned long, unsigned long, long) {
  *out = ghost_handle();
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* count) {
  memset(results, 0, 96);  // of one cublasLtMatmulHeuristicResult_t: a status of success, no workspace
  *count = 1;
  return 0;
}
int cublasLtMatmul(void*, void*, const void*, const void*, const void*, const void*, const void*, const void*,
                   const void*, const void*, void*, const void*, const void*, void*, size_t, void* stream) {
  ghost_event("product", stream, "Lt");
  return 0;
}
int cublasGemmEx(void*, int, int, int m, int n, int k, const void*, const void*, int type, int, const void*, int, int,
                 const void*, void*, int, int, int, int) {
  ghost_event("product", nullptr, "GemmEx %d %d %d type %d", m, n, k, type);
  return 0;
}
int cublasGemmStridedBatchedEx(void*, int, int, int m, int n, int k, ...) {
  ghost_event("product", nullptr, "GemmStridedBatchedEx %d %d %d", m, n, k);
  return 0;
}
int cublasSgemm_v2(void*, int, int, int m, int n, int k, ...) {
  ghost_event("product", nullptr, "Sgemm %d %d %d", m, n, k);
  return 0;
}

}  // extern "C"

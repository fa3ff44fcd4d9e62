// cuBLAS and cuBLASLt that compute nothing: products are logged with their sizes.
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "events.h"

// Declared here and not by cublas_v2.h: the ABI is all that is needed, and enumerations pass as int.
namespace {

std::mutex guard;
std::map<void*, void*> streams;

void* stream_of(void* handle) {
  std::lock_guard<std::mutex> hold(guard);
  const auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second;
}

std::string product_memory(const void* a, const void* b, const void* added, void* out) {
  return GhostMemory().reads(a).reads(b).reads(added).writes(out).text();
}

}  // namespace

extern "C" {

int cublasCreate_v2(void** handle) {
  *handle = ghost_handle();
  return 0;
}
int cublasSetStream_v2(void* handle, void* stream) {
  std::lock_guard<std::mutex> hold(guard);
  streams[handle] = stream;
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
int cublasLtMatmul(void*, void*, const void*, const void* a, const void*, const void* b, const void*, const void*,
                   const void* c, const void*, void* d, const void*, const void*, void*, size_t, void* stream) {
  ghost_touch("product", stream, product_memory(a, b, c, d), "Lt");
  return 0;
}
int cublasGemmEx(void* handle, int, int, int m, int n, int k, const void*, const void* a, int type, int, const void* b,
                 int, int, const void*, void* c, int, int, int, int) {
  ghost_touch("product", stream_of(handle), product_memory(a, b, nullptr, c), "GemmEx %d %d %d type %d", m, n, k, type);
  return 0;
}
int cublasGemmStridedBatchedEx(void* handle, int, int, int m, int n, int k, const void*, const void* a, int, int, long,
                               const void* b, int, int, long, const void*, void* c, ...) {
  ghost_touch("product", stream_of(handle), product_memory(a, b, nullptr, c), "GemmStridedBatchedEx %d %d %d", m, n, k);
  return 0;
}
int cublasSgemm_v2(void* handle, int, int, int m, int n, int k, const float*, const float* a, int, const float* b, int,
                   const float*, float* c, int) {
  ghost_touch("product", stream_of(handle), product_memory(a, b, nullptr, c), "Sgemm %d %d %d", m, n, k);
  return 0;
}

}  // extern "C"

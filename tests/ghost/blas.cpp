// cuBLAS: products are logged with their sizes and computed where the machine computes (products.cpp). Only what torch
// calls for a training step is here; cublaslt.cpp has the rest of it.
#include <map>
#include <mutex>

#include "events.h"
#include "graphs.h"
#include "products.h"

// Declared here and not by cublas_v2.h: the ABI is all that is needed, and enumerations pass as int.
namespace {

std::mutex guard;
std::map<void*, void*> streams;

void* stream_of(void* handle) {
  std::lock_guard<std::mutex> hold(guard);
  const auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second;
}

// compute: of cublasComputeType_t; 64 to 65 are fp16, 70 to 73 fp64 and integers, all others sum in fp32.
double scalar(const void* at, int compute) {
  if (compute == 70 || compute == 71) return *static_cast<const double*>(at);
  if (compute >= 64 && compute <= 65) return static_cast<double>(*static_cast<const _Float16*>(at));
  return *static_cast<const float*>(at);
}

struct Sides {
  const void* a;
  int type_a, lead_a;
  long stride_a;
  const void* b;
  int type_b, lead_b;
  long stride_b;
  void* c;
  int type_c, lead_c;
  long stride_c;
};

int product(const char* name, void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
            const void* beta, const Sides& s, int matrices, int compute) {
  void* stream = stream_of(handle);
  const GhostMemory memory = GhostMemory().reads(s.a).reads(s.b).writes(s.c);
  ghost_touch("product", stream, memory.text(), "%s %d %d %d x %d types %d %d %d", name, m, n, k, matrices, s.type_a,
              s.type_b, s.type_c);
  if (!ghost_computes()) return 0;
  const Number a = static_cast<Number>(s.type_a), b = static_cast<Number>(s.type_b), c = static_cast<Number>(s.type_c);
  const Product made{m, n, k, matrices, scalar(alpha, compute), scalar(beta, compute),
                     {s.a, a, transpose_a != 0, s.lead_a, s.stride_a}, {s.b, b, transpose_b != 0, s.lead_b, s.stride_b},
                     {s.c, c, false, s.lead_c, s.stride_c}, s.c, c, s.lead_c, s.stride_c, nullptr, c};
  ghost_do(stream, [made] { multiply(made); });
  return 0;
}

constexpr int in_f32 = 68, in_f64 = 70;
constexpr int f32 = static_cast<int>(Number::f32), f64 = static_cast<int>(Number::f64);

}  // namespace

extern "C" {

int cublasCreate_v2(void** handle) {
  *handle = ghost_handle();
  return 0;
}
int cublasDestroy_v2(void*) { return 0; }
int cublasSetStream_v2(void* handle, void* stream) {
  std::lock_guard<std::mutex> hold(guard);
  streams[handle] = stream;
  return 0;
}
int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
int cublasSetMathMode(void*, int) { return 0; }
int cublasSetSmCountTarget(void*, int) { return 0; }
int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
int cublasSetPointerMode_v2(void*, int) { return 0; }  // only dot products are asked for on the device
int cublasGemmEx(void* handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int type_a,
                 int lead_a, const void* b, int type_b, int lead_b, const void* beta, void* c, int type_c, int lead_c,
                 int compute, int) {
  return product("GemmEx", handle, ta, tb, m, n, k, alpha, beta,
                 {a, type_a, lead_a, 0, b, type_b, lead_b, 0, c, type_c, lead_c, 0}, 1, compute);
}
int cublasGemmStridedBatchedEx(void* handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a,
                               int type_a, int lead_a, long stride_a, const void* b, int type_b, int lead_b,
                               long stride_b, const void* beta, void* c, int type_c, int lead_c, long stride_c,
                               int matrices, int compute, int) {
  return product("GemmStridedBatchedEx", handle, ta, tb, m, n, k, alpha, beta,
                 {a, type_a, lead_a, stride_a, b, type_b, lead_b, stride_b, c, type_c, lead_c, stride_c}, matrices,
                 compute);
}
int cublasSgemm_v2(void* handle, int ta, int tb, int m, int n, int k, const float* alpha, const float* a, int lead_a,
                   const float* b, int lead_b, const float* beta, float* c, int lead_c) {
  return product("Sgemm", handle, ta, tb, m, n, k, alpha, beta,
                 {a, f32, lead_a, 0, b, f32, lead_b, 0, c, f32, lead_c, 0}, 1, in_f32);
}
int cublasDgemm_v2(void* handle, int ta, int tb, int m, int n, int k, const double* alpha, const double* a, int lead_a,
                   const double* b, int lead_b, const double* beta, double* c, int lead_c) {
  return product("Dgemm", handle, ta, tb, m, n, k, alpha, beta,
                 {a, f64, lead_a, 0, b, f64, lead_b, 0, c, f64, lead_c, 0}, 1, in_f64);
}
int cublasSgemmStridedBatched(void* handle, int ta, int tb, int m, int n, int k, const float* alpha, const float* a,
                              int lead_a, long stride_a, const float* b, int lead_b, long stride_b, const float* beta,
                              float* c, int lead_c, long stride_c, int matrices) {
  return product("SgemmStridedBatched", handle, ta, tb, m, n, k, alpha, beta,
                 {a, f32, lead_a, stride_a, b, f32, lead_b, stride_b, c, f32, lead_c, stride_c}, matrices, in_f32);
}
int cublasDgemmStridedBatched(void* handle, int ta, int tb, int m, int n, int k, const double* alpha, const double* a,
                              int lead_a, long stride_a, const double* b, int lead_b, long stride_b,
                              const double* beta, double* c, int lead_c, long stride_c, int matrices) {
  return product("DgemmStridedBatched", handle, ta, tb, m, n, k, alpha, beta,
                 {a, f64, lead_a, stride_a, b, f64, lead_b, stride_b, c, f64, lead_c, stride_c}, matrices, in_f64);
}

}  // extern "C"

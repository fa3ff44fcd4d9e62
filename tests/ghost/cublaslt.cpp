// cuBLASLt: a product and what is known of its matrices come as attributes of handles.
#include <cstdint>
#include <cstring>
#include <map>

#include "events.h"
#include "graphs.h"
#include "products.h"

namespace {

// Codes of cublasLtMatmulDescAttributes_t, cublasLtMatrixLayoutAttribute_t and cublasLtEpilogue_t.
enum Attribute { transpose_a = 3, transpose_b = 4, epilogue = 7, bias_pointer = 8, scale_a = 17, scale_b = 18,
                 bias_type = 26 };
enum LayoutAttribute { matrices_of = 5, stride_of = 6 };
enum Epilogue { plain = 1, with_bias = 4 };

struct Description {
  int compute, scale;
  std::map<int, uint64_t> set;

  uint64_t get(int attribute, uint64_t otherwise) const {
    const auto found = set.find(attribute);
    return found == set.end() ? otherwise : found->second;
  }
};

struct Layout {
  int type;
  uint64_t rows, columns;
  long leading;
  std::map<int, uint64_t> set;

  long get(int attribute, long otherwise) const {
    const auto found = set.find(attribute);
    return found == set.end() ? otherwise : static_cast<long>(found->second);
  }
};

uint64_t value_of(const void* from, size_t bytes) {
  uint64_t value = 0;
  memcpy(&value, from, bytes < sizeof value ? bytes : sizeof value);
  return value;
}

Operand operand(const void* at, const Layout& layout, bool transposed) {
  return {at, static_cast<Number>(layout.type), transposed, layout.leading, layout.get(stride_of, 0)};
}

double scalar(const void* at, int type) {
  return type == static_cast<int>(Number::f64) ? *static_cast<const double*>(at) : *static_cast<const float*>(at);
}

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return 130100; }
int cublasLtMatmulDescCreate(void** out, int compute, int scale) {
  *out = new Description{compute, scale, {}};
  return 0;
}
int cublasLtMatmulDescDestroy(void* description) {
  delete static_cast<Description*>(description);
  return 0;
}
int cublasLtMatmulDescSetAttribute(void* description, int attribute, const void* value, size_t bytes) {
  static_cast<Description*>(description)->set[attribute] = value_of(value, bytes);
  return 0;
}
int cublasLtMatmulPreferenceCreate(void** out) {
  *out = ghost_handle();
  return 0;
}
int cublasLtMatmulPreferenceDestroy(void*) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatrixLayoutCreate(void** out, int type, uint64_t rows, uint64_t columns, long leading) {
  *out = new Layout{type, rows, columns, leading, {}};
  return 0;
}
int cublasLtMatrixLayoutDestroy(void* layout) {
  delete static_cast<Layout*>(layout);
  return 0;
}
int cublasLtMatrixLayoutSetAttribute(void* layout, int attribute, const void* value, size_t bytes) {
  static_cast<Layout*>(layout)->set[attribute] = value_of(value, bytes);
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* count) {
  memset(results, 0, 96);  // of one cublasLtMatmulHeuristicResult_t: a status of success, no workspace
  *count = 1;
  return 0;
}
int cublasLtMatmul(void*, void* described, const void* alpha, const void* a, const void* layout_a, const void* b,
                   const void* layout_b, const void* beta, const void* c, const void* layout_c, void* d,
                   const void* layout_d, const void*, void*, size_t, void* stream) {
  ghost_touch("product", stream, GhostMemory().reads(a).reads(b).reads(c).writes(d).text(), "Lt");
  if (!ghost_computes()) return 0;
  const Description& how = *static_cast<Description*>(described);
  const Layout &la = *static_cast<const Layout*>(layout_a), &lb = *static_cast<const Layout*>(layout_b),
               &lc = *static_cast<const Layout*>(layout_c), &ld = *static_cast<const Layout*>(layout_d);
  const uint64_t then = how.get(epilogue, plain);
  if ((then != plain && then != with_bias) || how.get(scale_a, 0) || how.get(scale_b, 0))
    ghost_stop("nobody computes a cublasLt product with the epilogue %zu or scales", static_cast<size_t>(then));
  const bool ta = how.get(transpose_a, 0), tb = how.get(transpose_b, 0);
  const long m = static_cast<long>(ta ? la.columns : la.rows), k = static_cast<long>(ta ? la.rows : la.columns);
  const void* bias = then == with_bias ? reinterpret_cast<const void*>(how.get(bias_pointer, 0)) : nullptr;
  const Product made{m, static_cast<long>(ld.columns), k, la.get(matrices_of, 1), scalar(alpha, how.scale),
            scalar(beta, how.scale), operand(a, la, ta), operand(b, lb, tb), operand(c, lc, false), d,
            static_cast<Number>(ld.type), ld.leading, ld.get(stride_of, 0), bias,
            static_cast<Number>(how.get(bias_type, static_cast<uint64_t>(ld.type)))};
  ghost_do(stream, [made] { multiply(made); });
  return 0;
}

}  // extern "C"

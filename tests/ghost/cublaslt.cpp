// cuBLASLt: a product and what is known of its matrices come as attributes of handles.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "events.h"
#include "graphs.h"
#include "products.h"

namespace {

// Codes of cublasLtMatmulDescAttributes_t, cublasLtMatrixLayoutAttribute_t and cublasLtEpilogue_t.
enum Attribute { transpose_a = 3, transpose_b = 4, epilogue = 7, bias_pointer = 8, aux_pointer = 11, aux_leading = 12,
                 scale_a = 17, scale_b = 18, bias_type = 26 };
enum LayoutAttribute { matrices_of = 5, stride_of = 6 };
enum Epilogue { plain = 1, with_bias = 4, gelu_aux_bias = 32 | 128 | 4, dgelu = 64 | 128, dgelu_bgrad = 64 | 128 | 16 };

// cublasLtMatmulHeuristicResult_t: what GetHeuristic fills an array of.
struct Algorithm {
  uint64_t data[8];
};
struct Candidate {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Candidate) == 96);
constexpr int most_candidates = 8;
constexpr uint64_t signature = 0x67686f7374;

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

// GeLU in its tanh form and its derivative.
float gelu(float x) { return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x))); }
float gelu_slope(float x) {
  const float t = std::tanh(0.7978845608f * (x + 0.044715f * x * x * x));
  return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}

// The product in fp32, then what the epilogue makes of it: GeLU of product and bias, which are kept in aux; or the
// gradient through that GeLU and its sums over columns.
void multiply_then(Product product, uint64_t then, void* bias, Number bias_type, void* aux, long leading) {
  void* const out = product.out;
  const Number type = product.out_type;
  const long m = product.m, n = product.n, out_leading = product.out_leading;
  std::vector<float> wide(static_cast<size_t>(m) * n), sums(m, 0.0f);
  product.out = wide.data(), product.out_type = Number::f32, product.out_leading = m, product.bias = nullptr;
  multiply(product);
  for (long j = 0; j < n; j++)
    for (long i = 0; i < m; i++) {
      float value = wide[i + j * m];
      if (then == gelu_aux_bias) {
        value += number_at<float>(bias, bias_type, i);
        put_number(aux, type, i + j * leading, value);
        value = gelu(value);
      } else {
        value *= gelu_slope(number_at<float>(aux, type, i + j * leading));
        sums[i] += value;
      }
      put_number(out, type, i + j * out_leading, value);
    }
  for (long i = 0; i < m && then == dgelu_bgrad; i++) put_number(bias, bias_type, i, sums[i]);
}

double scalar(const void* at, int type) {
  return type == static_cast<int>(Number::f64) ? *static_cast<const double*>(at) : *static_cast<const float*>(at);
}

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return 130100; }
int cublasLtCreate(void** handle) {
  *handle = ghost_handle();
  return 0;
}
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
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int asked, Candidate* out, int* count) {
  ghost_event("heuristic", nullptr, "%d", asked);
  if (const char* status = getenv("GHOST_HEURISTIC")) return *count = 0, atoi(status);
  const char* fewer = getenv("GHOST_CANDIDATES");
  *count = std::min(asked, fewer ? atoi(fewer) : most_candidates);
  for (int i = 0; i < *count; i++)
    out[i] = {{{signature, static_cast<uint64_t>(i)}}, static_cast<size_t>(i) * 4096, 0, 1.0f, {}};
  return 0;
}
int cublasLtMatmul(void*, void* described, const void* alpha, const void* a, const void* layout_a, const void* b,
                   const void* layout_b, const void* beta, const void* c, const void* layout_c, void* d,
                   const void* layout_d, const Algorithm* chosen, void*, size_t workspace, void* stream) {
  ghost_touch("product", stream, GhostMemory().reads(a).reads(b).reads(c).writes(d).text(), "Lt");
  if (!ghost_computes()) return 0;
  if (!chosen || chosen->data[0] != signature || workspace < chosen->data[1] * 4096)
    ghost_stop("a cublasLt product was given no algorithm that the heuristic named, or less workspace (%zu) than it needs",
               workspace);
  const Description& how = *static_cast<Description*>(described);
  const Layout &la = *static_cast<const Layout*>(layout_a), &lb = *static_cast<const Layout*>(layout_b),
               &lc = *static_cast<const Layout*>(layout_c), &ld = *static_cast<const Layout*>(layout_d);
  const uint64_t then = how.get(epilogue, plain);
  const bool gelu_too = then == gelu_aux_bias || then == dgelu || then == dgelu_bgrad;
  if ((then != plain && then != with_bias && !gelu_too) || how.get(scale_a, 0) || how.get(scale_b, 0))
    ghost_stop("nobody computes a cublasLt product with the epilogue %zu or scales", static_cast<size_t>(then));
  const bool ta = how.get(transpose_a, 0), tb = how.get(transpose_b, 0);
  const long m = static_cast<long>(ta ? la.columns : la.rows), k = static_cast<long>(ta ? la.rows : la.columns);
  void* const at_bias = reinterpret_cast<void*>(how.get(bias_pointer, 0));
  const Number type = static_cast<Number>(how.get(bias_type, static_cast<uint64_t>(ld.type)));
  const Product made{m, static_cast<long>(ld.columns), k, la.get(matrices_of, 1), scalar(alpha, how.scale),
            scalar(beta, how.scale), operand(a, la, ta), operand(b, lb, tb), operand(c, lc, false), d,
            static_cast<Number>(ld.type), ld.leading, ld.get(stride_of, 0), then == with_bias ? at_bias : nullptr, type};
  void* const aux = reinterpret_cast<void*>(how.get(aux_pointer, 0));
  const long leading = static_cast<long>(how.get(aux_leading, 0));
  if (gelu_too && (!aux || leading < m || (then != dgelu && !at_bias)))
    ghost_stop("a cublasLt product with the epilogue %zu lacks aux, its leading dimension or a bias", static_cast<size_t>(then));
  ghost_do(stream, [=] {
    if (gelu_too) multiply_then(made, then, at_bias, type, aux, leading);
    else multiply(made);
  });
  return 0;
}

}  // extern "C"

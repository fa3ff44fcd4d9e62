// cublasLt and hipBLASLt by their functions' names: what differs between the two, and the calls that a product needs.
//
// Nothing is linked and no header of theirs is used: handles are pointers and enumerations pass as int.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "products.h"

namespace mp {

struct Dialect {
  const char* name;  // before the names of functions
  int32_t compute_f32, straight, transposed;                                // ...ComputeType_t, ...Operation_t
  int32_t transpose_a, transpose_b, epilogue, vector, aux, aux_leading;     // ...LtMatmulDescAttributes_t
  int32_t reductions, least_alignment;  // ...LtMatmulPreferenceAttributes_t, the last of A; -1: it knows none
  size_t workspace_at, state_at, result_bytes;  // in ...LtMatmulHeuristicResult_t, which begins with the algorithm
};

constexpr int32_t kWorkspaceLimit = 1;  // ...LtMatmulPreferenceAttributes_t, in both
constexpr uint32_t kSumsInFp32 = 2;     // cublasLtReductionScheme_t: parts of a sum are not rounded to the result's dtype
constexpr Dialect kDialects[] = {
    {"cublasLt", 68, 0, 1, 3, 4, 7, 8, 11, 12, 3, 5, 64, 72, 96},
    {"hipblasLt", 2, 111, 112, 0, 1, 2, 3, 10, 11, -1, -1, 24, 32, 56},
};
// cublasLtEpilogue_t and hipblasLtEpilogue_t by mp_epilogue.
constexpr uint32_t kEpilogues[MP_EPILOGUES] = {1, 4, 32 | 128 | 4, 64 | 128, 64 | 128 | 16};

// A matrix in memory: columns after one another, as BLAS counts, `leading` elements apart.
struct Matrix {
  void* at;
  int32_t type;  // cudaDataType
  uint64_t rows, columns;
  int64_t leading;
  bool transposed;  // the product takes its transpose
};

// Largest power of two up to 16 bytes, the widest load, that divides an address: more changes no algorithm.
inline uint32_t alignment_of(const void* at) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(at);
  return static_cast<uint32_t>(address == 0 ? 16 : std::min<uintptr_t>(address & (~address + 1), 16));
}

struct Algorithm {
  std::vector<unsigned char> data;
  size_t workspace;
};

// Descriptors of a product and the algorithms that the heuristic names for it, fastest by its own estimate first.
struct Plan {
  void *how = nullptr, *a = nullptr, *b = nullptr, *out = nullptr;
  std::vector<Algorithm> algorithms;
};

// out = op(a) op(b) (+ out), then an epilogue with a vector of out.rows elements and aux of the form of out.
struct LtProduct {
  Matrix a, b, out;
  int32_t epilogue, device;
  void *vector, *aux;
};

// One library of this process, with a handle for each device and a plan for each form of a product.
class LtLibrary {
 public:
  // Throws std::runtime_error where it lacks a function.
  LtLibrary(void* library, const Dialect& dialect);
  const Dialect& dialect() const { return dialect_; }
  int64_t version();
  int64_t asked() const { return asked_; }
  size_t candidates(const LtProduct& product);
  // Bytes of workspace of a candidate. Throws std::runtime_error where there is no such candidate.
  size_t workspace(const LtProduct& product, int64_t candidate);
  void run(const LtProduct& product, bool adds, int64_t candidate, void* space, void* stream);

 private:
  using Key = std::tuple<int32_t, int32_t, std::vector<int64_t>>;
  void* function(const char* name) const;
  void* handle(int32_t device);
  Plan& plan(const LtProduct& product);
  void ask(const LtProduct& product, Plan& plan);
  const Algorithm& algorithm(const LtProduct& product, int64_t candidate);
  template <typename... T>
  void call(const char* name, void* function, T... arguments) const;
  void set(void* how, int32_t attribute, const void* value, size_t bytes) const;

  void* library_;
  const Dialect dialect_;
  void *create_, *describe_, *describe_set_, *layout_, *prefer_, *prefer_set_, *prefer_end_, *heuristic_, *multiply_;
  std::mutex guard_;  // forward passes and autograd's threads share plans, whose pointers are set before each product
  std::map<int32_t, void*> handles_;
  std::map<Key, Plan> plans_;
  int64_t asked_ = 0;
};

}  // namespace mp

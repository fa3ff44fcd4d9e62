// The calls of cublasLt and hipBLASLt behind lt_library.h.
#include "lt_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace mp {
namespace {

// cublasStatus_t and hipblasStatus_t, in the order of kDialects.
struct Status {
  int32_t value;
  const char* name;
};
constexpr Status kStatuses[][7] = {
    {{1, "NOT_INITIALIZED"}, {3, "ALLOC_FAILED"}, {7, "INVALID_VALUE"}, {8, "ARCH_MISMATCH"}, {13, "EXECUTION_FAILED"},
     {14, "INTERNAL_ERROR"}, {15, "NOT_SUPPORTED"}},
    {{1, "NOT_INITIALIZED"}, {2, "ALLOC_FAILED"}, {3, "INVALID_VALUE"}, {8, "ARCH_MISMATCH"}, {5, "EXECUTION_FAILED"},
     {6, "INTERNAL_ERROR"}, {7, "NOT_SUPPORTED"}},
};

std::string name_of(const Dialect& dialect, int32_t status) {
  for (const Status& known : kStatuses[dialect.name == kDialects[0].name ? 0 : 1])
    if (known.value == status) return known.name;
  return "";
}

std::runtime_error fault(const Dialect& dialect, const char* function, int32_t status) {
  const std::string name = name_of(dialect, status);
  const char* free = name == "ALLOC_FAILED" ? "leave more of the device's memory free, or " : "";
  return std::runtime_error(std::string(dialect.name) + function + " gave status " + std::to_string(status) +
                            (name.empty() ? "" : " (" + name + ")") + "; " + free +
                            "set backend.products = \"torch\"");
}

}  // namespace

LtLibrary::LtLibrary(void* library, const Dialect& dialect) : library_(library), dialect_(dialect) {
  create_ = function("Create");
  describe_ = function("MatmulDescCreate");
  describe_set_ = function("MatmulDescSetAttribute");
  layout_ = function("MatrixLayoutCreate");
  prefer_ = function("MatmulPreferenceCreate");
  prefer_set_ = function("MatmulPreferenceSetAttribute");
  prefer_end_ = function("MatmulPreferenceDestroy");
  heuristic_ = function("MatmulAlgoGetHeuristic");
  multiply_ = function("Matmul");
}

void* LtLibrary::function(const char* name) const {
  const std::string whole = std::string(dialect_.name) + name;
  void* found = dlsym(library_, whole.c_str());
  if (found == nullptr) throw std::runtime_error("it has no " + whole);
  return found;
}

template <typename... T>
void LtLibrary::call(const char* name, void* function, T... arguments) const {
  const int32_t status = reinterpret_cast<int32_t (*)(T...)>(function)(arguments...);
  if (status != 0) throw fault(dialect_, name, status);
}

void LtLibrary::set(void* how, int32_t attribute, const void* value, size_t bytes) const {
  call("MatmulDescSetAttribute", describe_set_, how, attribute, value, bytes);
}

void* LtLibrary::handle(int32_t device) {
  void*& found = handles_[device];
  if (found == nullptr) call("Create", create_, &found);
  return found;
}

int64_t LtLibrary::version() {
  void* ask = function("GetVersion");
  if (dialect_.name == kDialects[0].name) return static_cast<int64_t>(reinterpret_cast<size_t (*)()>(ask)());
  const std::lock_guard<std::mutex> hold(guard_);
  int32_t found = 0;
  call("GetVersion", ask, handle(0), &found);
  return found;
}

void LtLibrary::ask(const LtProduct& product, Plan& plan) {
  void* preference = nullptr;
  call("MatmulPreferenceCreate", prefer_, &preference);
  const uint64_t limit = MP_WORKSPACE;
  call("MatmulPreferenceSetAttribute", prefer_set_, preference, kWorkspaceLimit, &limit, sizeof limit);
  if (dialect_.reductions >= 0)
    call("MatmulPreferenceSetAttribute", prefer_set_, preference, dialect_.reductions, &kSumsInFp32, sizeof kSumsInFp32);
  const void* at[] = {product.a.at, product.b.at, product.out.at, product.out.at};
  for (int32_t i = 0; i < 4 && dialect_.least_alignment >= 0; i++) {
    const uint32_t bytes = alignment_of(at[i]);
    call("MatmulPreferenceSetAttribute", prefer_set_, preference, dialect_.least_alignment + i, &bytes, sizeof bytes);
  }
  std::vector<unsigned char> results(MP_CANDIDATES * dialect_.result_bytes);
  int32_t count = 0;
  asked_++;
  const int32_t status = reinterpret_cast<int32_t (*)(
      void*, void*, void*, void*, void*, void*, void*, int32_t, void*, int32_t*)>(heuristic_)(
      handle(product.device), plan.how, plan.a, plan.b, plan.out, plan.out, preference, MP_CANDIDATES, results.data(),
      &count);
  call("MatmulPreferenceDestroy", prefer_end_, preference);
  // A product that the library cannot compute has no algorithm. Any other fault may pass, and must not be kept.
  const std::string said = name_of(dialect_, status);
  if (status != 0 && said != "NOT_SUPPORTED" && said != "INVALID_VALUE")
    throw fault(dialect_, "MatmulAlgoGetHeuristic", status);
  for (int32_t i = 0; i < count && status == 0; i++) {
    const unsigned char* result = results.data() + i * dialect_.result_bytes;
    Algorithm found{{result, result + dialect_.workspace_at}, 0};
    int32_t state = 0;
    memcpy(&found.workspace, result + dialect_.workspace_at, sizeof found.workspace);
    memcpy(&state, result + dialect_.state_at, sizeof state);
    if (state == 0) plan.algorithms.push_back(std::move(found));
  }
}

Plan& LtLibrary::plan(const LtProduct& p) {
  std::vector<int64_t> form;
  for (const Matrix* m : {&p.a, &p.b, &p.out})
    for (int64_t part : {int64_t(m->type), int64_t(m->rows), int64_t(m->columns), m->leading, int64_t(m->transposed),
                         int64_t(alignment_of(m->at))})
      form.push_back(part);
  const auto [found, is_new] = plans_.try_emplace(Key{p.device, p.epilogue, std::move(form)});
  Plan& plan = found->second;
  if (!is_new) return plan;
  try {
    call("MatmulDescCreate", describe_, &plan.how, dialect_.compute_f32, int32_t(0));
    const int32_t ways[] = {p.a.transposed ? dialect_.transposed : dialect_.straight,
                            p.b.transposed ? dialect_.transposed : dialect_.straight};
    set(plan.how, dialect_.transpose_a, &ways[0], sizeof ways[0]);
    set(plan.how, dialect_.transpose_b, &ways[1], sizeof ways[1]);
    set(plan.how, dialect_.epilogue, &kEpilogues[p.epilogue], sizeof kEpilogues[0]);
    if (p.vector) set(plan.how, dialect_.vector, &p.vector, sizeof p.vector);
    if (p.aux) {
      set(plan.how, dialect_.aux, &p.aux, sizeof p.aux);
      set(plan.how, dialect_.aux_leading, &p.out.leading, sizeof p.out.leading);
    }
    void** layouts[] = {&plan.a, &plan.b, &plan.out};
    const Matrix* matrices[] = {&p.a, &p.b, &p.out};
    for (int i = 0; i < 3; i++)
      call("MatrixLayoutCreate", layout_, layouts[i], matrices[i]->type, matrices[i]->rows, matrices[i]->columns,
           matrices[i]->leading);
    ask(p, plan);
  } catch (...) {
    plans_.erase(found);
    throw;
  }
  return plan;
}

const Algorithm& LtLibrary::algorithm(const LtProduct& product, int64_t candidate) {
  const Plan& found = plan(product);
  const auto count = static_cast<int64_t>(found.algorithms.size());
  if (candidate < 0 || candidate >= count)
    throw std::runtime_error(std::string(dialect_.name) + " names " + std::to_string(count) +
                             " algorithms for this product, and number " + std::to_string(candidate) + " is asked for");
  return found.algorithms[candidate];
}

size_t LtLibrary::candidates(const LtProduct& product) {
  const std::lock_guard<std::mutex> hold(guard_);
  return plan(product).algorithms.size();
}

size_t LtLibrary::workspace(const LtProduct& product, int64_t candidate) {
  const std::lock_guard<std::mutex> hold(guard_);
  return algorithm(product, candidate).workspace;
}

void LtLibrary::run(const LtProduct& product, bool adds, int64_t candidate, void* space, void* stream) {
  const std::lock_guard<std::mutex> hold(guard_);
  const Algorithm& chosen = algorithm(product, candidate);
  const Plan& p = plan(product);
  if (product.vector) set(p.how, dialect_.vector, &product.vector, sizeof product.vector);
  if (product.aux) set(p.how, dialect_.aux, &product.aux, sizeof product.aux);
  const float alpha = 1.0f, beta = adds ? 1.0f : 0.0f;
  call("Matmul", multiply_, handle(product.device), p.how, &alpha, product.a.at, p.a, product.b.at, p.b, &beta,
       product.out.at, p.out, product.out.at, p.out, chosen.data.data(), space, chosen.workspace, stream);
}

}  // namespace mp

// megatron_port::lt_product, lt_candidates: matrix products by the cublasLt or hipBLASLt that this process has loaded.
#include "products.h"

#include <dlfcn.h>

#include <algorithm>
#include <memory>

#include "core.h"
#include "lt_library.h"

namespace mp {
namespace {

std::unique_ptr<LtLibrary> libraries[2];

// Names under which torch loads the libraries.
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libhipblaslt.so.1", "libhipblaslt.so.0",
                                  "libhipblaslt.so"};

LtLibrary& library_for(const Tensor& tensor, const char* op) {
  LtLibrary* found = libraries[tensor.is_cpu() ? kCpu : kGpu].get();
  check(found != nullptr, op, "no cublasLt or hipBLASLt is open for these tensors");
  return *found;
}

int32_t data_type(const Tensor& tensor, const char* op) {
  switch (dtype_of(tensor, op)) {
    case MP_F16: return 2;
    case MP_BF16: return 14;
    default: return 0;
  }
}

// A row-major matrix, or a transposed view of one, as BLAS reads it: columns are rows.
Matrix matrix(const char* op, const Tensor& x) {
  check(x.dim() == 2, op, "left, right and out must be matrices");
  const int64_t rows = x.size(0), columns = x.size(1), down = x.stride(0), right = x.stride(1);
  check(rows > 0 && columns > 0, op, "a matrix is empty");
  const bool straight = right == 1 && (down >= columns || rows == 1);
  const bool transposed = !straight && down == 1 && (right >= rows || columns == 1);
  check(straight || transposed, op, "a matrix has neither rows nor columns of neighbouring elements");
  Matrix made{x.data_ptr(), data_type(x, op), static_cast<uint64_t>(columns), static_cast<uint64_t>(rows),
              std::max(down, columns), false};
  if (transposed)
    made = {made.at, made.type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), std::max(right, rows), true};
  return made;
}

// out = left right in BLAS's order: outᵀ = rightᵀ leftᵀ.
LtProduct product_of(
    const char* op, const Tensor& left, const Tensor& right, const Tensor& out, const std::optional<Tensor>& vector,
    const std::optional<Tensor>& aux, int64_t epilogue) {
  check(left.dim() == 2 && right.dim() == 2 && out.dim() == 2 && left.size(1) == right.size(0) &&
            left.size(0) == out.size(0) && right.size(1) == out.size(1), op,
        "left [r, k], right [k, c] and out [r, c] do not fit one another");
  check(left.scalar_type() == right.scalar_type(), op, "left and right have different dtypes");
  check(out.is_contiguous(), op, "out is not contiguous");
  for (const Tensor* t : {&left, &right})
    check(t->is_cpu() == out.is_cpu() && t->get_device_index() == out.get_device_index(), op,
          "the tensors are on different devices");
  check(epilogue >= 0 && epilogue < MP_EPILOGUES, op, "there is no such epilogue");
  const bool wants_vector = epilogue == MP_BIAS || epilogue == MP_GELU_AUX_BIAS || epilogue == MP_DGELU_BGRAD;
  check(vector.has_value() == wants_vector && aux.has_value() == (epilogue >= MP_GELU_AUX_BIAS), op,
        "this epilogue takes another vector or aux");
  if (vector.has_value()) check_tensor(op, "vector", *vector, out, out.scalar_type(), out.size(1));
  if (aux.has_value()) check_tensor(op, "aux", *aux, out, out.scalar_type(), out.numel());
  return {matrix(op, right), matrix(op, left), matrix(op, out), static_cast<int32_t>(epilogue),
          out.is_cpu() ? 0 : static_cast<int32_t>(out.get_device_index()),
          vector.has_value() ? vector->data_ptr() : nullptr, aux.has_value() ? aux->data_ptr() : nullptr};
}

void lt_product(
    const Tensor& left, const Tensor& right, const Tensor& out, const std::optional<Tensor>& vector,
    const std::optional<Tensor>& aux, int64_t epilogue, bool adds, int64_t candidate) {
  const char* op = "lt_product";
  LtLibrary& library = library_for(out, op);
  const LtProduct product = product_of(op, left, right, out, vector, aux, epilogue);
  const Where where(out);
  const size_t bytes = library.workspace(product, candidate);
  const Tensor space = torch::stable::new_empty(out, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  library.run(product, adds, candidate, bytes > 0 ? space.data_ptr() : nullptr, where.stream());
}

int64_t lt_candidates(
    const Tensor& left, const Tensor& right, const Tensor& out, const std::optional<Tensor>& vector,
    const std::optional<Tensor>& aux, int64_t epilogue) {
  const char* op = "lt_candidates";
  LtLibrary& library = library_for(out, op);
  const Where where(out);
  return static_cast<int64_t>(library.candidates(product_of(op, left, right, out, vector, aux, epilogue)));
}

}  // namespace
}  // namespace mp

#define MP_EXPORTED extern "C" __attribute__((visibility("default")))

MP_EXPORTED const char* megatron_port_lt_open(const char* path, int32_t side) {
  static std::string problem;
  void* handle = nullptr;
  if (path != nullptr) {
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  } else {
    handle = dlopen(nullptr, RTLD_NOW);  // where the whole process sees one, it is what torch calls
    bool seen = false;
    for (const mp::Dialect& dialect : mp::kDialects)
      seen = seen || dlsym(handle, (std::string(dialect.name) + "Matmul").c_str()) != nullptr;
    for (const char* name : mp::kNames) {
      if (seen) break;
      if (void* found = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) handle = found, seen = true;
    }
  }
  problem = handle == nullptr ? dlerror() : "torch has loaded no libcublasLt and no libhipblaslt";
  for (const mp::Dialect& dialect : mp::kDialects) {
    if (handle == nullptr || !dlsym(handle, (std::string(dialect.name) + "Matmul").c_str())) continue;
    try {
      mp::libraries[side] = std::make_unique<mp::LtLibrary>(handle, dialect);
      return nullptr;
    } catch (const std::runtime_error& error) {
      problem = error.what();
    }
  }
  return problem.c_str();
}

MP_EXPORTED void megatron_port_lt_close(int32_t side) { mp::libraries[side].reset(); }

MP_EXPORTED const char* megatron_port_lt_name(int32_t side) {
  return mp::libraries[side] ? mp::libraries[side]->dialect().name : nullptr;
}

MP_EXPORTED int64_t megatron_port_lt_version(int32_t side) {
  return mp::libraries[side] ? mp::libraries[side]->version() : 0;
}

MP_EXPORTED int64_t megatron_port_lt_asked(int32_t side) {
  return mp::libraries[side] ? mp::libraries[side]->asked() : 0;
}

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def(
      "lt_product(Tensor left, Tensor right, Tensor(a!) out, Tensor(b!)? vector, Tensor(c!)? aux, int epilogue, "
      "bool adds, int candidate) -> ()");
  m.def(
      "lt_candidates(Tensor left, Tensor right, Tensor out, Tensor? vector, Tensor? aux, int epilogue) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("lt_product", TORCH_BOX(&mp::lt_product));
  m.impl("lt_candidates", TORCH_BOX(&mp::lt_candidates));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("lt_product", TORCH_BOX(&mp::lt_product));
  m.impl("lt_candidates", TORCH_BOX(&mp::lt_candidates));
}

// Loading of kernel libraries, and the checks that every op makes.
#include "core.h"

#include <dlfcn.h>

namespace mp {
namespace {

const char* (*error_text[2])(int32_t) = {nullptr, nullptr};
bool from_device_sources[2] = {false, true};

// torch's own function for the current stream: absent from a CPU build, and not found by weak reference even where
// CUDA is there, because torch's libraries are loaded locally. ROCm builds call theirs libtorch_hip.
using CurrentStream = AOTITorchError (*)(int32_t, void**);

CurrentStream current_stream() {
  static const CurrentStream found = [] {
    for (const char* library : {"libtorch_cuda.so", "libtorch_hip.so"}) {
      if (void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD)) {
        if (void* symbol = dlsym(handle, "aoti_torch_get_current_cuda_stream")) {
          return reinterpret_cast<CurrentStream>(symbol);
        }
      }
    }
    return static_cast<CurrentStream>(nullptr);
  }();
  return found;
}

}  // namespace

std::vector<Symbol*>& symbols() {
  static std::vector<Symbol*> all;
  return all;
}

Symbol::Symbol(const char* name) : name(name) { symbols().push_back(this); }

void fail(const std::string& text) { throw std::runtime_error(text); }

bool on_device_kernels(bool cpu_tensors) { return from_device_sources[cpu_tensors ? kCpu : kGpu]; }

Where::Where(const Tensor& tensor) {
  if (tensor.is_cpu()) return;
  guard_.emplace(tensor.get_device_index());
  const CurrentStream ask = current_stream();
  if (ask == nullptr) fail("megatron_port: this torch does not say which GPU stream is current");
  TORCH_ERROR_CODE_CHECK(ask(tensor.get_device_index(), &stream_));
}

int32_t dtype_of(const Tensor& tensor, const char* op) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return MP_F32;
    case ScalarType::Half: return MP_F16;
    case ScalarType::BFloat16: return MP_BF16;
    default: fail(std::string("megatron_port::") + op + ": takes float32, float16 and bfloat16 tensors only");
  }
}

void check_alike(const char* op, std::initializer_list<const Tensor*> tensors) {
  const Tensor* first = nullptr;
  for (const Tensor* t : tensors) {
    if (t == nullptr) continue;
    check(t->is_contiguous(), op, "a tensor is not contiguous; call .contiguous() first");
    if (first == nullptr) {
      first = t;
      continue;
    }
    check(t->scalar_type() == first->scalar_type(), op, "the tensors have different dtypes");
    check(t->is_cpu() == first->is_cpu() && t->get_device_index() == first->get_device_index(), op,
          "the tensors are on different devices");
  }
}

void check_tensor(
    const char* op, const char* name, const Tensor& tensor, const Tensor& like, ScalarType dtype, int64_t elements) {
  const std::string which(name);
  check(tensor.is_contiguous(), op, (which + " is not contiguous; call .contiguous() first").c_str());
  check(tensor.scalar_type() == dtype, op, (which + " has another dtype than it must have").c_str());
  check(tensor.numel() == elements, op,
        (which + " has " + std::to_string(tensor.numel()) + " elements, not " + std::to_string(elements)).c_str());
  check(tensor.is_cpu() == like.is_cpu() && tensor.get_device_index() == like.get_device_index(), op,
        (which + " is on another device").c_str());
}

void check_code(int32_t code, const Tensor& on, const char* op) {
  if (code == MP_OK) return;
  const auto text = error_text[on.is_cpu() ? kCpu : kGpu];
  fail(std::string("megatron_port::") + op + ": " + (text ? text(code) : "error ") + " (" + std::to_string(code) + ")");
}

}  // namespace mp

// Loads a kernel library for CPU (side 0) or GPU (side 1) tensors in place of the one before. NULL, or what is wrong
// (valid until the next call); then the one before stays.
extern "C" __attribute__((visibility("default"))) const char* megatron_port_load(const char* path, int32_t side) {
  static std::string problem;
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    problem = dlerror();
    return problem.c_str();
  }
  const auto abi = reinterpret_cast<int32_t (*)()>(dlsym(handle, "mp_abi"));
  if (abi == nullptr || abi() != MP_ABI) {
    problem = abi == nullptr ? "it has no mp_abi: not a kernel library"
                             : "it has ABI " + std::to_string(abi()) + ", the binding ABI " + std::to_string(MP_ABI);
    return problem.c_str();
  }
  problem.clear();
  const auto target = reinterpret_cast<const char* (*)()>(dlsym(handle, "mp_target"));
  const bool of_cpu = target != nullptr && std::string(target()).rfind("cpu", 0) == 0;
  std::vector<void*> found;
  for (const mp::Symbol* symbol : mp::symbols()) {
    found.push_back(dlsym(handle, symbol->name));
    if (found.back() == nullptr) problem += std::string(problem.empty() ? "it lacks " : ", ") + symbol->name;
  }
  if (!problem.empty()) return problem.c_str();
  for (size_t i = 0; i < found.size(); i++) mp::symbols()[i]->at[side] = found[i];
  mp::from_device_sources[side] = !of_cpu;
  mp::error_text[side] = reinterpret_cast<const char* (*)(int32_t)>(dlsym(handle, "mp_error"));
  return nullptr;
}

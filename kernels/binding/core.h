// What the files of the binding share: the kernel libraries that are loaded, checks of tensors, device and stream.
//
// Only torch's stable ABI is used (torch/csrc/stable, headers alone), so that one build serves torch 2.11 to 2.13 and
// every Python. The kernels come from libraries with the C ABI of include/: one for CPU tensors, one for GPU tensors,
// chosen at run time by megatron_port_load.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "mp.h"

namespace mp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum Side { kCpu = 0, kGpu = 1 };

// One symbol of the C ABI in the libraries. Every instance is static and enters the list that load() resolves.
struct Symbol {
  explicit Symbol(const char* name);
  const char* name;
  void* at[2] = {nullptr, nullptr};
};

std::vector<Symbol*>& symbols();

[[noreturn]] void fail(const std::string& text);

inline void check(bool good, const char* op, const char* what) {
  if (!good) fail(std::string("megatron_port::") + op + ": " + what);
}

// A function of the C ABI, called in the library of the tensor's device.
template <typename F>
struct Function : Symbol {
  using Symbol::Symbol;
  F* on(const Tensor& tensor) const {
    void* found = at[tensor.is_cpu() ? kCpu : kGpu];
    if (found == nullptr) {
      fail(std::string(name) + ": no kernel library that has it is loaded for " +
           (tensor.is_cpu() ? "CPU" : "GPU") + " tensors");
    }
    return reinterpret_cast<F*>(found);
  }
};

// Whether the library for such tensors is made of device sources, for a GPU or for the emulator.
bool on_device_kernels(bool cpu_tensors);

// Makes the tensor's device current while it lives, and knows the stream to work on (NULL on a CPU).
class Where {
 public:
  explicit Where(const Tensor& tensor);
  void* stream() const { return stream_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  void* stream_ = nullptr;
};

// The dtype code of the C ABI; fails for other dtypes.
int32_t dtype_of(const Tensor& tensor, const char* op);

// Fails unless all are contiguous, on one device, and of the first one's dtype. Undefined optionals are left out.
void check_alike(const char* op, std::initializer_list<const Tensor*> tensors);

// Fails unless the tensor is contiguous, on `like`'s device, of this dtype and number of elements.
void check_tensor(
    const char* op, const char* name, const Tensor& tensor, const Tensor& like, ScalarType dtype, int64_t elements);

// Fails with the library's own text unless code is 0.
void check_code(int32_t code, const Tensor& on, const char* op);

inline const Tensor* maybe(const std::optional<Tensor>& tensor) { return tensor.has_value() ? &*tensor : nullptr; }
inline const void* pointer(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->data_ptr() : nullptr;
}
inline Tensor nothing(const Tensor& like) { return torch::stable::new_empty(like, {0}); }
inline Tensor floats(const Tensor& like, std::initializer_list<int64_t> shape) {
  return torch::stable::new_empty(like, {shape.begin(), shape.size()}, ScalarType::Float);
}

// Floats that the sums of some gradients take, of a workspace that has room for `most`: of slots that are kept, all of
// it is held. Kernels of a device write [slots, gradients, cols], whether slots are kept or not; a CPU's use all.
inline int64_t floats_for(const Tensor& like, int64_t workspace, int64_t most, int64_t gradients) {
  return on_device_kernels(like.is_cpu()) ? workspace / most * gradients : workspace;
}

// The workspace of a gradient's sums over rows, which may be kept as slots (mp.h).
class SlotSpace {
 public:
  SlotSpace(const Tensor& like, int64_t floats_needed, bool keep) : space_(floats(like, {floats_needed})), keep_(keep) {}
  float* at() const { return static_cast<float*>(space_.data_ptr()); }
  int64_t* kept() { return keep_ ? &slots_ : nullptr; }
  // [slots, gradients, cols], or nothing where the gradients were written.
  Tensor slots(int64_t gradients, int64_t cols) {
    if (slots_ == 0) return nothing(space_);
    Tensor own = torch::stable::narrow(space_, 0, 0, slots_ * gradients * cols);
    if (space_.is_cpu() && own.numel() < space_.numel()) own = torch::stable::clone(own);  // which holds no more
    const int64_t shape[] = {slots_, gradients, cols};
    return torch::stable::view(own, {shape, 3});
  }

 private:
  Tensor space_;
  bool keep_;
  int64_t slots_ = 0;
};

}  // namespace mp

// Lists of tensors as the C ABI takes them, and what ops check of them.
#pragma once

#include "core.h"

namespace mp {

inline std::vector<int64_t> sizes_of(const std::vector<Tensor>& tensors) {
  std::vector<int64_t> out;
  out.reserve(tensors.size());
  for (const Tensor& t : tensors) out.push_back(t.numel());
  return out;
}

template <typename T>
std::vector<T*> pointers(const std::vector<Tensor>& tensors) {
  std::vector<T*> out;
  out.reserve(tensors.size());
  for (const Tensor& t : tensors) out.push_back(static_cast<T*>(t.data_ptr()));
  return out;
}

// Fails unless the list has as many tensors as `like`, of the same sizes, on the same device, of this dtype.
inline void check_list(
    const char* op, const char* name, const std::vector<Tensor>& tensors, const std::vector<Tensor>& like,
    ScalarType dtype) {
  if (tensors.size() != like.size()) {
    fail(std::string("megatron_port::") + op + ": " + name + " has " + std::to_string(tensors.size()) +
         " tensors, masters " + std::to_string(like.size()));
  }
  for (size_t i = 0; i < tensors.size(); i++) {
    const Tensor &t = tensors[i], &first = like[0];
    const bool good = t.is_contiguous() && t.scalar_type() == dtype && t.numel() == like[i].numel() &&
                      t.is_cpu() == first.is_cpu() && t.get_device_index() == first.get_device_index();
    // The name is made only where it is needed: lists are long, and every step comes through here.
    if (!good) check_tensor(op, (std::string(name) + "[" + std::to_string(i) + "]").c_str(), t, first, dtype,
                            like[i].numel());
  }
}

// The arguments that every multi-tensor update has, checked: weights may be an empty list.
struct UpdateLists {
  int32_t weight_dtype = 0, grad_dtype = 0;
  std::vector<int64_t> sizes;
  std::vector<void*> weights;
  std::vector<float*> masters;
  std::vector<const void*> grads;

  UpdateLists(
      const char* op, const std::vector<Tensor>& weight, const std::vector<Tensor>& master,
      const std::vector<Tensor>& grad) {
    check_list(op, "masters", master, master, ScalarType::Float);
    check(!grad.empty(), op, "grads is empty");
    grad_dtype = dtype_of(grad[0], op);
    check_list(op, "grads", grad, master, grad[0].scalar_type());
    if (!weight.empty()) {
      weight_dtype = dtype_of(weight[0], op);
      check_list(op, "weights", weight, master, weight[0].scalar_type());
    }
    sizes = sizes_of(master);
    weights = pointers<void>(weight);
    masters = pointers<float>(master);
    grads = pointers<const void>(grad);
  }
  void* const* weight_list() const { return weights.empty() ? nullptr : weights.data(); }
  int64_t count() const { return static_cast<int64_t>(sizes.size()); }
};

// Fails unless the scalars of a step are what the C ABI takes; whether the step's number is int64.
inline bool check_step(
    const char* op, const Tensor& like, const Tensor* step, const std::optional<Tensor>& grad_scale,
    const std::optional<Tensor>& skip, const Tensor& lr, double beta1, double beta2) {
  bool whole = false;
  if (step != nullptr) {
    whole = step->scalar_type() == ScalarType::Long;
    check(whole || step->scalar_type() == ScalarType::Float, op, "step must be int64 or float32");
    check_tensor(op, "step", *step, like, step->scalar_type(), 1);
  }
  if (grad_scale.has_value()) check_tensor(op, "grad_scale", *grad_scale, like, ScalarType::Float, 1);
  if (skip.has_value()) check_tensor(op, "skip", *skip, like, ScalarType::Float, 1);
  check(0.0 <= beta1 && beta1 < 1.0 && 0.0 <= beta2 && beta2 < 1.0, op, "beta1 and beta2 must be in [0, 1)");
  check_tensor(op, "lr", lr, like, ScalarType::Double, 1);
  return whole;
}

}  // namespace mp

// megatron_port::square_norm, adamw_, add_gradients_: on lists of tensors, nothing read back to the host.
#include "optimizer.h"

#include "lists.h"

namespace mp {
namespace {

const Function<decltype(mp_square_norm)> norm{"mp_square_norm"};
const Function<decltype(mp_square_norm_workspace)> norm_workspace{"mp_square_norm_workspace"};
const Function<decltype(mp_adamw)> adamw{"mp_adamw"};
const Function<decltype(mp_add_gradients)> add{"mp_add_gradients"};
const Function<decltype(mp_add_slots)> add_kept{"mp_add_slots"};

// Sum of squares, a float64 scalar.
Tensor square_norm(const std::vector<Tensor>& tensors) {
  const char* op = "square_norm";
  check(!tensors.empty(), op, "the list of tensors is empty: there is no device to give a zero on");
  const Tensor& first = tensors[0];
  const int32_t dtype = dtype_of(first, op);
  for (const Tensor& t : tensors) check_alike(op, {&first, &t});
  const std::vector<int64_t> sizes = sizes_of(tensors);
  const std::vector<const void*> from = pointers<const void>(tensors);
  const int64_t count = static_cast<int64_t>(sizes.size());
  const Where where(first);
  Tensor out = torch::stable::new_empty(first, {}, ScalarType::Double);
  Tensor space = torch::stable::new_empty(first, {norm_workspace.on(first)(count, sizes.data())}, ScalarType::Double);
  check_code(
      norm.on(first)(
          where.stream(), dtype, count, from.data(), sizes.data(), static_cast<double*>(space.data_ptr()),
          static_cast<double*>(out.data_ptr())),
      first, op);
  return out;
}

void adamw_(
    const std::vector<Tensor>& weights, const std::vector<Tensor>& masters, const std::vector<Tensor>& grads,
    const std::vector<Tensor>& exp_avg, const std::vector<Tensor>& exp_avg_sq, const Tensor& step,
    const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& skip, const Tensor& lr, double beta1,
    double beta2, double eps, double weight_decay) {
  const char* op = "adamw_";
  if (masters.empty()) {
    check(weights.empty() && grads.empty() && exp_avg.empty() && exp_avg_sq.empty(), op, "masters is empty");
    return;
  }
  const Tensor& first = masters[0];
  check_list(op, "masters", masters, masters, ScalarType::Float);
  check_list(op, "exp_avg", exp_avg, masters, ScalarType::Float);
  check_list(op, "exp_avg_sq", exp_avg_sq, masters, ScalarType::Float);
  check(!grads.empty(), op, "grads is empty");
  const int32_t grad_dtype = dtype_of(grads[0], op), weight_dtype = weights.empty() ? 0 : dtype_of(weights[0], op);
  check_list(op, "grads", grads, masters, grads[0].scalar_type());
  if (!weights.empty()) check_list(op, "weights", weights, masters, weights[0].scalar_type());
  const bool whole = step.scalar_type() == ScalarType::Long;
  check(whole || step.scalar_type() == ScalarType::Float, op, "step must be int64 or float32");
  check_tensor(op, "step", step, first, step.scalar_type(), 1);
  if (grad_scale.has_value()) check_tensor(op, "grad_scale", *grad_scale, first, ScalarType::Float, 1);
  if (skip.has_value()) check_tensor(op, "skip", *skip, first, ScalarType::Float, 1);
  check(0.0 <= beta1 && beta1 < 1.0 && 0.0 <= beta2 && beta2 < 1.0, op, "beta1 and beta2 must be in [0, 1)");
  check_tensor(op, "lr", lr, first, ScalarType::Double, 1);
  check(eps >= 0.0 && weight_decay >= 0.0, op, "eps and weight_decay must not be negative");
  const std::vector<int64_t> sizes = sizes_of(masters);
  const std::vector<void*> w = pointers<void>(weights);
  const std::vector<const void*> g = pointers<const void>(grads);
  const std::vector<float*> p = pointers<float>(masters), m = pointers<float>(exp_avg), v = pointers<float>(exp_avg_sq);
  const Where where(first);
  check_code(
      adamw.on(first)(
          where.stream(), weight_dtype, grad_dtype, static_cast<int64_t>(sizes.size()),
          weights.empty() ? nullptr : w.data(), p.data(), g.data(), m.data(), v.data(), sizes.data(), step.data_ptr(),
          whole, static_cast<const float*>(pointer(grad_scale)), static_cast<const float*>(pointer(skip)),
          static_cast<const double*>(lr.data_ptr()), beta1, beta2, eps, weight_decay),
      first, op);
}

void add_gradients_(const std::vector<Tensor>& sums, const std::vector<Tensor>& grads) {
  const char* op = "add_gradients_";
  check(!sums.empty() && sums.size() == grads.size(), op, "there must be as many gradients as sums, at least one");
  const Tensor& first = sums[0];
  check_list(op, "sums", sums, sums, ScalarType::Float);
  const int32_t dtype = dtype_of(grads[0], op);
  check_list(op, "grads", grads, sums, grads[0].scalar_type());
  const std::vector<int64_t> sizes = sizes_of(sums);
  const Where where(first);
  check_code(
      add.on(first)(
          where.stream(), dtype, static_cast<int64_t>(sizes.size()), pointers<float>(sums).data(),
          pointers<const void>(grads).data(), sizes.data()),
      first, op);
}

// slots: [slots, gradients, cols], of which sums[i] [cols] takes gradient number row[i], rounded to the dtype of `like`.
void add_slots_(
    const std::vector<Tensor>& sums, const std::vector<Tensor>& slots, const std::vector<int64_t>& row,
    const Tensor& like) {
  const char* op = "add_slots_";
  check(!sums.empty() && sums.size() == slots.size() && sums.size() == row.size(), op,
        "there must be as many slots and rows as sums, at least one");
  const Tensor& first = sums[0];
  check_list(op, "sums", sums, sums, ScalarType::Float);
  std::vector<int64_t> counts, strides;
  std::vector<const float*> from;
  for (size_t i = 0; i < slots.size(); i++) {
    const Tensor& t = slots[i];
    check(t.dim() == 3 && t.size(0) >= 1 && t.size(2) == sums[i].numel(), op, "slots must be [slots, gradients, cols]");
    check_tensor(op, "slots", t, first, ScalarType::Float, t.numel());
    check(row[i] >= 0 && row[i] < t.size(1), op, "a row is not among the gradients of its slots");
    counts.push_back(t.size(0));
    strides.push_back(t.size(1) * t.size(2));
    from.push_back(static_cast<const float*>(t.data_ptr()) + row[i] * t.size(2));
  }
  const Where where(first);
  check_code(
      add_kept.on(first)(
          where.stream(), dtype_of(like, op), static_cast<int64_t>(sums.size()), pointers<float>(sums).data(),
          from.data(), counts.data(), strides.data(), sizes_of(sums).data()),
      first, op);
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def("square_norm(Tensor[] tensors) -> Tensor");
  m.def(
      "adamw_(Tensor(a!)[] weights, Tensor(b!)[] masters, Tensor[] grads, Tensor(c!)[] exp_avg, "
      "Tensor(d!)[] exp_avg_sq, Tensor step, Tensor? grad_scale, Tensor? skip, Tensor lr, float beta1, float beta2, "
      "float eps, float weight_decay) -> ()");
  m.def("add_gradients_(Tensor(a!)[] sums, Tensor[] grads) -> ()");
  m.def("add_slots_(Tensor(a!)[] sums, Tensor[] slots, int[] row, Tensor like) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("square_norm", TORCH_BOX(&mp::square_norm));
  m.impl("adamw_", TORCH_BOX(&mp::adamw_));
  m.impl("add_gradients_", TORCH_BOX(&mp::add_gradients_));
  m.impl("add_slots_", TORCH_BOX(&mp::add_slots_));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("square_norm", TORCH_BOX(&mp::square_norm));
  m.impl("adamw_", TORCH_BOX(&mp::adamw_));
  m.impl("add_gradients_", TORCH_BOX(&mp::add_gradients_));
  m.impl("add_slots_", TORCH_BOX(&mp::add_slots_));
}

// megatron_port::gather_rows, sum_rows, sum_rows_backward: rows of tokens at the places of their experts.
#include "expert_rows.h"

#include <tuple>

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_gather_rows)> gather{"mp_gather_rows"};
const Function<decltype(mp_sum_rows)> sum{"mp_sum_rows"};
const Function<decltype(mp_sum_rows_backward)> backward{"mp_sum_rows_backward"};

void check_matrix(const char* op, const char* name, const Tensor& x) {
  check(x.dim() == 2 && x.size(1) >= 1, op, (std::string(name) + " must be [rows, columns], with a column").c_str());
}

// Fails where an index is none of `least` to `rows` - 1. Looks at tensors of a CPU alone.
void check_indices(const char* op, const char* name, const Tensor& indices, int64_t least, int64_t rows) {
  if (!indices.is_cpu()) return;
  const int64_t* at = static_cast<const int64_t*>(indices.data_ptr());
  for (int64_t i = 0; i < indices.numel(); i++) {
    if (at[i] >= least && at[i] < rows) continue;
    fail(std::string("megatron_port::") + op + ": " + name + " has " + std::to_string(at[i]) + " at " +
         std::to_string(i) + ", which is not from " + std::to_string(least) + " to " + std::to_string(rows - 1));
  }
}

// Fails unless place names each of the rows once. Looks at tensors of a CPU alone.
void check_each_once(const char* op, const Tensor& place, int64_t rows) {
  if (!place.is_cpu()) return;
  std::vector<bool> seen(static_cast<size_t>(rows), false);
  const int64_t* at = static_cast<const int64_t*>(place.data_ptr());
  int64_t named = 0;
  for (int64_t i = 0; i < place.numel(); i++) {
    if (at[i] < 0) continue;
    check(!seen[at[i]], op, ("place names row " + std::to_string(at[i]) + " twice").c_str());
    seen[at[i]] = true;
    named++;
  }
  check(named == rows, op,
        ("place names " + std::to_string(named) + " of " + std::to_string(rows) + " rows").c_str());
}

// Choices of a token, after the checks of place and weight.
int64_t choices(const char* op, const Tensor& y, const Tensor& place, const Tensor* weight) {
  check(place.dim() == 2 && place.size(1) >= 1 && place.size(1) <= MP_MOST_CHOICES, op,
        ("place must be [tokens, k] with k from 1 to " + std::to_string(MP_MOST_CHOICES)).c_str());
  check_tensor(op, "place", place, y, ScalarType::Long, place.numel());
  if (weight != nullptr) check_tensor(op, "weight", *weight, y, ScalarType::Float, place.numel());
  check_indices(op, "place", place, -1, y.size(0));
  return place.size(1);
}

Tensor gather_rows(const Tensor& x, const Tensor& source) {
  const char* op = "gather_rows";
  const int32_t dtype = dtype_of(x, op);
  check_alike(op, {&x});
  check_matrix(op, "x", x);
  check(source.dim() == 1, op, "source must be [rows]");
  const int64_t rows = source.numel(), cols = x.size(1);
  check_tensor(op, "source", source, x, ScalarType::Long, rows);
  check_indices(op, "source", source, 0, x.size(0));
  const Where where(x);
  Tensor out = torch::stable::new_empty(x, {rows, cols});
  check_code(
      gather.on(x)(
          where.stream(), dtype, rows, cols, x.data_ptr(), static_cast<const int64_t*>(source.data_ptr()),
          out.data_ptr(), x.size(0)),
      x, op);
  return out;
}

Tensor sum_rows(const Tensor& y, const Tensor& place, const std::optional<Tensor>& weight) {
  const char* op = "sum_rows";
  const int32_t dtype = dtype_of(y, op);
  check_alike(op, {&y});
  check_matrix(op, "y", y);
  const int64_t k = choices(op, y, place, maybe(weight)), tokens = place.size(0), cols = y.size(1);
  const Where where(y);
  Tensor out = torch::stable::new_empty(y, {tokens, cols});
  check_code(
      sum.on(y)(
          where.stream(), dtype, tokens, cols, k, y.data_ptr(), static_cast<const int64_t*>(place.data_ptr()),
          static_cast<const float*>(pointer(weight)), out.data_ptr(), y.size(0)),
      y, op);
  return out;
}

// dy [rows, columns], dweight [tokens, k]
std::tuple<Tensor, Tensor> sum_rows_backward(
    const Tensor& grad, const Tensor& y, const Tensor& place, const Tensor& weight) {
  const char* op = "sum_rows_backward";
  const int32_t dtype = dtype_of(grad, op);
  check_alike(op, {&grad, &y});
  check_matrix(op, "y", y);
  const int64_t k = choices(op, y, place, &weight), tokens = place.size(0), cols = y.size(1);
  check(grad.dim() == 2 && grad.size(0) == tokens && grad.size(1) == cols, op, "grad must be [tokens, columns of y]");
  check_each_once(op, place, y.size(0));
  const Where where(y);
  Tensor dy = torch::stable::empty_like(y), dweight = floats(y, {tokens, k});
  check_code(
      backward.on(y)(
          where.stream(), dtype, tokens, cols, k, grad.data_ptr(), y.data_ptr(),
          static_cast<const int64_t*>(place.data_ptr()), static_cast<const float*>(weight.data_ptr()), dy.data_ptr(),
          static_cast<float*>(dweight.data_ptr()), y.size(0)),
      y, op);
  return {dy, dweight};
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def("gather_rows(Tensor x, Tensor source) -> Tensor");
  m.def("sum_rows(Tensor y, Tensor place, Tensor? weight) -> Tensor");
  m.def(
      "sum_rows_backward(Tensor grad, Tensor y, Tensor place, Tensor weight) -> (Tensor dy, Tensor dweight)");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("gather_rows", TORCH_BOX(&mp::gather_rows));
  m.impl("sum_rows", TORCH_BOX(&mp::sum_rows));
  m.impl("sum_rows_backward", TORCH_BOX(&mp::sum_rows_backward));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("gather_rows", TORCH_BOX(&mp::gather_rows));
  m.impl("sum_rows", TORCH_BOX(&mp::sum_rows));
  m.impl("sum_rows_backward", TORCH_BOX(&mp::sum_rows_backward));
}

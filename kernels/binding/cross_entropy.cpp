// megatron_port::cross_entropy_statistics, cross_entropy_gradient_: cross-entropy over a split vocabulary.
#include "cross_entropy.h"

#include <tuple>

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_cross_entropy_statistics)> statistics{"mp_cross_entropy_statistics"};
const Function<decltype(mp_cross_entropy_gradient)> gradient{"mp_cross_entropy_gradient"};

// Rows of the logits, after the checks that both ops make.
int64_t rows_of(const char* op, const Tensor& logits, const Tensor& labels, int64_t extent) {
  check_alike(op, {&logits});
  check(logits.dim() >= 1 && logits.sizes().back() >= 1, op, "logits must be [..., v] with a column at least");
  const int64_t cols = logits.sizes().back(), rows = logits.numel() / cols;
  check(extent >= 0 && extent <= cols, op, "extent must be from 0 to the columns of the logits");
  check_tensor(op, "labels", labels, logits, ScalarType::Long, rows);
  return rows;
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_statistics(
    const Tensor& logits, const Tensor& labels, int64_t offset, int64_t extent) {
  const char* op = "cross_entropy_statistics";
  const int32_t dtype = dtype_of(logits, op);
  const int64_t rows = rows_of(op, logits, labels, extent);
  const Where where(logits);
  const auto float_like_labels = [&] {
    return torch::stable::new_empty(labels, labels.sizes(), ScalarType::Float);
  };
  Tensor maximum = float_like_labels(), total = float_like_labels(), target = float_like_labels();
  check_code(
      statistics.on(logits)(
          where.stream(), dtype, rows, logits.sizes().back(), offset, extent, logits.data_ptr(),
          static_cast<const int64_t*>(labels.data_ptr()), static_cast<float*>(maximum.data_ptr()),
          static_cast<float*>(total.data_ptr()), static_cast<float*>(target.data_ptr())),
      logits, op);
  return {maximum, total, target};
}

void cross_entropy_gradient_(
    const Tensor& logits, const Tensor& labels, const Tensor& maximum, const Tensor& total, const Tensor& grad,
    int64_t offset, int64_t extent) {
  const char* op = "cross_entropy_gradient_";
  const int32_t dtype = dtype_of(logits, op);
  const int64_t rows = rows_of(op, logits, labels, extent);
  check_tensor(op, "maximum", maximum, logits, ScalarType::Float, rows);
  check_tensor(op, "total", total, logits, ScalarType::Float, rows);
  check_tensor(op, "grad", grad, logits, ScalarType::Float, rows);
  const Where where(logits);
  check_code(
      gradient.on(logits)(
          where.stream(), dtype, rows, logits.sizes().back(), offset, extent, logits.data_ptr(),
          static_cast<const int64_t*>(labels.data_ptr()), static_cast<const float*>(maximum.data_ptr()),
          static_cast<const float*>(total.data_ptr()), static_cast<const float*>(grad.data_ptr())),
      logits, op);
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def(
      "cross_entropy_statistics(Tensor logits, Tensor labels, int offset, int extent) "
      "-> (Tensor maximum, Tensor total, Tensor target)");
  m.def(
      "cross_entropy_gradient_(Tensor(a!) logits, Tensor labels, Tensor maximum, Tensor total, Tensor grad, "
      "int offset, int extent) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("cross_entropy_statistics", TORCH_BOX(&mp::cross_entropy_statistics));
  m.impl("cross_entropy_gradient_", TORCH_BOX(&mp::cross_entropy_gradient_));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("cross_entropy_statistics", TORCH_BOX(&mp::cross_entropy_statistics));
  m.impl("cross_entropy_gradient_", TORCH_BOX(&mp::cross_entropy_gradient_));
}

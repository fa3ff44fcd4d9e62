// megatron_port::norm_forward, norm_backward: LayerNorm and RMSNorm with the residual add.
#include "norm.h"

#include <tuple>

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_norm_forward)> forward{"mp_norm_forward"};
const Function<decltype(mp_norm_backward)> backward{"mp_norm_backward"};
const Function<decltype(mp_norm_workspace)> workspace{"mp_norm_workspace"};

// y, sum (empty without residual), mean (empty under rms), rstd
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward(
    const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, const std::optional<Tensor>& bias,
    double eps, bool rms) {
  const char* op = "norm_forward";
  const int32_t dtype = dtype_of(x, op);
  check_alike(op, {&x, maybe(residual), &weight, maybe(bias)});
  check(x.dim() >= 1 && x.sizes().back() == weight.numel() && weight.dim() == 1, op,
        "weight must be [h] for x [..., h]");
  check(!bias.has_value() || bias->numel() == weight.numel(), op, "bias must be [h]");
  check(!residual.has_value() || residual->numel() == x.numel(), op, "residual and x differ in shape");
  const int64_t cols = weight.numel(), rows = x.numel() / cols;
  const Where where(x);
  Tensor y = torch::stable::empty_like(x);
  Tensor sum = residual.has_value() ? torch::stable::empty_like(x) : nothing(x);
  Tensor mean = rms ? floats(x, {0}) : floats(x, {rows});
  Tensor rstd = floats(x, {rows});
  check_code(
      forward.on(x)(
          where.stream(), dtype, rms, rows, cols, static_cast<float>(eps), x.data_ptr(), pointer(residual),
          weight.data_ptr(), pointer(bias), y.data_ptr(), residual.has_value() ? sum.data_ptr() : nullptr,
          rms ? nullptr : static_cast<float*>(mean.data_ptr()), static_cast<float*>(rstd.data_ptr())),
      x, op);
  return {y, sum, mean, rstd};
}

// dx, dweight, dbias (empty without bias), slots in place of the last two (empty where those are written)
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(
    const Tensor& dy, const std::optional<Tensor>& dsum, const Tensor& sum, const Tensor& weight, const Tensor& mean,
    const Tensor& rstd, bool rms, bool has_bias, bool keep_slots) {
  const char* op = "norm_backward";
  const int32_t dtype = dtype_of(dy, op);
  check_alike(op, {&dy, maybe(dsum), &sum, &weight});
  const int64_t cols = weight.numel(), rows = sum.numel() / cols;
  check(dy.numel() == sum.numel() && (!dsum.has_value() || dsum->numel() == sum.numel()), op,
        "dy, dsum and sum differ in shape");
  check_tensor(op, "rstd", rstd, dy, ScalarType::Float, rows);
  check_tensor(op, "mean", mean, dy, ScalarType::Float, rms ? 0 : rows);
  const Where where(dy);
  Tensor dx = torch::stable::empty_like(sum);
  Tensor dweight = torch::stable::empty_like(weight);
  Tensor dbias = has_bias ? torch::stable::empty_like(weight) : nothing(weight);
  if (rows == 0) {
    torch::stable::fill_(dweight, 0.0);
    if (has_bias) torch::stable::fill_(dbias, 0.0);
    return {dx, dweight, dbias, nothing(rstd)};
  }
  const int64_t gradients = has_bias ? 2 : 1;
  SlotSpace space(dy, floats_for(dy, workspace.on(dy)(rows, cols), 2, gradients), keep_slots);
  check_code(
      backward.on(dy)(
          where.stream(), dtype, rms, rows, cols, dy.data_ptr(), pointer(dsum), sum.data_ptr(), weight.data_ptr(),
          rms ? nullptr : static_cast<const float*>(mean.data_ptr()), static_cast<const float*>(rstd.data_ptr()),
          dx.data_ptr(), dweight.data_ptr(), has_bias ? dbias.data_ptr() : nullptr,
          space.at(), space.kept()),
      dy, op);
  return {dx, dweight, dbias, space.slots(gradients, cols)};
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def(
      "norm_forward(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool rms) "
      "-> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "norm_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor weight, Tensor mean, Tensor rstd, bool rms, "
      "bool has_bias, bool keep_slots=False) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor slots)");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("norm_forward", TORCH_BOX(&mp::norm_forward));
  m.impl("norm_backward", TORCH_BOX(&mp::norm_backward));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("norm_forward", TORCH_BOX(&mp::norm_forward));
  m.impl("norm_backward", TORCH_BOX(&mp::norm_backward));
}

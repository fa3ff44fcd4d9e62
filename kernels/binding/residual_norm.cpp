// megatron_port::residual_norm_forward, residual_norm_backward: bias, dropout, residual add and the norm that follows.
#include "residual_norm.h"

#include <algorithm>
#include <tuple>

#include "core.h"
#include "dropout.h"
#include "norm.h"

namespace mp {
namespace {

const Function<decltype(mp_residual_norm_forward)> forward{"mp_residual_norm_forward"};
const Function<decltype(mp_residual_norm_backward)> backward{"mp_residual_norm_backward"};
const Function<decltype(mp_residual_norm_workspace)> workspace{"mp_residual_norm_workspace"};
const Function<decltype(mp_norm_workspace)> norm_workspace{"mp_norm_workspace"};
const Function<decltype(mp_dropout_workspace)> dropout_workspace{"mp_dropout_workspace"};

// What both passes must be given of the tensor [s, b, h], its mask and the norm's weight; the keys as the kernel takes
// them.
const int64_t* check_rows(
    const char* op, const Tensor& x, const Tensor& keys, int64_t threshold, const Tensor& weight) {
  check(x.dim() == 3 && weight.dim() == 1 && x.size(2) == weight.numel(), op, "weight must be [h] for x [s, b, h]");
  check(threshold >= 0 && threshold < 65536, op, "threshold must be in 0 ... 65535");
  if (threshold == 0) return nullptr;
  check_tensor(op, "keys", keys, x, ScalarType::Long, x.size(1));
  return static_cast<const int64_t*>(keys.data_ptr());
}

bool same_shape(const Tensor& a, const Tensor& b) {
  return a.dim() == 3 && a.size(0) == b.size(0) && a.size(1) == b.size(1) && a.size(2) == b.size(2);
}

// y, sum, mean (empty under rms), rstd
std::tuple<Tensor, Tensor, Tensor, Tensor> residual_norm_forward(
    const Tensor& x, const std::optional<Tensor>& x_bias, const Tensor& residual, const Tensor& keys, int64_t op_key,
    int64_t threshold, int64_t seq_offset, const Tensor& weight, const std::optional<Tensor>& bias, double eps,
    bool rms) {
  const char* op = "residual_norm_forward";
  const int32_t dtype = dtype_of(x, op);
  check_alike(op, {&x, maybe(x_bias), &residual, &weight, maybe(bias)});
  const int64_t* key = check_rows(op, x, keys, threshold, weight);
  check(same_shape(residual, x), op, "residual and x differ in shape");
  check(!x_bias.has_value() || x_bias->numel() == weight.numel(), op, "x_bias must be [h]");
  check(!bias.has_value() || bias->numel() == weight.numel(), op, "bias must be [h]");
  const int64_t rows = x.size(0) * x.size(1);
  const Where where(x);
  Tensor y = torch::stable::empty_like(x), sum = torch::stable::empty_like(x);
  Tensor mean = floats(x, {rms ? 0 : rows}), rstd = floats(x, {rows});
  check_code(
      forward.on(x)(
          where.stream(), dtype, rms, x.size(0), x.size(1), x.size(2), static_cast<float>(eps), x.data_ptr(),
          pointer(x_bias), residual.data_ptr(), key, op_key, static_cast<int32_t>(threshold), seq_offset,
          weight.data_ptr(), pointer(bias), y.data_ptr(), sum.data_ptr(),
          rms ? nullptr : static_cast<float*>(mean.data_ptr()), static_cast<float*>(rstd.data_ptr())),
      x, op);
  return {y, sum, mean, rstd};
}

// Floats for the sums of these gradients. A device sums them in one pass, or the bias's after the norm's.
int64_t floats_needed(const Tensor& dy, int64_t rows, int64_t cols, int64_t gradients, bool has_x_bias) {
  if (!on_device_kernels(dy.is_cpu())) return workspace.on(dy)(rows, cols);
  const int64_t together = floats_for(dy, norm_workspace.on(dy)(rows, cols), 2, gradients);
  return has_x_bias ? std::max(together, dropout_workspace.on(dy)(rows, cols)) : together;
}

// dsum_total, dx (empty where threshold is 0: it is dsum_total), dweight, dbias, dx_bias (empty where there is none), slots
// in place of the last three (empty where those are written)
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> residual_norm_backward(
    const Tensor& dy, const std::optional<Tensor>& dsum, const Tensor& sum, const Tensor& keys, int64_t op_key,
    int64_t threshold, int64_t seq_offset, const Tensor& weight, const Tensor& mean, const Tensor& rstd, bool rms,
    bool has_bias, bool has_x_bias, bool keep_slots) {
  const char* op = "residual_norm_backward";
  const int32_t dtype = dtype_of(dy, op);
  check_alike(op, {&dy, maybe(dsum), &sum, &weight});
  const int64_t* key = check_rows(op, sum, keys, threshold, weight);
  check(same_shape(dy, sum) && (!dsum.has_value() || same_shape(*dsum, sum)), op, "dy, dsum and sum differ in shape");
  const int64_t rows = sum.size(0) * sum.size(1), cols = sum.size(2);
  check_tensor(op, "rstd", rstd, dy, ScalarType::Float, rows);
  check_tensor(op, "mean", mean, dy, ScalarType::Float, rms ? 0 : rows);
  const Where where(dy);
  Tensor dsum_total = torch::stable::empty_like(sum);
  Tensor dx = threshold != 0 ? torch::stable::empty_like(sum) : nothing(sum);
  Tensor dweight = torch::stable::empty_like(weight);
  Tensor dbias = has_bias ? torch::stable::empty_like(weight) : nothing(weight);
  Tensor dx_bias = has_x_bias ? torch::stable::empty_like(weight) : nothing(weight);
  if (rows == 0) {
    for (Tensor* t : {&dweight, &dbias, &dx_bias}) torch::stable::fill_(*t, 0.0);
    return {dsum_total, dx, dweight, dbias, dx_bias, nothing(rstd)};
  }
  const int64_t gradients = 1 + has_bias + has_x_bias;
  SlotSpace space(dy, floats_needed(dy, rows, cols, gradients, has_x_bias), keep_slots);
  check_code(
      backward.on(dy)(
          where.stream(), dtype, rms, sum.size(0), sum.size(1), cols, dy.data_ptr(), pointer(dsum), sum.data_ptr(),
          weight.data_ptr(), rms ? nullptr : static_cast<const float*>(mean.data_ptr()),
          static_cast<const float*>(rstd.data_ptr()), key, op_key, static_cast<int32_t>(threshold), seq_offset,
          dsum_total.data_ptr(), threshold != 0 ? dx.data_ptr() : nullptr, dweight.data_ptr(),
          has_bias ? dbias.data_ptr() : nullptr, has_x_bias ? dx_bias.data_ptr() : nullptr,
          space.at(), space.kept()),
      dy, op);
  return {dsum_total, dx, dweight, dbias, dx_bias, space.slots(gradients, cols)};
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def(
      "residual_norm_forward(Tensor x, Tensor? x_bias, Tensor residual, Tensor keys, int op_key, int threshold, "
      "int seq_offset, Tensor weight, Tensor? bias, float eps, bool rms) "
      "-> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "residual_norm_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor keys, int op_key, int threshold, "
      "int seq_offset, Tensor weight, Tensor mean, Tensor rstd, bool rms, bool has_bias, bool has_x_bias, "
      "bool keep_slots=False) "
      "-> (Tensor dsum_total, Tensor dx, Tensor dweight, Tensor dbias, Tensor dx_bias, Tensor slots)");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("residual_norm_forward", TORCH_BOX(&mp::residual_norm_forward));
  m.impl("residual_norm_backward", TORCH_BOX(&mp::residual_norm_backward));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("residual_norm_forward", TORCH_BOX(&mp::residual_norm_forward));
  m.impl("residual_norm_backward", TORCH_BOX(&mp::residual_norm_backward));
}

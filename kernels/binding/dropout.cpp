// megatron_port::bias_dropout_add_forward, bias_dropout_add_backward.
#include "dropout.h"

#include <tuple>

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_dropout_forward)> forward{"mp_dropout_forward"};
const Function<decltype(mp_dropout_backward)> backward{"mp_dropout_backward"};
const Function<decltype(mp_dropout_workspace)> workspace{"mp_dropout_workspace"};

// What both passes must be given of the tensor and its mask.
void check_mask(
    const char* op, const Tensor& x, const Tensor& keys, int64_t threshold, int64_t width, int64_t width_offset) {
  check(x.dim() == 3 && x.size(2) >= 1, op, "the tensor must be [s, b, h] with h of at least 1");
  check(threshold >= 0 && threshold < 65536, op, "threshold must be in 0 ... 65535");
  if (threshold == 0) return;
  check_tensor(op, "keys", keys, x, ScalarType::Long, x.size(1));
  check(width_offset >= 0 && width_offset + x.size(2) <= width, op,
        "width_offset + h must be at most width, the row size of the whole tensor");
}

Tensor dropout_forward(
    const Tensor& x, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, const Tensor& keys,
    int64_t op_key, int64_t threshold, int64_t seq_offset, int64_t width, int64_t width_offset) {
  const char* op = "bias_dropout_add_forward";
  const int32_t dtype = dtype_of(x, op);
  check_alike(op, {&x, maybe(bias), maybe(residual)});
  check_mask(op, x, keys, threshold, width, width_offset);
  check(!bias.has_value() || (bias->dim() == 1 && bias->numel() == x.size(2)), op, "bias must be [h] for x [s, b, h]");
  check(!residual.has_value() || (residual->dim() == 3 && residual->size(0) == x.size(0) &&
                                  residual->size(1) == x.size(1) && residual->size(2) == x.size(2)),
        op, "residual and x differ in shape");
  const Where where(x);
  Tensor out = torch::stable::empty_like(x);
  check_code(
      forward.on(x)(
          where.stream(), dtype, x.size(0), x.size(1), x.size(2), x.data_ptr(), pointer(bias), pointer(residual),
          threshold != 0 ? static_cast<const int64_t*>(keys.data_ptr()) : nullptr, op_key,
          static_cast<int32_t>(threshold), seq_offset, width, width_offset, out.data_ptr()),
      x, op);
  return out;
}

// dx (empty where threshold is 0: it is dout), dbias (empty without bias), slots in its place (empty where it is written)
std::tuple<Tensor, Tensor, Tensor> dropout_backward(
    const Tensor& dout, const Tensor& keys, int64_t op_key, int64_t threshold, int64_t seq_offset, int64_t width,
    int64_t width_offset, bool has_bias, bool keep_slots) {
  const char* op = "bias_dropout_add_backward";
  const int32_t dtype = dtype_of(dout, op);
  check_alike(op, {&dout});
  check_mask(op, dout, keys, threshold, width, width_offset);
  const int64_t rows = dout.size(0) * dout.size(1), cols = dout.size(2);
  const Where where(dout);
  Tensor dx = threshold != 0 ? torch::stable::empty_like(dout) : nothing(dout);
  Tensor dbias = has_bias ? torch::stable::new_empty(dout, {cols}) : nothing(dout);
  if (rows == 0) {
    if (has_bias) torch::stable::fill_(dbias, 0.0);
    return {dx, dbias, nothing(keys)};
  }
  SlotSpace space(dout, has_bias ? workspace.on(dout)(rows, cols) : 0, keep_slots && has_bias);
  check_code(
      backward.on(dout)(
          where.stream(), dtype, dout.size(0), dout.size(1), cols, dout.data_ptr(),
          threshold != 0 ? static_cast<const int64_t*>(keys.data_ptr()) : nullptr, op_key,
          static_cast<int32_t>(threshold), seq_offset, width, width_offset, threshold != 0 ? dx.data_ptr() : nullptr,
          has_bias ? dbias.data_ptr() : nullptr, has_bias ? space.at() : nullptr, space.kept()),
      dout, op);
  return {dx, dbias, space.slots(1, cols)};
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def(
      "bias_dropout_add_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor keys, int op_key, int threshold, "
      "int seq_offset, int width, int width_offset) -> Tensor");
  m.def(
      "bias_dropout_add_backward(Tensor dout, Tensor keys, int op_key, int threshold, int seq_offset, int width, "
      "int width_offset, bool has_bias, bool keep_slots=False) -> (Tensor dx, Tensor dbias, Tensor slots)");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("bias_dropout_add_forward", TORCH_BOX(&mp::dropout_forward));
  m.impl("bias_dropout_add_backward", TORCH_BOX(&mp::dropout_backward));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("bias_dropout_add_forward", TORCH_BOX(&mp::dropout_forward));
  m.impl("bias_dropout_add_backward", TORCH_BOX(&mp::dropout_backward));
}

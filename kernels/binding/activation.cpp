// megatron_port::bias_gelu_forward, bias_gelu_backward, swiglu_forward, swiglu_backward.
#include "activation.h"

#include <tuple>

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_bias_gelu_forward)> gelu_forward{"mp_bias_gelu_forward"};
const Function<decltype(mp_bias_gelu_backward)> gelu_backward{"mp_bias_gelu_backward"};
const Function<decltype(mp_bias_gelu_workspace)> gelu_workspace{"mp_bias_gelu_workspace"};
const Function<decltype(mp_swiglu_forward)> silu_forward{"mp_swiglu_forward"};
const Function<decltype(mp_swiglu_backward)> silu_backward{"mp_swiglu_backward"};

// Size of the last dimension.
int64_t columns(const Tensor& x, const char* op, const char* what) {
  check(x.dim() >= 1 && x.sizes().back() > 0, op, what);
  return x.sizes().back();
}

void check_bias(const Tensor& x, const std::optional<Tensor>& bias, const char* op) {
  check(!bias.has_value() || (bias->dim() == 1 && bias->numel() == x.sizes().back()), op,
        "bias must be [f] for x [..., f]");
}

Tensor bias_gelu_forward(const Tensor& x, const std::optional<Tensor>& bias, bool approximate) {
  const char* op = "bias_gelu_forward";
  const int32_t dtype = dtype_of(x, op);
  check_alike(op, {&x, maybe(bias)});
  const int64_t cols = columns(x, op, "x must be [..., f] with f ≥ 1");
  check_bias(x, bias, op);
  const Where where(x);
  Tensor y = torch::stable::empty_like(x);
  check_code(
      gelu_forward.on(x)(
          where.stream(), dtype, approximate, x.numel() / cols, cols, x.data_ptr(), pointer(bias), y.data_ptr()),
      x, op);
  return y;
}

// dx, dbias (empty unless wanted), slots in its place (empty where it is written)
std::tuple<Tensor, Tensor, Tensor> bias_gelu_backward(
    const Tensor& dy, const Tensor& x, const std::optional<Tensor>& bias, bool approximate, bool want_bias,
    bool keep_slots) {
  const char* op = "bias_gelu_backward";
  const int32_t dtype = dtype_of(dy, op);
  check_alike(op, {&dy, &x, maybe(bias)});
  const int64_t cols = columns(x, op, "x must be [..., f] with f ≥ 1"), rows = x.numel() / cols;
  check_bias(x, bias, op);
  check(dy.numel() == x.numel(), op, "dy and x differ in shape");
  check(!want_bias || bias.has_value(), op, "there is no bias to give a gradient of");
  const Where where(dy);
  Tensor dx = torch::stable::empty_like(x);
  Tensor dbias = want_bias ? torch::stable::empty_like(*bias) : nothing(x);
  SlotSpace space(x, want_bias ? gelu_workspace.on(x)(rows, cols) : 0, keep_slots && want_bias);
  check_code(
      gelu_backward.on(x)(
          where.stream(), dtype, approximate, rows, cols, dy.data_ptr(), x.data_ptr(), pointer(bias), dx.data_ptr(),
          want_bias ? dbias.data_ptr() : nullptr, want_bias ? space.at() : nullptr, space.kept()),
      x, op);
  return {dx, dbias, space.slots(1, cols)};
}

Tensor swiglu_forward(const Tensor& x) {
  const char *op = "swiglu_forward", *what = "x must be [..., 2 f]: gate, then up";
  const int32_t dtype = dtype_of(x, op);
  check_alike(op, {&x});
  const int64_t cols = columns(x, op, what);
  check(cols % 2 == 0, op, what);
  const Where where(x);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() /= 2;
  Tensor y = torch::stable::new_empty(x, {shape.data(), shape.size()});
  check_code(
      silu_forward.on(x)(where.stream(), dtype, x.numel() / cols, cols / 2, x.data_ptr(), y.data_ptr()), x, op);
  return y;
}

Tensor swiglu_backward(const Tensor& dy, const Tensor& x) {
  const char *op = "swiglu_backward", *what = "x must be [..., 2 f]: gate, then up";
  const int32_t dtype = dtype_of(dy, op);
  check_alike(op, {&dy, &x});
  const int64_t cols = columns(x, op, what);
  check(cols % 2 == 0, op, what);
  check(dy.numel() * 2 == x.numel(), op, "dy must be [..., f] for x [..., 2 f]");
  const Where where(dy);
  Tensor dx = torch::stable::empty_like(x);
  check_code(
      silu_backward.on(x)(
          where.stream(), dtype, x.numel() / cols, cols / 2, dy.data_ptr(), x.data_ptr(), dx.data_ptr()),
      x, op);
  return dx;
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def("bias_gelu_forward(Tensor x, Tensor? bias, bool approximate) -> Tensor");
  m.def(
      "bias_gelu_backward(Tensor dy, Tensor x, Tensor? bias, bool approximate, bool want_bias, bool keep_slots=False) "
      "-> (Tensor dx, Tensor dbias, Tensor slots)");
  m.def("swiglu_forward(Tensor x) -> Tensor");
  m.def("swiglu_backward(Tensor dy, Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("bias_gelu_forward", TORCH_BOX(&mp::bias_gelu_forward));
  m.impl("bias_gelu_backward", TORCH_BOX(&mp::bias_gelu_backward));
  m.impl("swiglu_forward", TORCH_BOX(&mp::swiglu_forward));
  m.impl("swiglu_backward", TORCH_BOX(&mp::swiglu_backward));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("bias_gelu_forward", TORCH_BOX(&mp::bias_gelu_forward));
  m.impl("bias_gelu_backward", TORCH_BOX(&mp::bias_gelu_backward));
  m.impl("swiglu_forward", TORCH_BOX(&mp::swiglu_forward));
  m.impl("swiglu_backward", TORCH_BOX(&mp::swiglu_backward));
}

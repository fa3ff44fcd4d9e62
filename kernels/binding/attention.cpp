// megatron_port::attention_forward, attention_backward: fused attention.
#include "attention.h"

#include <array>
#include <tuple>

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_attention_forward)> forward{"mp_attention_forward"};
const Function<decltype(mp_attention_backward)> backward{"mp_attention_backward"};

using Strides = std::array<int64_t, 4>;

// Of all dimensions but the last, which must be contiguous.
Strides strides_of(const char* op, const Tensor& x) {
  Strides out{};
  const int64_t last = x.dim() - 1;
  check(x.stride(last) == 1 || x.size(last) == 1, op, "a last dimension is not contiguous; call .contiguous() first");
  for (int64_t i = 0; i < last; i++) out[i] = x.stride(i);
  return out;
}

// The sizes, after the checks that both ops make. `moved`: the mask says where each query ends.
mp_attention_shape shape_of(
    const char* op, const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale, bool moved) {
  check(q.dim() == 5 && k.dim() == 4 && v.dim() == 4, op, "q must be [s, b, g, r, d], k and v [keys, b, g, d]");
  for (const Tensor* t : {&q, &k, &v}) {
    check(t->is_cpu() == q.is_cpu() && t->get_device_index() == q.get_device_index(), op,
          "the tensors are on different devices");
    check(t->scalar_type() == q.scalar_type(), op, "the tensors have different dtypes");
  }
  const auto a = q.sizes(), b = k.sizes(), c = v.sizes();
  const bool alike = b[0] == c[0] && b[1] == c[1] && b[2] == c[2] && b[3] == c[3];
  check(alike && b[1] == a[1] && b[2] == a[2] && b[3] == a[4], op, "q, k and v do not fit together");
  check(!causal || a[0] == b[0] || moved, op, "causal attention needs as many queries as keys");
  check(b[0] >= 1 && a[2] >= 1 && a[3] >= 1 && a[4] >= 1 && a[4] <= 1024, op,
        "needs keys, heads, and head sizes of 1 to 1024");
  return {a[0], b[0], a[1], a[2], a[3], a[4], causal, static_cast<float>(scale)};
}

// Dropout of the probabilities; nothing where `keys` is not given.
std::optional<mp_probability_mask> dropout_of(
    const char* op, const mp_attention_shape& shape, const Tensor& q, const std::optional<Tensor>& keys,
    int64_t op_key, int64_t threshold, int64_t head_offset) {
  if (!keys.has_value()) return std::nullopt;
  check(shape.causal, op, "dropout is for causal attention");
  check(threshold >= 1 && threshold < 65536, op, "threshold must be in 1 ... 65535");
  check(head_offset >= 0, op, "head_offset must not be negative");
  check_tensor(op, "keys", *keys, q, ScalarType::Long, shape.batch);
  return mp_probability_mask{static_cast<const int64_t*>(keys->data_ptr()), op_key, static_cast<int32_t>(threshold),
                             shape.groups * shape.per_group, head_offset};
}

// What queries see and what happens to scores.
mp_attention_mask mask_of(
    const char* op, const mp_attention_shape& shape, const Tensor& q, const std::optional<Tensor>& first,
    const std::optional<Tensor>& end, const std::optional<Tensor>& sinks, int64_t window, double softcap) {
  const bool any = first.has_value() || end.has_value() || sinks.has_value() || window != 0 || softcap != 0.0;
  check(shape.causal || !any, op, "a mask is for causal attention");
  check(window >= 0 && softcap >= 0.0, op, "window and softcap must not be negative");
  if (first.has_value()) check_tensor(op, "first", *first, q, ScalarType::Int, shape.batch * shape.seq);
  if (end.has_value()) check_tensor(op, "end", *end, q, ScalarType::Int, shape.seq);
  if (sinks.has_value()) check_tensor(op, "sinks", *sinks, q, ScalarType::Float, shape.groups * shape.per_group);
  return {static_cast<const int32_t*>(pointer(first)), static_cast<const int32_t*>(pointer(end)),
          static_cast<const float*>(pointer(sinks)), window, static_cast<float>(softcap)};
}

// What GPUs' kernels and the emulated ones cannot do, in words; they would answer with a code alone.
void check_limits(
    const char* op, const mp_attention_shape& shape, const mp_attention_mask& mask,
    std::initializer_list<const Tensor*> tensors) {
  if (!on_device_kernels((*tensors.begin())->is_cpu())) return;
  check(shape.d % 8 == 0 && shape.d <= 128, op, "on a GPU head sizes are multiples of 8 up to 128");
  check(mask.sinks == nullptr && mask.softcap == 0.0f, op, "on a GPU there are no sinks and no soft-cap");
  for (const Tensor* t : tensors) {
    check((*tensors.begin())->scalar_type() != ScalarType::Float, op, "on a GPU takes float16 and bfloat16 tensors only");
    int64_t all = reinterpret_cast<uintptr_t>(t->data_ptr()) / sizeof(uint16_t);
    for (int64_t i = 0; i + 1 < t->dim(); i++) all |= t->stride(i);
    check(all % 8 == 0, op, "on a GPU rows of heads start at multiples of 16 bytes; call .contiguous() first");
  }
}

// out like q, contiguous; rows [b, g, r, 2, s]
std::tuple<Tensor, Tensor> attention_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, double scale, bool causal, const std::optional<Tensor>& keys,
    int64_t op_key, int64_t threshold, int64_t head_offset, const std::optional<Tensor>& first,
    const std::optional<Tensor>& end, const std::optional<Tensor>& sinks, int64_t window, double softcap) {
  const char* op = "attention_forward";
  const int32_t dtype = dtype_of(q, op);
  const mp_attention_shape shape = shape_of(op, q, k, v, causal, scale, end.has_value());
  const auto dropout = dropout_of(op, shape, q, keys, op_key, threshold, head_offset);
  const mp_attention_mask mask = mask_of(op, shape, q, first, end, sinks, window, softcap);
  const Strides qs = strides_of(op, q), ks = strides_of(op, k), vs = strides_of(op, v);
  check_limits(op, shape, mask, {&q, &k, &v});
  const Where where(q);
  const int64_t sizes[] = {shape.seq, shape.batch, shape.groups, shape.per_group, shape.d};
  Tensor out = torch::stable::new_empty(q, {sizes, 5});
  Tensor rows = floats(q, {shape.batch, shape.groups, shape.per_group, 2, shape.seq});
  check_code(
      forward.on(q)(
          where.stream(), dtype, &shape, q.data_ptr(), qs.data(), k.data_ptr(), ks.data(), v.data_ptr(), vs.data(),
          dropout.has_value() ? &*dropout : nullptr, shape.causal ? &mask : nullptr, out.data_ptr(),
          static_cast<float*>(rows.data_ptr())),
      q, op);
  return {out, rows};
}

// Writes dq, dk and dv, which are like q, k and v but for their strides, and dsinks [b, g * r] where there are sinks.
void attention_backward_(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& rows,
    const Tensor& dq, const Tensor& dk, const Tensor& dv, double scale, bool causal, const std::optional<Tensor>& keys,
    int64_t op_key, int64_t threshold, int64_t head_offset, const std::optional<Tensor>& first,
    const std::optional<Tensor>& end, const std::optional<Tensor>& sinks, int64_t window, double softcap,
    const std::optional<Tensor>& dsinks) {
  const char* op = "attention_backward_";
  const int32_t dtype = dtype_of(q, op);
  const mp_attention_shape shape = shape_of(op, q, k, v, causal, scale, end.has_value());
  const mp_attention_shape theirs = shape_of(op, dq, dk, dv, causal, scale, end.has_value());
  check(theirs.seq == shape.seq && theirs.keys == shape.keys && theirs.batch == shape.batch &&
            theirs.groups == shape.groups && theirs.per_group == shape.per_group && theirs.d == shape.d &&
            dq.scalar_type() == q.scalar_type(),
        op, "the gradients differ from q, k and v in shape or dtype");
  check_tensor(op, "dout", dout, q, q.scalar_type(), q.numel());
  check_tensor(op, "out", out, q, q.scalar_type(), q.numel());
  check_tensor(
      op, "rows", rows, q, ScalarType::Float, 2 * shape.batch * shape.groups * shape.per_group * shape.seq);
  const auto dropout = dropout_of(op, shape, q, keys, op_key, threshold, head_offset);
  const mp_attention_mask mask = mask_of(op, shape, q, first, end, sinks, window, softcap);
  check(sinks.has_value() == dsinks.has_value(), op, "sinks and dsinks are given together");
  if (dsinks.has_value()) {
    check_tensor(op, "dsinks", *dsinks, q, ScalarType::Float, shape.batch * shape.groups * shape.per_group);
  }
  const Strides qs = strides_of(op, q), ks = strides_of(op, k), vs = strides_of(op, v);
  const Strides dqs = strides_of(op, dq), dks = strides_of(op, dk), dvs = strides_of(op, dv);
  check_limits(op, shape, mask, {&q, &k, &v, &dq, &dk, &dv, &dout, &out});
  const Where where(q);
  Tensor along = on_device_kernels(q.is_cpu())
                     ? floats(q, {shape.batch, shape.groups, shape.per_group, shape.seq})
                     : nothing(q);
  check_code(
      backward.on(q)(
          where.stream(), dtype, &shape, dout.data_ptr(), q.data_ptr(), qs.data(), k.data_ptr(), ks.data(), v.data_ptr(),
          vs.data(), out.data_ptr(), static_cast<const float*>(rows.data_ptr()),
          dropout.has_value() ? &*dropout : nullptr, shape.causal ? &mask : nullptr, dq.data_ptr(), dqs.data(),
          dk.data_ptr(), dks.data(), dv.data_ptr(), dvs.data(),
          dsinks.has_value() ? static_cast<float*>(dsinks->data_ptr()) : nullptr,
          static_cast<float*>(along.data_ptr())),
      q, op);
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, float scale, bool causal, Tensor? keys=None, int op_key=0, "
      "int threshold=0, int head_offset=0, Tensor? first=None, Tensor? end=None, Tensor? sinks=None, int window=0, "
      "float softcap=0.0) -> (Tensor out, Tensor rows)");
  m.def(
      "attention_backward_(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor rows, Tensor(a!) dq, "
      "Tensor(b!) dk, Tensor(c!) dv, float scale, bool causal, Tensor? keys=None, int op_key=0, int threshold=0, "
      "int head_offset=0, Tensor? first=None, Tensor? end=None, Tensor? sinks=None, int window=0, "
      "float softcap=0.0, Tensor(d!)? dsinks=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&mp::attention_forward));
  m.impl("attention_backward_", TORCH_BOX(&mp::attention_backward_));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&mp::attention_forward));
  m.impl("attention_backward_", TORCH_BOX(&mp::attention_backward_));
}

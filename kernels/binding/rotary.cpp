// megatron_port::rotary_forward, rotary_backward, split_backward: split of the fused projection with rotary embedding.
#include "rotary.h"

#include <string>
#include <tuple>

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_rotary_forward)> forward{"mp_rotary_forward"};
const Function<decltype(mp_rotary_backward)> backward{"mp_rotary_backward"};
const Function<decltype(mp_split_backward)> split{"mp_split_backward"};
const Function<decltype(mp_split_workspace)> workspace{"mp_split_workspace"};

// The rows of cos and sin from `offset` on; NULL both without them.
struct Tables {
  const float *cos = nullptr, *sin = nullptr;

  Tables(const std::optional<Tensor>& cosines, const std::optional<Tensor>& sines, int64_t offset, int64_t seq,
         int64_t size, const Tensor& like, const char* op) {
    check(cosines.has_value() == sines.has_value(), op, "give both of cos and sin, or neither");
    if (!cosines.has_value()) return;
    const int64_t half = size / 2;
    check(cosines->dim() == 2 && cosines->sizes()[1] == half, op, "cos and sin must be [positions, d / 2]");
    const int64_t positions = cosines->sizes()[0];
    if (offset < 0 || offset + seq > positions) {
      fail(std::string("megatron_port::") + op + ": cos and sin have " + std::to_string(positions) +
           " positions, but offset " + std::to_string(offset) + " + sequence " + std::to_string(seq) +
           " needs those up to " + std::to_string(offset + seq));
    }
    check_tensor(op, "cos", *cosines, like, ScalarType::Float, positions * half);
    check_tensor(op, "sin", *sines, like, ScalarType::Float, positions * half);
    cos = static_cast<const float*>(cosines->data_ptr()) + offset * half;
    sin = static_cast<const float*>(sines->data_ptr()) + offset * half;
  }
};

void check_size(int64_t size, const char* op) {
  check(size >= 2 && size <= 512 && size % 2 == 0, op, "the head size d must be even and at most 512");
}

std::tuple<Tensor, Tensor, Tensor> rotary_forward(
    const Tensor& qkv, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, int64_t offset) {
  const char* op = "rotary_forward";
  const int32_t dtype = dtype_of(qkv, op);
  check_alike(op, {&qkv});
  check(qkv.dim() == 5 && qkv.sizes()[2] >= 1 && qkv.sizes()[3] >= 3, op,
        "qkv must be [s, b, g, r + 2, d] with g ≥ 1 and r ≥ 1");
  const auto sizes = qkv.sizes();
  const int64_t seq = sizes[0], batch = sizes[1], groups = sizes[2], per_group = sizes[3] - 2, size = sizes[4];
  check_size(size, op);
  const Tables tables(cos, sin, offset, seq, size, qkv, op);
  const Where where(qkv);
  const auto heads = [&](int64_t count) {
    const int64_t shape[] = {seq, batch, count, size};
    return torch::stable::new_empty(qkv, {shape, 4});
  };
  Tensor q = heads(groups * per_group), k = heads(groups), v = heads(groups);
  check_code(
      forward.on(qkv)(
          where.stream(), dtype, seq, batch, groups, per_group, size, qkv.data_ptr(), tables.cos, tables.sin,
          q.data_ptr(), k.data_ptr(), v.data_ptr()),
      qkv, op);
  return {q, k, v};
}

// The three gradients, after the checks that both ops make.
struct Gradients {
  int64_t seq, batch, groups, per_group, size;
  int64_t strides[9];  // seq, batch, head of dq, of dk, of dv

  Gradients(const Tensor& dq, const Tensor& dk, const Tensor& dv, const char* op) {
    check(dq.dim() == 4 && dk.dim() == 4 && dv.dim() == 4, op, "dq, dk, dv must be [s, b, heads, d]");
    seq = dk.sizes()[0], batch = dk.sizes()[1], groups = dk.sizes()[2], size = dk.sizes()[3];
    check(groups >= 1 && dq.sizes()[2] >= groups && dq.sizes()[2] % groups == 0, op,
          "the heads of dq must be a multiple of those of dk");
    check_size(size, op);
    int64_t* next = strides;
    for (const Tensor* t : {&dq, &dk, &dv}) {
      const auto sizes = t->sizes();
      check(sizes[0] == seq && sizes[1] == batch && sizes[3] == size && (t == &dq || sizes[2] == groups), op,
            "dq, dk and dv differ in sequence, batch, groups or head size");
      check(t->strides()[3] == 1, op, "the last dimension of a gradient is not contiguous; call .contiguous() first");
      check(t->scalar_type() == dq.scalar_type(), op, "the tensors have different dtypes");
      check(t->is_cpu() == dq.is_cpu() && t->get_device_index() == dq.get_device_index(), op,
            "the tensors are on different devices");
      // The stride of a dimension of one element means nothing and may be odd.
      for (int i = 0; i < 3; i++) *next++ = sizes[i] == 1 ? 0 : t->strides()[i];
    }
    per_group = dq.sizes()[2] / groups;
  }

  Tensor packed(const Tensor& like) const {
    const int64_t shape[] = {seq, batch, groups, per_group + 2, size};
    return torch::stable::new_empty(like, {shape, 5});
  }
};

Tensor rotary_backward(
    const Tensor& dq, const Tensor& dk, const Tensor& dv, const std::optional<Tensor>& cos,
    const std::optional<Tensor>& sin, int64_t offset) {
  const char* op = "rotary_backward";
  const int32_t dtype = dtype_of(dq, op);
  const Gradients a(dq, dk, dv, op);
  const Tables tables(cos, sin, offset, a.seq, a.size, dq, op);
  const Where where(dq);
  Tensor dqkv = a.packed(dq);
  check_code(
      backward.on(dq)(
          where.stream(), dtype, a.seq, a.batch, a.groups, a.per_group, a.size, dq.data_ptr(), dk.data_ptr(),
          dv.data_ptr(), a.strides, tables.cos, tables.sin, dqkv.data_ptr()),
      dq, op);
  return dqkv;
}

// dqkv, dbias, slots in its place (empty where it is written)
std::tuple<Tensor, Tensor, Tensor> split_backward(
    const Tensor& dq, const Tensor& dk, const Tensor& dv, bool keep_slots) {
  const char* op = "split_backward";
  const int32_t dtype = dtype_of(dq, op);
  const Gradients a(dq, dk, dv, op);
  const int64_t rows = a.seq * a.batch, cols = a.groups * (a.per_group + 2) * a.size;
  const Where where(dq);
  Tensor dqkv = a.packed(dq), dbias = torch::stable::new_empty(dq, {cols});
  if (rows == 0) {
    torch::stable::fill_(dbias, 0.0);
    return {dqkv, dbias, nothing(dbias)};
  }
  SlotSpace space(dq, workspace.on(dq)(rows, cols), keep_slots);
  check_code(
      split.on(dq)(
          where.stream(), dtype, a.seq, a.batch, a.groups, a.per_group, a.size, dq.data_ptr(), dk.data_ptr(),
          dv.data_ptr(), a.strides, dqkv.data_ptr(), dbias.data_ptr(), space.at(), space.kept()),
      dq, op);
  return {dqkv, dbias, space.slots(1, cols)};
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def("rotary_forward(Tensor qkv, Tensor? cos, Tensor? sin, int offset) -> (Tensor q, Tensor k, Tensor v)");
  m.def("rotary_backward(Tensor dq, Tensor dk, Tensor dv, Tensor? cos, Tensor? sin, int offset) -> Tensor");
  m.def("split_backward(Tensor dq, Tensor dk, Tensor dv, bool keep_slots=False) "
      "-> (Tensor dqkv, Tensor dbias, Tensor slots)");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("rotary_forward", TORCH_BOX(&mp::rotary_forward));
  m.impl("rotary_backward", TORCH_BOX(&mp::rotary_backward));
  m.impl("split_backward", TORCH_BOX(&mp::split_backward));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("rotary_forward", TORCH_BOX(&mp::rotary_forward));
  m.impl("rotary_backward", TORCH_BOX(&mp::rotary_backward));
  m.impl("split_backward", TORCH_BOX(&mp::split_backward));
}

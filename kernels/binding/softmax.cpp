// megatron_port::causal_softmax_forward, causal_softmax_backward, and the two with dropout.
#include "softmax.h"

#include <tuple>

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_softmax_forward)> forward{"mp_softmax_forward"};
const Function<decltype(mp_softmax_backward)> backward{"mp_softmax_backward"};

void check_scores(const char* op, const Tensor& scores) {
  check(scores.dim() == 4 && scores.size(2) >= 1, op, "the tensor must be [b, heads, q, k] with q of at least 1");
  check(scores.size(3) >= scores.size(2), op, "fewer keys than queries: the first rows would see nothing");
}

mp_probability_mask mask_of(
    const char* op, const Tensor& scores, const Tensor& keys, int64_t op_key, int64_t threshold, int64_t head_offset) {
  check(threshold >= 1 && threshold < 65536, op, "threshold must be in 1 ... 65535");
  check(head_offset >= 0, op, "head_offset must not be negative");
  check_tensor(op, "keys", keys, scores, ScalarType::Long, scores.size(0));
  return {static_cast<const int64_t*>(keys.data_ptr()), op_key, static_cast<int32_t>(threshold), scores.size(1),
          head_offset};
}

// Writes probs, and dropped where there is a mask.
void run_forward(
    const char* op, const Tensor& scores, double scale, const Tensor& probs, const mp_probability_mask* mask,
    void* dropped) {
  const Where where(scores);
  check_code(
      forward.on(scores)(
          where.stream(), dtype_of(scores, op), scores.size(0) * scores.size(1), scores.size(2),
          scores.size(3), static_cast<float>(scale), scores.data_ptr(), probs.data_ptr(), mask, dropped),
      scores, op);
}

Tensor run_backward(
    const char* op, const Tensor& grads, const Tensor& probs, double scale, const mp_probability_mask* mask) {
  check(grads.numel() == probs.numel(), op, "the gradient and probs differ in shape");
  const Where where(probs);
  Tensor dscores = torch::stable::empty_like(probs);
  check_code(
      backward.on(probs)(
          where.stream(), dtype_of(probs, op), probs.size(0) * probs.size(1), probs.size(2), probs.size(3),
          static_cast<float>(scale), grads.data_ptr(), probs.data_ptr(), mask, dscores.data_ptr()),
      probs, op);
  return dscores;
}

Tensor softmax_forward(const Tensor& scores, double scale) {
  const char* op = "causal_softmax_forward";
  check_alike(op, {&scores});
  check_scores(op, scores);
  Tensor probs = torch::stable::empty_like(scores);
  run_forward(op, scores, scale, probs, nullptr, nullptr);
  return probs;
}

Tensor softmax_backward(const Tensor& dprobs, const Tensor& probs, double scale) {
  const char* op = "causal_softmax_backward";
  check_alike(op, {&probs, &dprobs});
  check_scores(op, probs);
  return run_backward(op, dprobs, probs, scale, nullptr);
}

// (dropped, probs)
std::tuple<Tensor, Tensor> dropout_forward(
    const Tensor& scores, double scale, const Tensor& keys, int64_t op_key, int64_t threshold, int64_t head_offset) {
  const char* op = "causal_softmax_dropout_forward";
  check_alike(op, {&scores});
  check_scores(op, scores);
  const mp_probability_mask mask = mask_of(op, scores, keys, op_key, threshold, head_offset);
  Tensor dropped = torch::stable::empty_like(scores), probs = torch::stable::empty_like(scores);
  run_forward(op, scores, scale, probs, &mask, dropped.data_ptr());
  return {dropped, probs};
}

Tensor dropout_backward(
    const Tensor& ddropped, const Tensor& probs, const Tensor& keys, double scale, int64_t op_key, int64_t threshold,
    int64_t head_offset) {
  const char* op = "causal_softmax_dropout_backward";
  check_alike(op, {&probs, &ddropped});
  check_scores(op, probs);
  const mp_probability_mask mask = mask_of(op, probs, keys, op_key, threshold, head_offset);
  return run_backward(op, ddropped, probs, scale, &mask);
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def("causal_softmax_forward(Tensor scores, float scale) -> Tensor");
  m.def("causal_softmax_backward(Tensor dprobs, Tensor probs, float scale) -> Tensor");
  m.def(
      "causal_softmax_dropout_forward(Tensor scores, float scale, Tensor keys, int op_key, int threshold, "
      "int head_offset) -> (Tensor dropped, Tensor probs)");
  m.def(
      "causal_softmax_dropout_backward(Tensor ddropped, Tensor probs, Tensor keys, float scale, int op_key, "
      "int threshold, int head_offset) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("causal_softmax_forward", TORCH_BOX(&mp::softmax_forward));
  m.impl("causal_softmax_backward", TORCH_BOX(&mp::softmax_backward));
  m.impl("causal_softmax_dropout_forward", TORCH_BOX(&mp::dropout_forward));
  m.impl("causal_softmax_dropout_backward", TORCH_BOX(&mp::dropout_backward));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("causal_softmax_forward", TORCH_BOX(&mp::softmax_forward));
  m.impl("causal_softmax_backward", TORCH_BOX(&mp::softmax_backward));
  m.impl("causal_softmax_dropout_forward", TORCH_BOX(&mp::dropout_forward));
  m.impl("causal_softmax_dropout_backward", TORCH_BOX(&mp::dropout_backward));
}

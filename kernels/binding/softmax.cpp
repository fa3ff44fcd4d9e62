// megatron_port::causal_softmax_forward, causal_softmax_backward.
#include "softmax.h"

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_softmax_forward)> forward{"mp_softmax_forward"};
const Function<decltype(mp_softmax_backward)> backward{"mp_softmax_backward"};

void check_scores(const char* op, const Tensor& scores) {
  check(scores.dim() == 4 && scores.size(2) >= 1, op, "the tensor must be [b, heads, q, k] with q of at least 1");
  check(scores.size(3) >= scores.size(2), op, "fewer keys than queries: the first rows would see nothing");
}

Tensor softmax_forward(const Tensor& scores, double scale) {
  const char* op = "causal_softmax_forward";
  const int32_t dtype = dtype_of(scores, op);
  check_alike(op, {&scores});
  check_scores(op, scores);
  const Where where(scores);
  Tensor probs = torch::stable::empty_like(scores);
  check_code(
      forward.on(scores)(
          where.stream(), dtype, scores.size(0) * scores.size(1), scores.size(2), scores.size(3),
          static_cast<float>(scale), scores.data_ptr(), probs.data_ptr()),
      scores, op);
  return probs;
}

Tensor softmax_backward(const Tensor& dprobs, const Tensor& probs, double scale) {
  const char* op = "causal_softmax_backward";
  const int32_t dtype = dtype_of(probs, op);
  check_alike(op, {&probs, &dprobs});
  check_scores(op, probs);
  check(dprobs.numel() == probs.numel(), op, "dprobs and probs differ in shape");
  const Where where(probs);
  Tensor dscores = torch::stable::empty_like(probs);
  check_code(
      backward.on(probs)(
          where.stream(), dtype, probs.size(0) * probs.size(1), probs.size(2), probs.size(3),
          static_cast<float>(scale), dprobs.data_ptr(), probs.data_ptr(), dscores.data_ptr()),
      probs, op);
  return dscores;
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def("causal_softmax_forward(Tensor scores, float scale) -> Tensor");
  m.def("causal_softmax_backward(Tensor dprobs, Tensor probs, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("causal_softmax_forward", TORCH_BOX(&mp::softmax_forward));
  m.impl("causal_softmax_backward", TORCH_BOX(&mp::softmax_backward));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("causal_softmax_forward", TORCH_BOX(&mp::softmax_forward));
  m.impl("causal_softmax_backward", TORCH_BOX(&mp::softmax_backward));
}

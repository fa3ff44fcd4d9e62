// megatron_port::route, route_backward: the router of a mixture of experts.
#include "route.h"

#include <tuple>

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_route)> forward{"mp_route"};
const Function<decltype(mp_route_backward)> backward{"mp_route_backward"};

mp_routing routing_of(
    const char* op, const Tensor& matrix, int64_t k, bool sigmoid, int64_t groups, int64_t top_groups, bool two,
    bool normalise, double scale) {
  check_alike(op, {&matrix});
  check(matrix.scalar_type() == ScalarType::Float && matrix.dim() == 2, op,
        "logits and scores must be float32 [tokens, experts]");
  const int64_t experts = matrix.size(1);
  for (const int64_t size : {experts, k, groups, top_groups}) {
    check(size >= 1 && size <= MP_MOST_EXPERTS, op,
          ("experts, k, groups and top_groups must be from 1 to " + std::to_string(MP_MOST_EXPERTS)).c_str());
  }
  const mp_routing out{
      matrix.size(0), static_cast<int32_t>(experts), static_cast<int32_t>(k), static_cast<int32_t>(groups),
      static_cast<int32_t>(top_groups), sigmoid ? MP_SIGMOID : MP_SOFTMAX, two ? 1 : 0, normalise ? 1 : 0,
      static_cast<float>(scale)};
  check(mp_routing_fits(out), op,
        ("cannot choose " + std::to_string(k) + " of " + std::to_string(experts) + " experts from the best " +
         std::to_string(top_groups) + " of " + std::to_string(groups) + " groups: k and groups are at most " +
         std::to_string(MP_MOST_ROUTED) + ", groups are equal, and the best ones must hold k experts" +
         (two ? " and each group two" : ""))
            .c_str());
  return out;
}

void check_chosen(const char* op, const Tensor& chosen, const mp_routing& r, const Tensor& like) {
  check_tensor(op, "chosen", chosen, like, ScalarType::Long, r.tokens * r.k);
  if (!chosen.is_cpu()) return;
  const int64_t* at = static_cast<const int64_t*>(chosen.data_ptr());
  for (int64_t i = 0; i < chosen.numel(); i++) {
    check(at[i] >= 0 && at[i] < r.experts, op,
          ("chosen has " + std::to_string(at[i]) + ", which is none of the " + std::to_string(r.experts) +
           " experts").c_str());
  }
}

// chosen and weights [tokens, k], scores [tokens, experts], margin [tokens]
std::tuple<Tensor, Tensor, Tensor, Tensor> route(
    const Tensor& logits, const std::optional<Tensor>& bias, const std::optional<Tensor>& given, int64_t k,
    bool sigmoid, int64_t groups, int64_t top_groups, bool two, bool normalise, double scale) {
  const char* op = "route";
  const mp_routing r = routing_of(op, logits, k, sigmoid, groups, top_groups, two, normalise, scale);
  if (bias.has_value()) check_tensor(op, "bias", *bias, logits, ScalarType::Float, r.experts);
  if (given.has_value()) check_chosen(op, *given, r, logits);
  const Where where(logits);
  const int64_t shape[] = {r.tokens, k};
  Tensor chosen = torch::stable::new_empty(logits, {shape, size_t{2}}, ScalarType::Long);
  Tensor weights = floats(logits, {r.tokens, k}), scores = torch::stable::empty_like(logits);
  Tensor margin = floats(logits, {r.tokens});
  check_code(
      forward.on(logits)(
          where.stream(), &r, static_cast<const float*>(logits.data_ptr()), static_cast<const float*>(pointer(bias)),
          static_cast<const int64_t*>(pointer(given)), static_cast<int64_t*>(chosen.data_ptr()),
          static_cast<float*>(weights.data_ptr()), static_cast<float*>(scores.data_ptr()),
          static_cast<float*>(margin.data_ptr())),
      logits, op);
  return {chosen, weights, scores, margin};
}

Tensor route_backward(
    const Tensor& scores, const Tensor& chosen, const std::optional<Tensor>& dweights,
    const std::optional<Tensor>& dscores, bool sigmoid, bool normalise, double scale) {
  const char* op = "route_backward";
  check(chosen.dim() == 2, op, "chosen must be [tokens, k]");
  const mp_routing r = routing_of(op, scores, chosen.size(1), sigmoid, 1, 1, false, normalise, scale);
  check_chosen(op, chosen, r, scores);
  if (dweights.has_value()) check_tensor(op, "dweights", *dweights, scores, ScalarType::Float, chosen.numel());
  if (dscores.has_value()) check_tensor(op, "dscores", *dscores, scores, ScalarType::Float, scores.numel());
  const Where where(scores);
  Tensor dlogits = torch::stable::empty_like(scores);
  check_code(
      backward.on(scores)(
          where.stream(), &r, static_cast<const float*>(scores.data_ptr()),
          static_cast<const int64_t*>(chosen.data_ptr()), static_cast<const float*>(pointer(dweights)),
          static_cast<const float*>(pointer(dscores)), static_cast<float*>(dlogits.data_ptr())),
      scores, op);
  return dlogits;
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def(
      "route(Tensor logits, Tensor? bias, Tensor? given, int k, bool sigmoid, int groups, int top_groups, bool two, "
      "bool normalise, float scale) -> (Tensor chosen, Tensor weights, Tensor scores, Tensor margin)");
  m.def(
      "route_backward(Tensor scores, Tensor chosen, Tensor? dweights, Tensor? dscores, bool sigmoid, bool normalise, "
      "float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("route", TORCH_BOX(&mp::route));
  m.impl("route_backward", TORCH_BOX(&mp::route_backward));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("route", TORCH_BOX(&mp::route));
  m.impl("route_backward", TORCH_BOX(&mp::route_backward));
}

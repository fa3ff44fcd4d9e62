// megatron_port::adamw_bf16_, adamw_8bit_, lion_: on lists of tensors, nothing read back to the host.
#include "narrow_adamw.h"

#include "lists.h"

namespace mp {
namespace {

const Function<decltype(mp_adamw_bf16)> adamw_bf16{"mp_adamw_bf16"};
const Function<decltype(mp_adamw_8bit)> adamw_8bit{"mp_adamw_8bit"};
const Function<decltype(mp_lion)> lion{"mp_lion"};

constexpr int64_t kPlaceNumbers = 5;
constexpr int64_t kValues = 256;

// `places`: five numbers a tensor, on the host, in the order of mp_place.
void adamw_bf16_(
    const std::vector<Tensor>& weights, const std::vector<Tensor>& masters, const std::vector<Tensor>& grads,
    const std::vector<Tensor>& exp_avg, const std::vector<Tensor>& exp_avg_sq, const std::vector<int64_t>& places,
    const Tensor& step, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& skip, const Tensor& lr,
    double beta1, double beta2, double eps, double weight_decay) {
  const char* op = "adamw_bf16_";
  if (masters.empty()) return;
  const Tensor& first = masters[0];
  const UpdateLists lists(op, weights, masters, grads);
  check_list(op, "exp_avg", exp_avg, masters, ScalarType::BFloat16);
  check_list(op, "exp_avg_sq", exp_avg_sq, masters, ScalarType::BFloat16);
  check(static_cast<int64_t>(places.size()) == kPlaceNumbers * lists.count(), op, "places needs five numbers a tensor");
  std::vector<mp_place> place;
  for (size_t i = 0; i < places.size(); i += kPlaceNumbers) {
    check(places[i] >= 0 && places[i + 1] > 0, op, "a place needs a start of at least 0 and a run above it");
    place.push_back({places[i], places[i + 1], places[i + 2], places[i + 3], places[i + 4]});
  }
  const bool whole = check_step(op, first, &step, grad_scale, skip, lr, beta1, beta2);
  check(eps >= 0.0 && weight_decay >= 0.0, op, "eps and weight_decay must not be negative");
  const Where where(first);
  check_code(
      adamw_bf16.on(first)(
          where.stream(), lists.weight_dtype, lists.grad_dtype, lists.count(), lists.weight_list(),
          lists.masters.data(), lists.grads.data(), pointers<uint16_t>(exp_avg).data(),
          pointers<uint16_t>(exp_avg_sq).data(), lists.sizes.data(), place.data(), step.data_ptr(), whole,
          static_cast<const float*>(pointer(grad_scale)), static_cast<const float*>(pointer(skip)),
          static_cast<const double*>(lr.data_ptr()), beta1, beta2, eps, weight_decay),
      first, op);
}

// Fails unless there is a float for each block of each tensor, and every tensor is whole blocks.
void check_scales(
    const char* op, const char* name, const std::vector<Tensor>& scales, const std::vector<Tensor>& masters) {
  check(scales.size() == masters.size(), op, "there must be as many scales as masters");
  for (size_t i = 0; i < scales.size(); i++) {
    check(masters[i].numel() % MP_STATE_BLOCK == 0, op, "a tensor is not whole blocks of 128 elements");
    check_tensor(op, name, scales[i], masters[0], ScalarType::Float, masters[i].numel() / MP_STATE_BLOCK);
  }
}

void adamw_8bit_(
    const std::vector<Tensor>& weights, const std::vector<Tensor>& masters, const std::vector<Tensor>& grads,
    const std::vector<Tensor>& exp_avg, const std::vector<Tensor>& exp_avg_scale, const std::vector<Tensor>& exp_avg_sq,
    const std::vector<Tensor>& exp_avg_sq_scale, const Tensor& signed_values, const Tensor& unsigned_values,
    const Tensor& step, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& skip, const Tensor& lr,
    double beta1, double beta2, double eps, double weight_decay) {
  const char* op = "adamw_8bit_";
  if (masters.empty()) return;
  const Tensor& first = masters[0];
  const UpdateLists lists(op, weights, masters, grads);
  check_list(op, "exp_avg", exp_avg, masters, ScalarType::Byte);
  check_list(op, "exp_avg_sq", exp_avg_sq, masters, ScalarType::Byte);
  check_scales(op, "exp_avg_scale", exp_avg_scale, masters);
  check_scales(op, "exp_avg_sq_scale", exp_avg_sq_scale, masters);
  check_tensor(op, "signed_values", signed_values, first, ScalarType::Float, kValues);
  check_tensor(op, "unsigned_values", unsigned_values, first, ScalarType::Float, kValues);
  const bool whole = check_step(op, first, &step, grad_scale, skip, lr, beta1, beta2);
  check(eps >= 0.0 && weight_decay >= 0.0, op, "eps and weight_decay must not be negative");
  const Where where(first);
  check_code(
      adamw_8bit.on(first)(
          where.stream(), lists.weight_dtype, lists.grad_dtype, lists.count(), lists.weight_list(),
          lists.masters.data(), lists.grads.data(), pointers<uint8_t>(exp_avg).data(),
          pointers<float>(exp_avg_scale).data(), pointers<uint8_t>(exp_avg_sq).data(),
          pointers<float>(exp_avg_sq_scale).data(), lists.sizes.data(),
          static_cast<const float*>(signed_values.data_ptr()), static_cast<const float*>(unsigned_values.data_ptr()),
          step.data_ptr(), whole, static_cast<const float*>(pointer(grad_scale)),
          static_cast<const float*>(pointer(skip)), static_cast<const double*>(lr.data_ptr()), beta1, beta2, eps,
          weight_decay),
      first, op);
}

void lion_(
    const std::vector<Tensor>& weights, const std::vector<Tensor>& masters, const std::vector<Tensor>& grads,
    const std::vector<Tensor>& exp_avg, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& skip,
    const Tensor& lr, double beta1, double beta2, double weight_decay) {
  const char* op = "lion_";
  if (masters.empty()) return;
  const Tensor& first = masters[0];
  const UpdateLists lists(op, weights, masters, grads);
  check_list(op, "exp_avg", exp_avg, masters, ScalarType::Float);
  check_step(op, first, nullptr, grad_scale, skip, lr, beta1, beta2);
  check(weight_decay >= 0.0, op, "weight_decay must not be negative");
  const Where where(first);
  check_code(
      lion.on(first)(
          where.stream(), lists.weight_dtype, lists.grad_dtype, lists.count(), lists.weight_list(),
          lists.masters.data(), lists.grads.data(), pointers<float>(exp_avg).data(), lists.sizes.data(),
          static_cast<const float*>(pointer(grad_scale)), static_cast<const float*>(pointer(skip)),
          static_cast<const double*>(lr.data_ptr()), beta1, beta2, weight_decay),
      first, op);
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def(
      "adamw_bf16_(Tensor(a!)[] weights, Tensor(b!)[] masters, Tensor[] grads, Tensor(c!)[] exp_avg, "
      "Tensor(d!)[] exp_avg_sq, int[] places, Tensor step, Tensor? grad_scale, Tensor? skip, Tensor lr, float beta1, "
      "float beta2, float eps, float weight_decay) -> ()");
  m.def(
      "adamw_8bit_(Tensor(a!)[] weights, Tensor(b!)[] masters, Tensor[] grads, Tensor(c!)[] exp_avg, "
      "Tensor(d!)[] exp_avg_scale, Tensor(e!)[] exp_avg_sq, Tensor(f!)[] exp_avg_sq_scale, Tensor signed_values, "
      "Tensor unsigned_values, Tensor step, Tensor? grad_scale, Tensor? skip, Tensor lr, float beta1, float beta2, "
      "float eps, float weight_decay) -> ()");
  m.def(
      "lion_(Tensor(a!)[] weights, Tensor(b!)[] masters, Tensor[] grads, Tensor(c!)[] exp_avg, Tensor? grad_scale, "
      "Tensor? skip, Tensor lr, float beta1, float beta2, float weight_decay) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("adamw_bf16_", TORCH_BOX(&mp::adamw_bf16_));
  m.impl("adamw_8bit_", TORCH_BOX(&mp::adamw_8bit_));
  m.impl("lion_", TORCH_BOX(&mp::lion_));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("adamw_bf16_", TORCH_BOX(&mp::adamw_bf16_));
  m.impl("adamw_8bit_", TORCH_BOX(&mp::adamw_8bit_));
  m.impl("lion_", TORCH_BOX(&mp::lion_));
}

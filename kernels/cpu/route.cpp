// The router of a mixture of experts; include/route.h says what it computes. A row stays in the first-level cache.
#include "route.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common.h"
#include "sums.h"
#include "vmath.h"

namespace mp {
namespace {

constexpr float kTaken = -std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kHighest = std::numeric_limits<float>::infinity();
constexpr float kTiny = 1e-20f;  // added to the sum of weights that may be 0

// What is compared: above kTaken whatever x is.
inline float candidate(float x) { return x != x ? kHighest : x < kLowest ? kLowest : x; }

inline void scores_of(const float* x, float* score, int64_t n, bool sigmoid) {
  if (sigmoid) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) score[i] = 1.0f / (1.0f + exp_float(-x[i]));
    return;
  }
  float top = kTaken;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
  const float total =
      static_cast<float>(sum_in_blocks(n, [=](int64_t i) { return score[i] = exp_float(x[i] - top); }));
#pragma omp simd
  for (int64_t i = 0; i < n; i++) score[i] = score[i] / total;
}

// The first of the largest, which is then taken and was `*largest`. n ≥ 1.
inline int take_largest(float* value, int n, float* largest) {
  float top = kTaken;
#pragma omp simd reduction(max : top)
  for (int i = 0; i < n; i++) top = value[i] > top ? value[i] : top;
  int at = n - 1;
#pragma omp simd reduction(min : at)
  for (int i = 0; i < n; i++) at = value[i] == top && i < at ? i : at;
  value[at] = kTaken;
  *largest = top;
  return at;
}

// How much more `last` is than the largest that is left; 0 where none is, or where no number says it.
inline float margin_of(float last, const float* value, int n) {
  float left = kTaken;
#pragma omp simd reduction(max : left)
  for (int i = 0; i < n; i++) left = value[i] > left ? value[i] : left;
  const float margin = last - left;
  return std::abs(margin) < kHighest ? margin : 0.0f;  // NaN is not, either
}

// Takes the experts that are in none of the best groups.
void limit_groups(const mp_routing& r, float* value) {
  const int size = r.experts / r.groups;
  float group[MP_MOST_ROUTED], largest;
  bool allowed[MP_MOST_ROUTED] = {};
  for (int g = 0; g < r.groups; g++) {
    float first = kTaken, second = kTaken;
    for (int e = g * size; e < (g + 1) * size; e++) {
      second = std::max(second, std::min(first, value[e]));
      first = std::max(first, value[e]);
    }
    group[g] = candidate(r.two != 0 ? first + second : first);
  }
  for (int i = 0; i < r.top_groups; i++) allowed[take_largest(group, r.groups, &largest)] = true;
  for (int e = 0; e < r.experts; e++) value[e] = allowed[e / size] ? value[e] : kTaken;
}

// Writes the best experts by score + bias, ascending; returns the margin.
float choose(const mp_routing& r, const float* scores, const float* bias, int64_t* chosen) {
  alignas(64) float value[MP_MOST_EXPERTS];
  float last = 0.0f;
  for (int e = 0; e < r.experts; e++) value[e] = candidate(bias != nullptr ? scores[e] + bias[e] : scores[e]);
  if (r.groups > 1) limit_groups(r, value);
  for (int j = 0; j < r.k; j++) chosen[j] = take_largest(value, r.experts, &last);
  std::sort(chosen, chosen + r.k);
  return margin_of(last, value, r.experts);
}

void weigh(const mp_routing& r, const float* scores, const int64_t* chosen, float* weights) {
  float total = 0.0f;
  for (int j = 0; j < r.k; j++) total += scores[chosen[j]];
  for (int j = 0; j < r.k; j++) {
    weights[j] = (r.normalise != 0 ? scores[chosen[j]] / (total + kTiny) : scores[chosen[j]]) * r.scale;
  }
}

// Adds to dscores what flows back through the weights.
void weights_backward(
    const mp_routing& r, const float* scores, const int64_t* chosen, const float* dweights, float* dscores) {
  if (r.normalise == 0) {
    for (int j = 0; j < r.k; j++) dscores[chosen[j]] += dweights[j] * r.scale;
    return;
  }
  float total = 0.0f, inner = 0.0f;
  for (int j = 0; j < r.k; j++) total += scores[chosen[j]];
  total += kTiny;
  for (int j = 0; j < r.k; j++) inner += dweights[j] * (scores[chosen[j]] / total);
  for (int j = 0; j < r.k; j++) dscores[chosen[j]] += (dweights[j] - inner) / total * r.scale;
}

void backward_token(
    const mp_routing& r, const float* scores, const int64_t* chosen, const float* dweights, const float* dscores,
    float* dlogits) {
  alignas(64) float grad[MP_MOST_EXPERTS] = {};
  const int n = r.experts;
  if (dscores != nullptr) memcpy(grad, dscores, n * sizeof(float));
  if (dweights != nullptr) weights_backward(r, scores, chosen, dweights, grad);
  if (r.score == MP_SIGMOID) {
    for (int e = 0; e < n; e++) dlogits[e] = grad[e] * scores[e] * (1.0f - scores[e]);
    return;
  }
  const float* const g = grad;
  const float inner = static_cast<float>(sum_in_blocks(n, [=](int64_t e) { return g[e] * scores[e]; }));
  for (int e = 0; e < n; e++) dlogits[e] = scores[e] * (grad[e] - inner);
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_route(
    void* stream, const mp_routing* routing, const float* logits, const float* bias, const int64_t* given,
    int64_t* chosen, float* weights, float* scores, float* margin) {
  const mp_routing r = *routing;
  if (!mp_routing_fits(r)) return MP_BAD_SIZE;
#pragma omp parallel for schedule(static) if (r.tokens * r.experts > mp::kParallelFrom)
  for (int64_t t = 0; t < r.tokens; t++) {
    float* score = scores + t * r.experts;
    int64_t* found = chosen + t * r.k;
    mp::scores_of(logits + t * r.experts, score, r.experts, r.score == MP_SIGMOID);
    margin[t] = 0.0f;
    if (given != nullptr) {
      std::copy_n(given + t * r.k, r.k, found);
    } else {
      margin[t] = mp::choose(r, score, bias, found);
    }
    mp::weigh(r, score, found, weights + t * r.k);
  }
  return MP_OK;
}

extern "C" int32_t mp_route_backward(
    void* stream, const mp_routing* routing, const float* scores, const int64_t* chosen, const float* dweights,
    const float* dscores, float* dlogits) {
  const mp_routing r = *routing;
  if (!mp_routing_fits(r)) return MP_BAD_SIZE;
#pragma omp parallel for schedule(static) if (r.tokens * r.experts > mp::kParallelFrom)
  for (int64_t t = 0; t < r.tokens; t++) {
    const int64_t row = t * r.experts;
    mp::backward_token(
        r, scores + row, chosen + t * r.k, dweights != nullptr ? dweights + t * r.k : nullptr,
        dscores != nullptr ? dscores + row : nullptr, dlogits + row);
  }
  return MP_OK;
}

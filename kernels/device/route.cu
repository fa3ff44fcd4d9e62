// The router of a mixture of experts; include/route.h says what it computes.
//
// A warp takes a token; lane l has its experts l, l + lanes, ... in registers. Each of the k choices is a maximum over
// the warp and the lowest expert that has it. Bytes: forward the logits in and the scores out, 12 bytes a choice and 4 a
// token beside them; backward the scores (and their gradient) in, the logits' gradient out.
#include "common.cuh"
#include "route.h"

namespace mp {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocksEach = 16;
constexpr float kTiny = 1e-20f;  // added to the sum of weights that may be 0

struct Route {
  mp_routing r;
  const float *logits, *bias;
  const int64_t* given;
  int64_t* chosen;
  float *weights, *scores, *margin;
};

struct Backward {
  mp_routing r;
  const float* scores;
  const int64_t* chosen;
  const float *dweights, *dscores;
  float* dlogits;
};

__device__ inline float taken() { return float_of_bits(0xff800000u); }  // -infinity
__device__ inline float lowest() { return float_of_bits(0xff7fffffu); }

// What is compared: above taken() whatever x is.
__device__ inline float candidate(float x) {
  if (x != x) return float_of_bits(0x7f800000u);
  return x < lowest() ? lowest() : x;
}

struct Min {
  __device__ float operator()(float a, float b) const { return a < b ? a : b; }
};

// The value of a lane; every lane of the warp asks.
template <typename V>
__device__ inline V of_lane(V value, int lane) {
#if defined(__HIP_PLATFORM_AMD__) || defined(MP_EMULATOR)
  return __shfl(value, lane);
#else
  return __shfl_sync(0xffffffffu, value, lane);
#endif
}

// The lowest `index` among the lanes that have the largest `value`, which is `top`; indices are exact as floats.
__device__ inline int index_of_largest(float value, int index, float& top) {
  top = warp_reduce(value, Max());
  return static_cast<int>(warp_reduce(value == top ? static_cast<float>(index) : 1e9f, Min()));
}

// score[i] of experts lane + i * lanes from the logits in `x`.
template <int PER>
__device__ inline void scores_of(const mp_routing& r, int lane, float (&x)[PER]) {
  if (r.score == MP_SIGMOID) {
#pragma unroll
    for (int i = 0; i < PER; i++) x[i] = 1.0f / (1.0f + expf(-x[i]));
    return;
  }
  float top = taken(), sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PER; i++) top = Max()(top, x[i]);
  top = warp_reduce(top, Max());
#pragma unroll
  for (int i = 0; i < PER; i++) {
    x[i] = lane + i * MP_WARP < r.experts ? expf(x[i] - top) : 0.0f;
    sum += x[i];
  }
  sum = warp_reduce(sum, Add());
#pragma unroll
  for (int i = 0; i < PER; i++) x[i] = x[i] / sum;
}

// The best groups as bits. `room`: the candidates of the warp's token, in shared memory.
__device__ inline uint32_t best_groups(const mp_routing& r, int lane, const float* room) {
  const int size = r.experts / r.groups;
  float value = taken();
  if (lane < r.groups) {
    float first = taken(), second = taken();
    for (int e = lane * size; e < (lane + 1) * size; e++) {
      second = fmaxf(second, fminf(first, room[e]));
      first = fmaxf(first, room[e]);
    }
    value = candidate(r.two != 0 ? first + second : first);
  }
  uint32_t best = 0;
  float top;
  for (int i = 0; i < r.top_groups; i++) {
    const int group = index_of_largest(value, lane, top);
    best |= 1u << group;
    if (lane == group) value = taken();
  }
  return best;
}

// Lane j < k gets the expert and score of the j-th choice. Returns the margin.
template <int PER>
__device__ inline float choose(
    const mp_routing& r, int lane, float (&value)[PER], const float (&score)[PER], int& expert, float& weight) {
  float last = 0.0f, left = taken();
  for (int j = 0; j < r.k; j++) {
    float top = taken();
    int at = lane;
#pragma unroll
    for (int i = 0; i < PER; i++) {
      if (value[i] > top) top = value[i], at = lane + i * MP_WARP;
    }
    const int winner = index_of_largest(top, at, last);
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
      if (lane + i * MP_WARP == winner) value[i] = taken(), own = score[i];
    }
    own = of_lane(own, winner % MP_WARP);
    if (lane == j) expert = winner, weight = own;
  }
#pragma unroll
  for (int i = 0; i < PER; i++) left = Max()(left, value[i]);
  const float margin = last - warp_reduce(left, Max());
  return fabsf(margin) <= -lowest() ? margin : 0.0f;  // NaN is not, either
}

// Lane j < k gets the score of its expert.
template <int PER>
__device__ inline float score_of(int k, int lane, int expert, const float (&score)[PER]) {
  float found = 0.0f;
  for (int j = 0; j < k; j++) {
    const int wanted = of_lane(expert, j);
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
      if (lane + i * MP_WARP == wanted) own = score[i];
    }
    own = of_lane(own, wanted % MP_WARP);
    if (lane == j) found = own;
  }
  return found;
}

// Orders what lanes below k hold by expert.
__device__ inline void sort_choices(int k, int lane, int& expert, float& weight) {
  int rank = 0;
  for (int j = 0; j < k; j++) rank += of_lane(expert, j) < expert ? 1 : 0;
  int to = expert;
  float moved = weight;
  for (int j = 0; j < k; j++) {
    const int goes = of_lane(rank, j), other = of_lane(expert, j);
    const float with = of_lane(weight, j);
    if (goes == lane) to = other, moved = with;
  }
  expert = to, weight = moved;
}

// Over lanes 0 to k - 1, in this order; every lane gets it.
__device__ inline float sum_of_lanes(int k, float value) {
  float sum = 0.0f;
  for (int j = 0; j < k; j++) sum += of_lane(value, j);
  return sum;
}

// EXPERTS: at most so many.
template <int EXPERTS, bool GROUPED>
__global__ void __launch_bounds__(kThreads) route(Route a) {
  constexpr int PER = EXPERTS / MP_WARP;
  __shared__ float room[GROUPED ? kThreads * PER : 1];
  const mp_routing& r = a.r;
  const int lane = threadIdx.x % MP_WARP, warp = threadIdx.x / MP_WARP, warps = kThreads / MP_WARP;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * warps; base < r.tokens; base += step) {
    // A block's last warps may be left without a token: they take the last one again and write nothing.
    const bool live = base + warp < r.tokens;
    const int64_t token = live ? base + warp : r.tokens - 1;
    float score[PER], value[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const int e = lane + i * MP_WARP;
      score[i] = e < r.experts ? a.logits[token * r.experts + e] : taken();
    }
    scores_of(r, lane, score);
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const int e = lane + i * MP_WARP;
      value[i] = taken();
      if (e >= r.experts) continue;
      if (live) a.scores[token * r.experts + e] = score[i];
      value[i] = candidate(a.bias != nullptr ? score[i] + a.bias[e] : score[i]);
      if constexpr (GROUPED) room[warp * PER * MP_WARP + e] = value[i];
    }
    if constexpr (GROUPED) {
      __syncthreads();
      const uint32_t best = best_groups(r, lane, room + warp * PER * MP_WARP);
      const int size = r.experts / r.groups;
#pragma unroll
      for (int i = 0; i < PER; i++) {
        const int e = lane + i * MP_WARP;
        if (e < r.experts && ((best >> (e / size)) & 1u) == 0) value[i] = taken();
      }
      __syncthreads();  // the next token's candidates take the place of these
    }
    int expert = 0;
    float weight = 0.0f;
    float margin = 0.0f;
    if (a.given != nullptr) {
      if (lane < r.k) expert = static_cast<int>(a.given[token * r.k + lane]);
      weight = score_of(r.k, lane, expert, score);
    } else {
      margin = choose(r, lane, value, score, expert, weight);
      sort_choices(r.k, lane, expert, weight);
    }
    if (lane == 0 && live) a.margin[token] = margin;
    const float sum = sum_of_lanes(r.k, weight) + kTiny;
    if (r.normalise != 0) weight = weight / sum;
    if (lane < r.k && live) {
      a.chosen[token * r.k + lane] = expert;
      a.weights[token * r.k + lane] = weight * r.scale;
    }
  }
}

template <int EXPERTS>
__global__ void __launch_bounds__(kThreads) route_backward(Backward a) {
  constexpr int PER = EXPERTS / MP_WARP;
  const mp_routing& r = a.r;
  const int lane = threadIdx.x % MP_WARP, warps = kThreads / MP_WARP;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / MP_WARP; token < r.tokens;
       token += static_cast<int64_t>(gridDim.x) * warps) {
    const int64_t row = token * r.experts;
    int expert = -1;
    float dweight = 0.0f, chosen = 0.0f;
    if (lane < r.k && a.dweights != nullptr) {
      expert = static_cast<int>(a.chosen[token * r.k + lane]);
      dweight = a.dweights[token * r.k + lane];
      chosen = a.scores[row + expert];
    }
    if (r.normalise != 0) {
      const float sum = sum_of_lanes(r.k, chosen) + kTiny;
      const float inner = sum_of_lanes(r.k, dweight * (chosen / sum));
      dweight = (dweight - inner) / sum;
    }
    dweight *= r.scale;
    float score[PER], grad[PER], inner = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const int e = lane + i * MP_WARP;
      const bool there = e < r.experts;
      score[i] = there ? a.scores[row + e] : 0.0f;
      grad[i] = there && a.dscores != nullptr ? a.dscores[row + e] : 0.0f;
    }
    for (int j = 0; j < r.k; j++) {
      const int e = of_lane(expert, j);
      const float more = of_lane(dweight, j);
#pragma unroll
      for (int i = 0; i < PER; i++) {
        if (lane + i * MP_WARP == e) grad[i] += more;
      }
    }
    if (r.score == MP_SOFTMAX) {
#pragma unroll
      for (int i = 0; i < PER; i++) inner += grad[i] * score[i];
      inner = warp_reduce(inner, Add());
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const int e = lane + i * MP_WARP;
      const float slope = r.score == MP_SOFTMAX ? grad[i] - inner : grad[i] * (1.0f - score[i]);
      if (e < r.experts) a.dlogits[row + e] = score[i] * slope;
    }
  }
}

// Calls `with` for the least number of experts that kernels are made for.
template <int VALUE>
struct Number {
  static constexpr int value = VALUE;
};

template <typename F>
int32_t for_experts(int experts, F with) {
  if (experts <= 64) return with(Number<64>{});
  if (experts <= 128) return with(Number<128>{});
  if (experts <= 256) return with(Number<256>{});
  return with(Number<MP_MOST_EXPERTS>{});
}

unsigned blocks_for(int64_t tokens) {
  constexpr int64_t kWarps = kThreads / MP_WARP;
  return persistent_blocks((tokens + kWarps - 1) / kWarps, kBlocksEach);
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_route(
    void* stream, const mp_routing* routing, const float* logits, const float* bias, const int64_t* given,
    int64_t* chosen, float* weights, float* scores, float* margin) {
  const mp::Route a{*routing, logits, bias, given, chosen, weights, scores, margin};
  if (!mp_routing_fits(a.r)) return MP_BAD_SIZE;
  if (a.r.tokens == 0) return MP_OK;
  return mp::for_experts(a.r.experts, [&](auto most) {
    constexpr int kMost = decltype(most)::value;
    const auto kernel = a.r.groups > 1 ? mp::route<kMost, true> : mp::route<kMost, false>;
    return mp::launch(kernel, mp::blocks_for(a.r.tokens), mp::kThreads, stream, a);
  });
}

extern "C" int32_t mp_route_backward(
    void* stream, const mp_routing* routing, const float* scores, const int64_t* chosen, const float* dweights,
    const float* dscores, float* dlogits) {
  const mp::Backward a{*routing, scores, chosen, dweights, dscores, dlogits};
  if (!mp_routing_fits(a.r)) return MP_BAD_SIZE;
  if (a.r.tokens == 0) return MP_OK;
  return mp::for_experts(a.r.experts, [&](auto most) {
    constexpr int kMost = decltype(most)::value;
    return mp::launch(mp::route_backward<kMost>, mp::blocks_for(a.r.tokens), mp::kThreads, stream, a);
  });
}

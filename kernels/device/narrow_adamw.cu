// AdamW with moments in bf16 or in 8 bits, and Lion; include/narrow_adamw.h says what they compute.
//
// Tables of tensors, chunks and a persistent grid as in optimizer.cu; a thread takes 4 elements of each tensor, so that
// a warp's accesses are gapless. 8 bits: 32 threads have a block of 128 elements, whose largest value they find by
// exchanges among themselves, whatever the warp's size; codes are found by bisection in shared memory. All threads of a
// warp take part in an exchange, those behind the end with zeros. Each byte is read and written once.
#include "adamw.cuh"
#include "counter.h"
#include "narrow_adamw.h"

namespace mp {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksEach = 4;
constexpr int kChunk = 4096;
constexpr int kPiece = 4;
constexpr int kTensors = 36;
static_assert(kTensors <= 64, "a bit a tensor");
static_assert(kChunk % (kThreads * kPiece) == 0, "a chunk is whole turns of a block of threads");

// What the three have in common.
struct Parts {
  Table<kTensors> table;
  void* weight[kTensors];
  float* master[kTensors];
  const void* grad[kTensors];
  uint64_t vectors;  // bit t: tensor t may be read in pieces
};

// The chunks of a launch that are this block's, one after the other: tensor, first element, elements.
struct Chunks {
  int chunk, t, n;
  int64_t start;

  __device__ Chunks() : chunk(static_cast<int>(blockIdx.x)), t(0), n(0), start(0) {}
  __device__ bool next(const Parts& p) {
    if (chunk >= p.table.first[p.table.tensors]) return false;
    while (chunk >= p.table.first[t + 1]) t++;
    start = static_cast<int64_t>(chunk - p.table.first[t]) * kChunk;
    const int64_t left = p.table.size[t] - start;
    n = left < kChunk ? static_cast<int>(left) : kChunk;
    chunk += static_cast<int>(gridDim.x);
    return true;
  }
};

// ---------------------------------------------------------------------------------------------- moments in bf16

struct AdamBf16 {
  Parts parts;
  bf16* exp_avg[kTensors];
  bf16* exp_avg_sq[kTensors];
  mp_place place[kTensors];
  AdamStep step;
};
static_assert(sizeof(AdamBf16) <= 4096, "kernel parameters are at most 4 KiB");

__device__ inline bf16 stochastic(float x, uint32_t random) {
  const uint32_t bits = bits_of_float(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) {  // infinity and NaN stay what they are
    return bf16{static_cast<uint16_t>(bits >> 16 | ((bits & 0x7fffffu) != 0u ? 0x40u : 0u))};
  }
  return bf16{static_cast<uint16_t>((bits + (random & 0xffffu)) >> 16)};
}

// Number of an element of this rank's part in the whole tensor.
__device__ inline uint64_t number_of(const mp_place& place, int64_t at) {
  const uint64_t e = static_cast<uint64_t>(place.start + at), run = static_cast<uint64_t>(place.run);
  if (place.run == place.stride) return e + static_cast<uint64_t>(place.first);
  const uint64_t outer = (e | run) >> 32 == 0 ? static_cast<uint32_t>(e) / static_cast<uint32_t>(run) : e / run;
  return outer * static_cast<uint64_t>(place.stride) + (e - outer * run) + static_cast<uint64_t>(place.first);
}

template <typename W, typename G>
__global__ void __launch_bounds__(kThreads) adamw_bf16(AdamBf16 a) {
  if (a.step.is_skipped()) return;
  __shared__ Corrected shared;
  if (threadIdx.x == 0) shared = corrected(a.step);
  __syncthreads();
  const Corrected c = shared;
  const uint64_t number = folded_key(static_cast<int64_t>(a.step.number()));
  for (Chunks i; i.next(a.parts);) {
    float* master = a.parts.master[i.t] + i.start;
    bf16 *exp_avg = a.exp_avg[i.t] + i.start, *exp_avg_sq = a.exp_avg_sq[i.t] + i.start;
    const G* grad = static_cast<const G*>(a.parts.grad[i.t]) + i.start;
    const mp_place place = a.place[i.t];
    const uint64_t key = static_cast<uint64_t>(place.key);
    // A piece of 4 lies within a run.
    const bool pieces = (a.parts.vectors >> i.t) & 1;
    const int whole = pieces ? i.n / kPiece * kPiece : 0;
    for (int at = static_cast<int>(threadIdx.x) * kPiece; at < whole; at += kThreads * kPiece) {
      const Pack<G, kPiece> g = load<kPiece>(grad + at);
      Pack<float, kPiece> p = load<kPiece>(master + at);
      Pack<bf16, kPiece> m = load<kPiece>(exp_avg + at), v = load<kPiece>(exp_avg_sq + at);
      uint64_t scaled = number_of(place, i.start + at) * kGolden;
#pragma unroll
      for (int k = 0; k < kPiece; k++, scaled += kGolden) {
        const uint64_t random = random_bits(scaled, key, number);
        float first = m.value(k), second = v.value(k);
        update(a.step, c, g.value(k), p.at[k], first, second);
        m.set(k, stochastic(first, static_cast<uint32_t>(random)));
        v.set(k, stochastic(second, static_cast<uint32_t>(random) >> 16));
      }
      store<kPiece>(master + at, p);
      store<kPiece>(exp_avg + at, m);
      store<kPiece>(exp_avg_sq + at, v);
      put_piece<W, kPiece>(a.parts.weight[i.t], i.start + at, p);
    }
#pragma unroll 1
    for (int at = whole + static_cast<int>(threadIdx.x); at < i.n; at += kThreads) {
      float p = master[at], first = to_float(exp_avg[at]), second = to_float(exp_avg_sq[at]);
      const uint64_t random = random_bits(number_of(place, i.start + at) * kGolden, key, number);
      update(a.step, c, to_float(grad[at]), p, first, second);
      master[at] = p;
      exp_avg[at] = stochastic(first, static_cast<uint32_t>(random));
      exp_avg_sq[at] = stochastic(second, static_cast<uint32_t>(random) >> 16);
      put<W>(a.parts.weight[i.t], i.start + at, p);
    }
  }
}

// ---------------------------------------------------------------------------------------------- moments in 8 bits

constexpr int kTeam = 32;  // threads that share a block of elements
constexpr int kValues = 256;
static_assert(kTeam * kPiece == MP_STATE_BLOCK && MP_WARP % kTeam == 0, "a team is part of a warp");

struct Adam8bit {
  Parts parts;
  uint8_t* exp_avg[kTensors];
  float* exp_avg_scale[kTensors];
  uint8_t* exp_avg_sq[kTensors];
  float* exp_avg_sq_scale[kTensors];
  const float *signed_values, *unsigned_values;
  AdamStep step;
};
static_assert(sizeof(Adam8bit) <= 4096, "kernel parameters are at most 4 KiB");

__device__ inline float team_max(float x) {
  const Max op;
  x = op(x, exchange<16>(x));
  x = op(x, exchange<8>(x));
  x = op(x, exchange<4>(x));
  x = op(x, exchange<2>(x));
  return op(x, exchange<1>(x));
}

// The code whose value is nearest; `x` lies between the smallest and the largest value, or NaN, which takes code 0.
__device__ inline uint8_t code_of(float x, const float* values) {
  int code = 0;
#pragma unroll
  for (int step = kValues / 2; step > 0; step >>= 1) code += x >= values[code + step] ? step : 0;
  const int up = code < kValues - 1 ? code + 1 : code;
  const float low = values[code], high = values[up];
  return static_cast<uint8_t>(x - low >= (high - low) * 0.5f ? up : code);
}

// Codes of a team's block, which it stores with the scale.
__device__ inline void store_codes(
    const float (&x)[kPiece], uint8_t* codes, float* scale, int at, bool live, const float* values) {
  float most = 0.0f;
#pragma unroll
  for (int k = 0; k < kPiece; k++) most = Max()(most, fabsf(x[k]));
  most = team_max(most);
  most = most < 1e-12f ? 1e-12f : most;
  if (!live) return;
  Pack<uint8_t, kPiece> out;
#pragma unroll
  for (int k = 0; k < kPiece; k++) out.at[k] = code_of(x[k] / most, values);
  store<kPiece>(codes + at, out);
  if (at % MP_STATE_BLOCK == 0) scale[at / MP_STATE_BLOCK] = most;
}

template <typename W, typename G>
__global__ void __launch_bounds__(kThreads) adamw_8bit(Adam8bit a) {
  if (a.step.is_skipped()) return;
  __shared__ Corrected shared;
  __shared__ float of_first[kValues];
  __shared__ float of_second[kValues];
  if (threadIdx.x == 0) shared = corrected(a.step);
  for (int i = static_cast<int>(threadIdx.x); i < kValues; i += kThreads) {
    of_first[i] = a.signed_values[i];
    of_second[i] = a.unsigned_values[i];
  }
  __syncthreads();
  const Corrected c = shared;
  for (Chunks i; i.next(a.parts);) {
    float* master = a.parts.master[i.t] + i.start;
    uint8_t *exp_avg = a.exp_avg[i.t] + i.start, *exp_avg_sq = a.exp_avg_sq[i.t] + i.start;
    float* exp_avg_scale = a.exp_avg_scale[i.t] + i.start / MP_STATE_BLOCK;
    float* exp_avg_sq_scale = a.exp_avg_sq_scale[i.t] + i.start / MP_STATE_BLOCK;
    const G* grad = static_cast<const G*>(a.parts.grad[i.t]) + i.start;
    for (int base = 0; base < i.n; base += kThreads * kPiece) {
      const int at = base + static_cast<int>(threadIdx.x) * kPiece;
      const bool live = at < i.n;
      float first[kPiece] = {}, second[kPiece] = {};
      if (live) {
        const Pack<G, kPiece> g = load<kPiece>(grad + at);
        Pack<float, kPiece> p = load<kPiece>(master + at);
        const Pack<uint8_t, kPiece> m = load<kPiece>(exp_avg + at), v = load<kPiece>(exp_avg_sq + at);
        const float m_scale = exp_avg_scale[at / MP_STATE_BLOCK], v_scale = exp_avg_sq_scale[at / MP_STATE_BLOCK];
#pragma unroll
        for (int k = 0; k < kPiece; k++) {
          first[k] = of_first[m.at[k]] * m_scale;
          second[k] = of_second[v.at[k]] * v_scale;
          update(a.step, c, g.value(k), p.at[k], first[k], second[k]);
        }
        store<kPiece>(master + at, p);
        put_piece<W, kPiece>(a.parts.weight[i.t], i.start + at, p);
      }
      // The exchanges within come after all threads of the block of elements have read its scales.
      store_codes(first, exp_avg, exp_avg_scale, at, live, of_first);
      store_codes(second, exp_avg_sq, exp_avg_sq_scale, at, live, of_second);
    }
  }
}

// ---------------------------------------------------------------------------------------------- Lion

struct Lion : AdamRates {
  Parts parts;
  float* exp_avg[kTensors];
  const float *grad_scale, *skip;
  const double* lr;
  double weight_decay;
};
static_assert(sizeof(Lion) <= 4096, "kernel parameters are at most 4 KiB");

template <typename W, typename G>
__global__ void __launch_bounds__(kThreads) lion(Lion a) {
  if (a.skip != nullptr && !(*a.skip == 0.0f)) return;
  const double rate = *a.lr;
  const float lr = static_cast<float>(rate), decay = static_cast<float>(fma(-rate, a.weight_decay, 1.0));
  const float scale = a.grad_scale != nullptr ? *a.grad_scale : 1.0f;
  for (Chunks i; i.next(a.parts);) {
    float *master = a.parts.master[i.t] + i.start, *exp_avg = a.exp_avg[i.t] + i.start;
    const G* grad = static_cast<const G*>(a.parts.grad[i.t]) + i.start;
    const int whole = (a.parts.vectors >> i.t) & 1 ? i.n / kPiece * kPiece : 0;
    for (int at = static_cast<int>(threadIdx.x) * kPiece; at < whole; at += kThreads * kPiece) {
      const Pack<G, kPiece> g = load<kPiece>(grad + at);
      Pack<float, kPiece> p = load<kPiece>(master + at), m = load<kPiece>(exp_avg + at);
#pragma unroll
      for (int k = 0; k < kPiece; k++) lion_update(a, scale, decay, lr, g.value(k), p.at[k], m.at[k]);
      store<kPiece>(master + at, p);
      store<kPiece>(exp_avg + at, m);
      put_piece<W, kPiece>(a.parts.weight[i.t], i.start + at, p);
    }
#pragma unroll 1
    for (int at = whole + static_cast<int>(threadIdx.x); at < i.n; at += kThreads) {
      float p = master[at], m = exp_avg[at];
      lion_update(a, scale, decay, lr, to_float(grad[at]), p, m);
      master[at] = p;
      exp_avg[at] = m;
      put<W>(a.parts.weight[i.t], i.start + at, p);
    }
  }
}

// ---------------------------------------------------------------------------------------------- launches

// Bytes of kPiece elements of a dtype.
constexpr int piece_bytes(int32_t dtype) { return kPiece * (dtype == MP_F32 ? 4 : 2); }

// The tensors of one call, which fill one launch after another.
struct Lists {
  int32_t weight_dtype, grad_dtype;
  int64_t count;
  void* const* weights;
  float* const* masters;
  const void* const* grads;
  const int64_t* sizes;
};

inline bool sizes_fit(const Lists& l, int64_t unit) {
  for (int64_t i = 0; i < l.count; i++) {
    if (l.sizes[i] < 0 || l.sizes[i] % unit || l.sizes[i] > kMostChunks / kTensors * kChunk) return false;
  }
  return true;
}

template <typename A, template <typename, typename> class Kernel>
int32_t send(void* stream, const Lists& l, A& a) {
  const unsigned blocks = persistent_blocks(a.parts.table.first[a.parts.table.tensors], kBlocksEach);
  const int32_t code = for_dtype(l.grad_dtype, [&](auto grad) {
    using G = decltype(grad);
    if (l.weights == nullptr) return launch(Kernel<NoWeight, G>::get(), blocks, kThreads, stream, a);
    return for_dtype(l.weight_dtype, [&](auto weight) {
      return launch(Kernel<decltype(weight), G>::get(), blocks, kThreads, stream, a);
    });
  });
  a.parts.table.tensors = 0;
  a.parts.vectors = 0;
  return code;
}

// `with(t, i, fits)` puts tensor i's own pointers into place t; `fits`: the common ones may be read in pieces. Returns
// whether the others may be, too.
template <typename A, template <typename, typename> class Kernel, typename F>
int32_t send_all(void* stream, const Lists& l, A& a, F with) {
  for (int64_t i = 0; i < l.count; i++) {
    if (l.sizes[i] == 0) continue;
    const int t = add(a.parts.table, l.sizes[i], kChunk);
    a.parts.weight[t] = l.weights != nullptr ? l.weights[i] : nullptr;
    a.parts.master[t] = l.masters[i];
    a.parts.grad[t] = l.grads[i];
    const bool fits = aligned(l.masters[i], 16) && aligned(l.grads[i], piece_bytes(l.grad_dtype)) &&
                      (l.weights == nullptr || aligned(l.weights[i], piece_bytes(l.weight_dtype)));
    if (with(t, i) && fits) a.parts.vectors |= uint64_t{1} << t;
    if (a.parts.table.tensors < kTensors) continue;
    if (const int32_t code = send<A, Kernel>(stream, l, a); code != MP_OK) return code;
  }
  return a.parts.table.tensors > 0 ? send<A, Kernel>(stream, l, a) : static_cast<int32_t>(MP_OK);
}

template <typename W, typename G>
struct Bf16Kernel {
  static auto get() { return adamw_bf16<W, G>; }
};
template <typename W, typename G>
struct EightKernel {
  static auto get() { return adamw_8bit<W, G>; }
};
template <typename W, typename G>
struct LionKernel {
  static auto get() { return lion<W, G>; }
};

}  // namespace
}  // namespace mp

extern "C" int32_t mp_adamw_bf16(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, uint16_t* const* exp_avg, uint16_t* const* exp_avg_sq, const int64_t* sizes,
    const mp_place* places, const void* step, int32_t step_is_int64, const float* grad_scale, const float* skip,
    const double* lr, double beta1, double beta2, double eps, double weight_decay) {
  const mp::Lists lists{weight_dtype, grad_dtype, count, weights, masters, grads, sizes};
  if (!mp::sizes_fit(lists, 1)) return MP_BAD_SIZE;
  for (int64_t i = 0; i < count; i++) {
    if (places[i].run <= 0 || places[i].start < 0) return MP_BAD_SIZE;
  }
  mp::AdamBf16 a = {};
  a.step = mp::adam_step(step, step_is_int64, grad_scale, skip, lr, beta1, beta2, eps, weight_decay);
  return mp::send_all<mp::AdamBf16, mp::Bf16Kernel>(stream, lists, a, [&](int t, int64_t i) {
    a.exp_avg[t] = reinterpret_cast<mp::bf16*>(exp_avg[i]);
    a.exp_avg_sq[t] = reinterpret_cast<mp::bf16*>(exp_avg_sq[i]);
    a.place[t] = places[i];
    const bool in_a_run = places[i].run == places[i].stride ||
                          (places[i].run % mp::kPiece == 0 && places[i].start % mp::kPiece == 0);
    return in_a_run && mp::aligned(exp_avg[i], 8) && mp::aligned(exp_avg_sq[i], 8);
  });
}

extern "C" int32_t mp_adamw_8bit(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, uint8_t* const* exp_avg, float* const* exp_avg_scale, uint8_t* const* exp_avg_sq,
    float* const* exp_avg_sq_scale, const int64_t* sizes, const float* signed_values, const float* unsigned_values,
    const void* step, int32_t step_is_int64, const float* grad_scale, const float* skip, const double* lr, double beta1,
    double beta2, double eps, double weight_decay) {
  const mp::Lists lists{weight_dtype, grad_dtype, count, weights, masters, grads, sizes};
  if (!mp::sizes_fit(lists, MP_STATE_BLOCK)) return MP_BAD_SIZE;
  mp::Adam8bit a = {};
  a.signed_values = signed_values;
  a.unsigned_values = unsigned_values;
  a.step = mp::adam_step(step, step_is_int64, grad_scale, skip, lr, beta1, beta2, eps, weight_decay);
  for (int64_t i = 0; i < count; i++) {  // this kernel has no path for single elements
    const bool fits = mp::aligned(masters[i], 16) && mp::aligned(grads[i], mp::piece_bytes(grad_dtype)) &&
                      (weights == nullptr || mp::aligned(weights[i], mp::piece_bytes(weight_dtype))) &&
                      mp::aligned(exp_avg[i], 4) && mp::aligned(exp_avg_sq[i], 4);
    if (!fits && sizes[i] > 0) return MP_BAD_SIZE;
  }
  return mp::send_all<mp::Adam8bit, mp::EightKernel>(stream, lists, a, [&](int t, int64_t i) {
    a.exp_avg[t] = exp_avg[i];
    a.exp_avg_scale[t] = exp_avg_scale[i];
    a.exp_avg_sq[t] = exp_avg_sq[i];
    a.exp_avg_sq_scale[t] = exp_avg_sq_scale[i];
    return true;
  });
}

extern "C" int32_t mp_lion(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, float* const* exp_avg, const int64_t* sizes, const float* grad_scale, const float* skip,
    const double* lr, double beta1, double beta2, double weight_decay) {
  const mp::Lists lists{weight_dtype, grad_dtype, count, weights, masters, grads, sizes};
  if (!mp::sizes_fit(lists, 1)) return MP_BAD_SIZE;
  mp::Lion a = {mp::adam_rates(beta1, beta2, 0.0)};
  a.grad_scale = grad_scale;
  a.skip = skip;
  a.lr = lr;
  a.weight_decay = weight_decay;
  return mp::send_all<mp::Lion, mp::LionKernel>(stream, lists, a, [&](int t, int64_t i) {
    a.exp_avg[t] = exp_avg[i];
    return mp::aligned(exp_avg[i], 16);
  });
}

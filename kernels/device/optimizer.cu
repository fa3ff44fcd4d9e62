// Multi-tensor AdamW, squared norm and accumulation; include/optimizer.h says what they compute.
//
// A launch takes a table of tensors by value in its parameters (no copy to the device, no allocation); more tensors,
// more launches. Tensors are cut into chunks of one size and a persistent grid takes the chunks in turn, so that many
// small and few large tensors load it alike. A chunk's pieces are loaded before the first is computed. Bytes: AdamW
// (master, exp_avg, exp_avg_sq, grad) in, (master, exp_avg, exp_avg_sq, weight) out, nothing twice: 28 to 32 an
// element. Square norm: each element in, 8 bytes out a block. The table adds less than 4 KiB a launch, from constant
// memory. A piece of AdamW is 4 elements for every dtype (16 bytes of float, 8 of half), so that a warp's accesses to
// all tensors are gapless; an unaligned tensor goes element by element.
#include "adamw.cuh"
#include "optimizer.h"
#include "slots.cuh"

namespace mp {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksEach = 4;

// ---------------------------------------------------------------------------------------------- AdamW

constexpr int kAdamTensors = 64;
constexpr int kAdamChunk = 4096;
constexpr int kAdamVector = 4;
constexpr int kAdamPieces = 2;  // in flight a thread

struct Adam {
  Table<kAdamTensors> table;
  void* weight[kAdamTensors];
  float* master[kAdamTensors];
  const void* grad[kAdamTensors];
  float* exp_avg[kAdamTensors];
  float* exp_avg_sq[kAdamTensors];
  uint64_t vectors;  // bit t: tensor t may be read in pieces
  AdamStep step;
};
static_assert(sizeof(Adam) <= 4096, "kernel parameters are at most 4 KiB");
static_assert(kAdamTensors <= 64, "a bit a tensor");
static_assert(kAdamChunk % kAdamVector == 0, "a chunk keeps its tensor's alignment");

template <typename W, typename G>
__global__ void __launch_bounds__(kThreads) adamw(Adam a) {
  if (a.step.is_skipped()) return;
  __shared__ Corrected shared;
  if (threadIdx.x == 0) shared = corrected(a.step);
  __syncthreads();
  const Corrected c = shared;
  const int chunks = a.table.first[a.table.tensors];
  int t = 0;
  for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    while (chunk >= a.table.first[t + 1]) t++;
    const int64_t start = static_cast<int64_t>(chunk - a.table.first[t]) * kAdamChunk;
    const int64_t left = a.table.size[t] - start;
    const int n = left < kAdamChunk ? static_cast<int>(left) : kAdamChunk;
    float *master = a.master[t] + start, *exp_avg = a.exp_avg[t] + start, *exp_avg_sq = a.exp_avg_sq[t] + start;
    const G* grad = static_cast<const G*>(a.grad[t]) + start;
    const int whole = (a.vectors >> t) & 1 ? n / kAdamVector * kAdamVector : 0;
    for (int base = 0; base < whole; base += kAdamPieces * kThreads * kAdamVector) {
      Pack<float, kAdamVector> p[kAdamPieces], m[kAdamPieces], v[kAdamPieces];
      Pack<G, kAdamVector> g[kAdamPieces];
#pragma unroll
      for (int k = 0; k < kAdamPieces; k++) {
        const int at = base + (k * kThreads + static_cast<int>(threadIdx.x)) * kAdamVector;
        if (at >= whole) continue;
        g[k] = load<kAdamVector>(grad + at);
        p[k] = load<kAdamVector>(master + at);
        m[k] = load<kAdamVector>(exp_avg + at);
        v[k] = load<kAdamVector>(exp_avg_sq + at);
      }
#pragma unroll
      for (int k = 0; k < kAdamPieces; k++) {
        const int at = base + (k * kThreads + static_cast<int>(threadIdx.x)) * kAdamVector;
        if (at >= whole) continue;
#pragma unroll
        for (int i = 0; i < kAdamVector; i++) update(a.step, c, g[k].value(i), p[k].at[i], m[k].at[i], v[k].at[i]);
        store<kAdamVector>(master + at, p[k]);
        store<kAdamVector>(exp_avg + at, m[k]);
        store<kAdamVector>(exp_avg_sq + at, v[k]);
        put_piece<W, kAdamVector>(a.weight[t], start + at, p[k]);
      }
    }
#pragma unroll 1
    for (int at = whole + static_cast<int>(threadIdx.x); at < n; at += kThreads) {
      float p = master[at], m = exp_avg[at], v = exp_avg_sq[at];
      update(a.step, c, to_float(grad[at]), p, m, v);
      master[at] = p;
      exp_avg[at] = m;
      exp_avg_sq[at] = v;
      put<W>(a.weight[t], start + at, p);
    }
  }
}

template <typename W, typename G>
int32_t adamw_launch(void* stream, const Adam& a) {
  return launch(adamw<W, G>, persistent_blocks(a.table.first[a.table.tensors], kBlocksEach), kThreads, stream, a);
}

template <typename G>
int32_t adamw_with(void* stream, bool weights, int32_t weight_dtype, const Adam& a) {
  if (!weights) return adamw_launch<NoWeight, G>(stream, a);
  return for_dtype(weight_dtype, [&](auto zero) { return adamw_launch<decltype(zero), G>(stream, a); });
}

// Bytes of kAdamVector elements of a dtype.
constexpr int piece_bytes(int32_t dtype) { return kAdamVector * (dtype == MP_F32 ? 4 : 2); }

// ---------------------------------------------------------------------------------------------- square norm

constexpr int kNormTensors = 160;
constexpr int kNormEach = 32;  // elements that a thread adds up in float
constexpr int kNormChunk = kThreads * kNormEach;

struct Squares {
  Table<kNormTensors> table;
  const void* tensor[kNormTensors];
  uint32_t vectors[(kNormTensors + 31) / 32];  // bit t: tensor t may be read in pieces
  double* partial;                             // [blocks]
  int32_t again;                               // not the first launch: add to partial
};
static_assert(sizeof(Squares) <= 4096, "kernel parameters are at most 4 KiB");

// Sum over the block, the same tree every time; thread 0 has it.
__device__ inline double block_sum(double value, double* scratch) {
  scratch[threadIdx.x] = value;
#pragma unroll
  for (int half = kThreads / 2; half > 0; half >>= 1) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
  }
  return scratch[0];
}

template <typename T>
__global__ void __launch_bounds__(kThreads) squares(Squares a) {
  constexpr int N = kVector<T>;
  __shared__ double scratch[kThreads];
  const int chunks = a.table.first[a.table.tensors];
  double total = 0.0;
  int t = 0;
  for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    while (chunk >= a.table.first[t + 1]) t++;
    const int64_t start = static_cast<int64_t>(chunk - a.table.first[t]) * kNormChunk;
    const int64_t left = a.table.size[t] - start;
    const int n = left < kNormChunk ? static_cast<int>(left) : kNormChunk;
    const T* from = static_cast<const T*>(a.tensor[t]) + start;
    const int whole = (a.vectors[t / 32] >> (t % 32)) & 1 ? n / N * N : 0;
    float part = 0.0f;
    if (whole > 0) {
      Pack<T, N> in[kNormEach / N];
#pragma unroll
      for (int k = 0; k < kNormEach / N; k++) {
        const int at = (k * kThreads + static_cast<int>(threadIdx.x)) * N;
        in[k] = at < whole ? load<N>(from + at) : Pack<T, N>{};
      }
#pragma unroll
      for (int k = 0; k < kNormEach / N; k++) {
#pragma unroll
        for (int i = 0; i < N; i++) part += in[k].value(i) * in[k].value(i);
      }
    }
#pragma unroll 1
    for (int at = whole + static_cast<int>(threadIdx.x); at < n; at += kThreads) {
      const float x = to_float(from[at]);
      part += x * x;
    }
    total += static_cast<double>(part);
  }
  total = block_sum(total, scratch);
  if (threadIdx.x == 0) a.partial[blockIdx.x] = a.again ? a.partial[blockIdx.x] + total : total;
}

__global__ void __launch_bounds__(kThreads) squares_finish(const double* partial, int slots, double* out) {
  __shared__ double scratch[kThreads];
  double total = 0.0;
  for (int slot = threadIdx.x; slot < slots; slot += kThreads) total += partial[slot];
  total = block_sum(total, scratch);
  if (threadIdx.x == 0) *out = total;
}

// Blocks of every launch for these tensors: each launch adds to the same partial sums.
unsigned norm_blocks(int64_t count, const int64_t* sizes) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; i++) chunks += (sizes[i] + kNormChunk - 1) / kNormChunk;
  return persistent_blocks(chunks, 2 * kBlocksEach);
}

// ---------------------------------------------------------------------------------------------- accumulation

constexpr int kSumTensors = 64;
constexpr int kSumChunk = 1024;  // small: what comes here are biases and norms

struct Sums {
  Table<kSumTensors> table;
  float* sum[kSumTensors];
  const void* grad[kSumTensors];
  uint64_t vectors;  // bit t: tensor t may be read in pieces
};
static_assert(sizeof(Sums) <= 4096, "kernel parameters are at most 4 KiB");

template <typename G>
__global__ void __launch_bounds__(kThreads) add_gradients(Sums a) {
  const int chunks = a.table.first[a.table.tensors];
  int t = 0;
  for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    while (chunk >= a.table.first[t + 1]) t++;
    const int64_t start = static_cast<int64_t>(chunk - a.table.first[t]) * kSumChunk;
    const int64_t left = a.table.size[t] - start;
    const int n = left < kSumChunk ? static_cast<int>(left) : kSumChunk;
    float* sum = a.sum[t] + start;
    const G* grad = static_cast<const G*>(a.grad[t]) + start;
    const int whole = (a.vectors >> t) & 1 ? n / kAdamVector * kAdamVector : 0;
    for (int at = static_cast<int>(threadIdx.x) * kAdamVector; at < whole; at += kThreads * kAdamVector) {
      Pack<float, kAdamVector> s = load<kAdamVector>(sum + at);
      const Pack<G, kAdamVector> g = load<kAdamVector>(grad + at);
#pragma unroll
      for (int i = 0; i < kAdamVector; i++) s.at[i] += g.value(i);
      store<kAdamVector>(sum + at, s);
    }
    for (int at = whole + static_cast<int>(threadIdx.x); at < n; at += kThreads) sum[at] += to_float(grad[at]);
  }
}

// Of gradients whose slots were kept; a chunk is one column a lane.
struct Slots {
  Table<kSumTensors> table;
  float* sum[kSumTensors];
  const float* partial[kSumTensors];
  int32_t slots[kSumTensors], stride[kSumTensors];
};
static_assert(sizeof(Slots) <= 4096, "kernel parameters are at most 4 KiB");

template <typename T>
__global__ void __launch_bounds__(kSumThreads) add_slots(Slots a) {
  __shared__ float scratch[2][kSumThreads];
  const int chunks = a.table.first[a.table.tensors];
  int t = 0, turn = 0;
  for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x, turn ^= 1) {
    while (chunk >= a.table.first[t + 1]) t++;
    const int c = (chunk - a.table.first[t]) * MP_WARP + static_cast<int>(threadIdx.x % MP_WARP);
    const bool live = c < a.table.size[t];
    const int slots = a.slots[t];
    const float sum = slot_sum(a.partial[t] + c, slots, a.stride[t], live, scratch[turn]);
    if (threadIdx.x < MP_WARP && live) a.sum[t][c] += rounded<T>(sum);
  }
}

}  // namespace
}  // namespace mp

extern "C" int64_t mp_square_norm_workspace(int64_t count, const int64_t* sizes) {
  return mp::norm_blocks(count, sizes);
}

extern "C" int32_t mp_square_norm(
    void* stream, int32_t dtype, int64_t count, const void* const* tensors, const int64_t* sizes, double* workspace,
    double* out) {
  for (int64_t i = 0; i < count; i++) {
    if (sizes[i] < 0 || sizes[i] > mp::kMostChunks / mp::kNormTensors * mp::kNormChunk) return MP_BAD_SIZE;
  }
  const unsigned blocks = mp::norm_blocks(count, sizes);
  mp::Squares a = {};
  a.partial = workspace;
  const auto send = [&] {
    const int32_t code = mp::for_dtype(
        dtype, [&](auto zero) { return mp::launch(mp::squares<decltype(zero)>, blocks, mp::kThreads, stream, a); });
    a = {};
    a.partial = workspace;
    a.again = 1;
    return code;
  };
  for (int64_t i = 0; i < count; i++) {
    if (sizes[i] == 0) continue;
    const int t = mp::add(a.table, sizes[i], mp::kNormChunk);
    a.tensor[t] = tensors[i];
    if (mp::aligned(tensors[i], 16)) a.vectors[t / 32] |= 1u << (t % 32);
    if (a.table.tensors < mp::kNormTensors) continue;
    if (const int32_t code = send(); code != MP_OK) return code;
  }
  // Without any elements this one writes the zero.
  if (a.table.tensors > 0 || !a.again) {
    if (const int32_t code = send(); code != MP_OK) return code;
  }
  return mp::launch(mp::squares_finish, 1, mp::kThreads, stream, workspace, static_cast<int>(blocks), out);
}

extern "C" int32_t mp_adamw(
    void* stream, int32_t weight_dtype, int32_t grad_dtype, int64_t count, void* const* weights, float* const* masters,
    const void* const* grads, float* const* exp_avg, float* const* exp_avg_sq, const int64_t* sizes, const void* step,
    int32_t step_is_int64, const float* grad_scale, const float* skip, const double* lr, double beta1, double beta2,
    double eps, double weight_decay) {
  for (int64_t i = 0; i < count; i++) {
    if (sizes[i] < 0 || sizes[i] > mp::kMostChunks / mp::kAdamTensors * mp::kAdamChunk) return MP_BAD_SIZE;
  }
  mp::Adam a = {};
  a.step = mp::adam_step(step, step_is_int64, grad_scale, skip, lr, beta1, beta2, eps, weight_decay);
  const auto send = [&] {
    const int32_t code = mp::for_dtype(grad_dtype, [&](auto zero) {
      return mp::adamw_with<decltype(zero)>(stream, weights != nullptr, weight_dtype, a);
    });
    a.table.tensors = 0;
    a.vectors = 0;
    return code;
  };
  for (int64_t i = 0; i < count; i++) {
    if (sizes[i] == 0) continue;
    const int t = mp::add(a.table, sizes[i], mp::kAdamChunk);
    a.weight[t] = weights != nullptr ? weights[i] : nullptr;
    a.master[t] = masters[i];
    a.grad[t] = grads[i];
    a.exp_avg[t] = exp_avg[i];
    a.exp_avg_sq[t] = exp_avg_sq[i];
    const bool fits = mp::aligned(masters[i], 16) && mp::aligned(exp_avg[i], 16) && mp::aligned(exp_avg_sq[i], 16) &&
                      mp::aligned(grads[i], mp::piece_bytes(grad_dtype)) &&
                      (weights == nullptr || mp::aligned(weights[i], mp::piece_bytes(weight_dtype)));
    if (fits) a.vectors |= uint64_t{1} << t;
    if (a.table.tensors < mp::kAdamTensors) continue;
    if (const int32_t code = send(); code != MP_OK) return code;
  }
  return a.table.tensors > 0 ? send() : MP_OK;
}

extern "C" int32_t mp_add_gradients(
    void* stream, int32_t grad_dtype, int64_t count, float* const* sums, const void* const* grads,
    const int64_t* sizes) {
  for (int64_t i = 0; i < count; i++) {
    if (sizes[i] < 0 || sizes[i] > mp::kMostChunks / mp::kSumTensors * mp::kSumChunk) return MP_BAD_SIZE;
  }
  mp::Sums a = {};
  const auto send = [&] {
    const unsigned blocks = mp::persistent_blocks(a.table.first[a.table.tensors], mp::kBlocksEach);
    const int32_t code = mp::for_dtype(grad_dtype, [&](auto zero) {
      return mp::launch(mp::add_gradients<decltype(zero)>, blocks, mp::kThreads, stream, a);
    });
    a = {};
    return code;
  };
  for (int64_t i = 0; i < count; i++) {
    if (sizes[i] == 0) continue;
    const int t = mp::add(a.table, sizes[i], mp::kSumChunk);
    a.sum[t] = sums[i];
    a.grad[t] = grads[i];
    if (mp::aligned(sums[i], 16) && mp::aligned(grads[i], mp::piece_bytes(grad_dtype))) a.vectors |= uint64_t{1} << t;
    if (a.table.tensors < mp::kSumTensors) continue;
    if (const int32_t code = send(); code != MP_OK) return code;
  }
  return a.table.tensors > 0 ? send() : MP_OK;
}

extern "C" int32_t mp_add_slots(
    void* stream, int32_t dtype, int64_t count, float* const* sums, const float* const* partial, const int64_t* slots,
    const int64_t* strides, const int64_t* sizes) {
  for (int64_t i = 0; i < count; i++) {
    const bool fits = slots[i] >= 1 && slots[i] <= INT32_MAX && strides[i] >= sizes[i] && strides[i] <= INT32_MAX;
    if (!fits || sizes[i] < 1 || sizes[i] > (1 << 24)) return MP_BAD_SIZE;
  }
  mp::Slots a = {};
  const auto send = [&] {
    const unsigned blocks = mp::persistent_blocks(a.table.first[a.table.tensors], mp::kBlocksEach);
    const int32_t code = mp::for_dtype(dtype, [&](auto zero) {
      return mp::launch(mp::add_slots<decltype(zero)>, blocks, mp::kSumThreads, stream, a);
    });
    a.table.tensors = 0;
    return code;
  };
  for (int64_t i = 0; i < count; i++) {
    const int t = mp::add(a.table, sizes[i], MP_WARP);
    a.sum[t] = sums[i], a.partial[t] = partial[i];
    a.slots[t] = static_cast<int32_t>(slots[i]), a.stride[t] = static_cast<int32_t>(strides[i]);
    if (a.table.tensors < mp::kSumTensors) continue;
    if (const int32_t code = send(); code != MP_OK) return code;
  }
  return a.table.tensors > 0 ? send() : MP_OK;
}

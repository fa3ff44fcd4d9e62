// Cross-entropy over a split vocabulary; include/cross_entropy.h says what is computed.
//
// A block takes whole rows, one after another (persistent grid). Forward: a thread keeps the maximum and the sum of
// exp(x - maximum) of what it has seen, kPieces loads at a time, so that the sum is scaled anew once in that many.
// Bytes: forward the logits in, backward the logits in and out, nothing twice; 12 to 28 bytes a row beside them (0.1 %
// at 8k columns of bf16). One exponential an element: at 4.8 TB/s of bf16 the forward pass takes two thirds of an
// H200's special function units.
#include "common.cuh"
#include "cross_entropy.h"

namespace mp {
namespace {

constexpr int kThreads = 256;
constexpr int kPieces = 4;
// More blocks than are resident at once: what a row takes varies little, but rows / blocks may come out uneven.
constexpr int kBlocksEach = 16;

struct Statistics {
  int64_t rows, offset;
  int cols, extent;
  const void* logits;
  const int64_t* labels;
  float *maximum, *total, *target;
};

struct Gradient {
  int64_t rows, offset;
  int cols, extent;
  void* logits;
  const int64_t* labels;
  const float *maximum, *total, *grad;
};

// The live column of a label, or -1.
__device__ inline int column_of(int64_t label, int64_t offset, int extent) {
  const int64_t at = label - offset;
  return at >= 0 && at < extent ? static_cast<int>(at) : -1;
}

// What to subtract before exp: -infinity as maximum means that there is nothing but -infinity, whose exp shall be 0.
__device__ inline float shift_of(float maximum) { return maximum == minus_infinity() ? 0.0f : maximum; }

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) statistics(Statistics a) {
  __shared__ float scratch[2][kMaxWarps];  // the row's maximum, then its sum: neither is written while it is read
  const float low = minus_infinity();
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.logits) + row * a.cols;
    float maximum = low, total = 0.0f;
    for (int start = threadIdx.x * N; start < a.extent; start += blockDim.x * N * kPieces) {
      Pack<T, N> in[kPieces];
#pragma unroll
      for (int p = 0; p < kPieces; p++) {
        const int at = start + p * static_cast<int>(blockDim.x) * N;
        if (at < a.extent) in[p] = load<N>(x + at);
      }
      float value[kPieces][N], next = maximum;
#pragma unroll
      for (int p = 0; p < kPieces; p++) {
        const int at = start + p * static_cast<int>(blockDim.x) * N;
#pragma unroll
        for (int i = 0; i < N; i++) {
          value[p][i] = at + i < a.extent ? in[p].value(i) : low;
          next = fmaxf(next, value[p][i]);
        }
      }
      const float shift = shift_of(next);
      total *= fast_exp(maximum - shift);
      maximum = next;
#pragma unroll
      for (int p = 0; p < kPieces; p++) {
#pragma unroll
        for (int i = 0; i < N; i++) total += fast_exp(value[p][i] - shift);
      }
    }
    float highest[1] = {maximum};
    block_reduce<false>(highest, scratch[0], Max(), low);
    float sum[1] = {total * fast_exp(maximum - shift_of(highest[0]))};
    if (maximum == highest[0]) sum[0] = total;  // also where both are infinite
    block_reduce<false>(sum, scratch[1], Add(), 0.0f);
    if (threadIdx.x == 0) {
      const int column = column_of(a.labels[row], a.offset, a.extent);
      a.maximum[row] = highest[0];
      a.total[row] = sum[0];
      a.target[row] = column >= 0 ? to_float(x[column]) : 0.0f;
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) gradient(Gradient a) {
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    T* x = static_cast<T*>(a.logits) + row * a.cols;
    const float maximum = a.maximum[row], grad = a.grad[row], scale = grad / a.total[row];
    const int column = column_of(a.labels[row], a.offset, a.extent);
    for (int start = threadIdx.x * N; start < a.cols; start += blockDim.x * N * kPieces) {
      Pack<T, N> pack[kPieces];
#pragma unroll
      for (int p = 0; p < kPieces; p++) {
        const int at = start + p * static_cast<int>(blockDim.x) * N;
        if (at < a.extent) pack[p] = load<N>(x + at);
      }
#pragma unroll
      for (int p = 0; p < kPieces; p++) {
        const int at = start + p * static_cast<int>(blockDim.x) * N;
        if (at >= a.cols) continue;
        const int label = column >= 0 ? column - at : -1;  // among the N, or none of them
        float value[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
          value[i] = at + i < a.extent ? fast_exp(pack[p].value(i) - maximum) * scale : 0.0f;
          value[i] -= label == i ? grad : 0.0f;  // no branch
        }
        store<N>(x + at, to_pack<T>(value));
      }
    }
  }
}

template <typename T, typename A>
int32_t run(void* stream, const A& a, int64_t live, void (*packed)(A), void (*single)(A)) {
  const unsigned blocks = persistent_blocks(a.rows, kBlocksEach);
  if (vectors_fit<T>(a.cols, a.logits)) {
    const int64_t packs = (live + kVector<T> - 1) / kVector<T>;
    return launch(packed, blocks, block_threads(packs, kThreads), stream, a);
  }
  return launch(single, blocks, block_threads(live, kThreads), stream, a);
}

bool sizes_fit(int64_t rows, int64_t cols, int64_t extent) {
  return rows >= 0 && cols >= 1 && cols <= (1 << 24) && extent >= 0 && extent <= cols;
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_cross_entropy_statistics(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, int64_t offset, int64_t extent, const void* logits,
    const int64_t* labels, float* maximum, float* total, float* target) {
  if (!mp::sizes_fit(rows, cols, extent)) return MP_BAD_SIZE;
  if (rows == 0) return MP_OK;
  const mp::Statistics a{
      rows, offset, static_cast<int>(cols), static_cast<int>(extent), logits, labels, maximum, total, target};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::run<T>(stream, a, extent, mp::statistics<T, mp::kVector<T>>, mp::statistics<T, 1>);
  });
}

extern "C" int32_t mp_cross_entropy_gradient(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, int64_t offset, int64_t extent, void* logits,
    const int64_t* labels, const float* maximum, const float* total, const float* grad) {
  if (!mp::sizes_fit(rows, cols, extent)) return MP_BAD_SIZE;
  if (rows == 0) return MP_OK;
  const mp::Gradient a{
      rows, offset, static_cast<int>(cols), static_cast<int>(extent), logits, labels, maximum, total, grad};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::run<T>(stream, a, cols, mp::gradient<T, mp::kVector<T>>, mp::gradient<T, 1>);
  });
}

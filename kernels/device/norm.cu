// LayerNorm and RMSNorm with the residual add, forward; include/norm.h says what they compute, include/residual_norm.h
// what they do with the bias and dropout of a branch that is added.
//
// A block takes whole rows, one after another (persistent grid). While a row fits (16-byte pieces, at most kMaxPieces a
// thread: 32,768 columns in half precision, 16,384 in fp32) it is read once and stays in registers. Bytes: (x, residual)
// in, (y, sum) out, nothing twice. Wider rows are read three times (from cache, if a row fits one), unaligned ones too,
// element by element.
#include "common.cuh"
#include "dropout.h"
#include "mask.cuh"
#include "norm.h"
#include "residual_norm.h"

namespace mp {
namespace {

constexpr int kMaxPieces = 8;
constexpr int kMaxBranchPieces = 4;  // with the bias and the mask of a branch
constexpr int kThreads = 512;
constexpr int kBlocksEach = 16;

struct Forward {
  int64_t rows;
  int cols;
  float eps;
  const void *x, *residual, *weight, *bias;
  void *y, *sum;
  float *mean, *rstd;
  const void* x_bias;  // this and the mask: of a branch only
  RowMask mask;
};

// The row's mean (0 under RMS) and reciprocal deviation, from values that stay in registers and lose their mean. `each`:
// 1 / columns. `scratch`: two of kMaxWarps, taken in turn: a call goes on from `turn`.
template <bool RMS, int PIECES, int N>
__device__ inline void centre(
    float (&value)[PIECES][N], const bool (&live)[PIECES], float each, float eps, float (&scratch)[2][kMaxWarps],
    int& turn, float& mean, float& rstd) {
  float total[1];
  mean = 0.0f;
  if (!RMS) {
    total[0] = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      if (!live[p]) continue;
#pragma unroll
      for (int i = 0; i < N; i++) total[0] += value[p][i];
    }
    block_reduce<false>(total, scratch[turn], Add(), 0.0f);
    turn ^= 1;
    mean = total[0] * each;
  }
  total[0] = 0.0f;
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    if (!RMS && !live[p]) continue;
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (!RMS) value[p][i] -= mean;
      const float d = live[p] ? value[p][i] : 0.0f;
      total[0] += d * d;
    }
  }
  block_reduce<false>(total, scratch[turn], Add(), 0.0f);
  turn ^= 1;
  rstd = rsqrtf(total[0] * each + eps);
}

// mask * scale * (x + bias) + residual of a piece.
template <typename T, int N>
__device__ inline void branch_values(
    const Forward& a, int64_t row, int column, const Pack<T, N>& x, const Pack<T, N>& residual, float (&value)[N]) {
  Pack<T, N> bias = {};
  if (a.x_bias != nullptr) bias = load<N>(static_cast<const T*>(a.x_bias) + column);
  float factor[N];
#pragma unroll
  for (int i = 0; i < N; i++) factor[i] = 1.0f;
  if (a.mask.keep.threshold != 0) row_factors<N>(a.mask, row, a.cols, column, factor);
#pragma unroll
  for (int i = 0; i < N; i++) {
    value[i] = multiply_add(x.value(i) + bias.value(i), factor[i], residual.value(i));
  }
}

// One block a multiprocessor at least: without that, ptxas spills one variant to fit two.
template <typename T, bool RMS, int PIECES, bool BRANCH>
__global__ void __launch_bounds__(kThreads, RMS && PIECES == 3 && BRANCH && is_f16<T> ? 1 : 0)
    forward_registers(Forward a) {
  constexpr int N = kVector<T>;
  __shared__ float scratch[2][kMaxWarps];
  int turn = 0;
  const T* weight = static_cast<const T*>(a.weight);
  const T* bias = static_cast<const T*>(a.bias);
  const float each = 1.0f / a.cols;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x) + row * a.cols;
    float value[PIECES][N];
    bool live[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * blockDim.x + threadIdx.x) * N;
      live[p] = at < a.cols;
      if (!live[p]) continue;
      const Pack<T, N> in = load<N>(x + at);
      if (a.residual != nullptr) {
        const Pack<T, N> more = load<N>(static_cast<const T*>(a.residual) + row * a.cols + at);
        if constexpr (BRANCH) {
          branch_values<T, N>(a, row, at, in, more, value[p]);
        } else {
#pragma unroll
          for (int i = 0; i < N; i++) value[p][i] = in.value(i) + more.value(i);
        }
        const Pack<T, N> out = to_pack<T>(value[p]);
#pragma unroll
        for (int i = 0; i < N; i++) value[p][i] = out.value(i);
        store<N>(static_cast<T*>(a.sum) + row * a.cols + at, out);
      } else {
#pragma unroll
        for (int i = 0; i < N; i++) value[p][i] = in.value(i);
      }
    }
    float mean, rstd;
    centre<RMS>(value, live, each, a.eps, scratch, turn, mean, rstd);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * blockDim.x + threadIdx.x) * N;
      if (!live[p]) continue;
      const Pack<T, N> w = load<N>(weight + at);
      Pack<T, N> b = {};
      if (bias != nullptr) b = load<N>(bias + at);
      float y[N];
#pragma unroll
      for (int i = 0; i < N; i++) y[i] = multiply_add(value[p][i] * rstd, w.value(i), b.value(i));
      store<N>(static_cast<T*>(a.y) + row * a.cols + at, to_pack<T>(y));
    }
    if (threadIdx.x == 0) {
      if (!RMS) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
  }
}

// Any width, N elements at a time; N = 1: and alignment.
template <typename T, bool RMS, int N>
__global__ void __launch_bounds__(kThreads) forward_any(Forward a) {
  __shared__ float scratch[kMaxWarps];
  const int first = threadIdx.x * N, step = blockDim.x * N;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* in = static_cast<const T*>(a.x) + row * a.cols;
    float total[1] = {0.0f}, mean = 0.0f;
    if (!RMS || a.residual != nullptr) {
      const T* more = a.residual != nullptr ? static_cast<const T*>(a.residual) + row * a.cols : nullptr;
      T* sum = static_cast<T*>(a.sum) + row * a.cols;
      for (int c = first; c < a.cols; c += step) {
        Pack<T, N> x = load<N>(in + c);
        if (more != nullptr) {
          const Pack<T, N> add = load<N>(more + c);
          float value[N];
#pragma unroll
          for (int i = 0; i < N; i++) value[i] = x.value(i) + add.value(i);
          x = to_pack<T>(value);
          store<N>(sum + c, x);
        }
#pragma unroll
        for (int i = 0; i < N; i++) total[0] += x.value(i);
      }
      if (more != nullptr) in = sum;  // each thread reads back only what it wrote itself
    }
    if (!RMS) {
      block_reduce(total, scratch, Add(), 0.0f);
      mean = total[0] / a.cols;
    }
    total[0] = 0.0f;
    for (int c = first; c < a.cols; c += step) {
      const Pack<T, N> x = load<N>(in + c);
#pragma unroll
      for (int i = 0; i < N; i++) total[0] += (x.value(i) - mean) * (x.value(i) - mean);
    }
    block_reduce(total, scratch, Add(), 0.0f);
    const float rstd = rsqrtf(total[0] / a.cols + a.eps);
    for (int c = first; c < a.cols; c += step) {
      const Pack<T, N> x = load<N>(in + c), w = load<N>(static_cast<const T*>(a.weight) + c);
      Pack<T, N> b = {};
      if (a.bias != nullptr) b = load<N>(static_cast<const T*>(a.bias) + c);
      float y[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        y[i] = (x.value(i) - mean) * rstd * w.value(i) + b.value(i);
      }
      store<N>(static_cast<T*>(a.y) + row * a.cols + c, to_pack<T>(y));
    }
    if (threadIdx.x == 0) {
      if (!RMS) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
  }
}

// Pieces of a row that a thread holds; more than kMaxPieces: they do not fit.
template <typename T>
int pieces_of(const Forward& a) {
  const int vectors = a.cols / kVector<T>;
  if (!vectors_fit<T>(a.cols, a.x, a.x_bias, a.residual, a.weight, a.bias, a.y, a.sum)) return kMaxPieces + 1;
  // Several pieces a thread before more threads: what a thread does once a row is shared by them.
  const int pieces = (vectors + kThreads / 4 - 1) / (kThreads / 4);
  if (vectors <= 4 * kThreads) return pieces > 4 ? 4 : pieces;
  return vectors <= 6 * kThreads ? 6 : vectors <= 8 * kThreads ? 8 : kMaxPieces + 1;
}

template <typename T, bool RMS, bool BRANCH>
int32_t forward(void* stream, const Forward& a) {
  constexpr int N = kVector<T>;
  const unsigned blocks = persistent_blocks(a.rows, kBlocksEach);
  const int pieces = pieces_of<T>(a), vectors = a.cols / N;
  const unsigned threads = block_threads((vectors + pieces - 1) / pieces, kThreads);
  switch (pieces) {
    case 1: return launch(forward_registers<T, RMS, 1, BRANCH>, blocks, threads, stream, a);
    case 2: return launch(forward_registers<T, RMS, 2, BRANCH>, blocks, threads, stream, a);
    case 3: return launch(forward_registers<T, RMS, 3, BRANCH>, blocks, threads, stream, a);
    case 4: return launch(forward_registers<T, RMS, 4, BRANCH>, blocks, threads, stream, a);
  }
  if constexpr (BRANCH) {
    return MP_BAD_SIZE;  // the caller looks first
  } else {
    if (pieces == 6) return launch(forward_registers<T, RMS, 6, false>, blocks, threads, stream, a);
    if (pieces == 8) return launch(forward_registers<T, RMS, 8, false>, blocks, threads, stream, a);
    if (vectors_fit<T>(a.cols, a.x, a.residual, a.weight, a.bias, a.y, a.sum)) {
      return launch(forward_any<T, RMS, N>, blocks, kThreads, stream, a);
    }
    return launch(forward_any<T, RMS, 1>, blocks, block_threads(a.cols, kThreads), stream, a);
  }
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_norm_forward(
    void* stream, int32_t dtype, int32_t rms, int64_t rows, int64_t cols, float eps, const void* x,
    const void* residual, const void* weight, const void* bias, void* y, void* sum, float* mean, float* rstd) {
  if (rows < 0 || cols < 1 || cols > (1 << 24)) return MP_BAD_SIZE;
  if (rows == 0) return MP_OK;
  const mp::Forward a{rows, static_cast<int>(cols), eps, x, residual, weight, bias, y, sum, mean, rstd, nullptr, {}};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return rms ? mp::forward<T, true, false>(stream, a) : mp::forward<T, false, false>(stream, a);
  });
}

extern "C" int32_t mp_residual_norm_forward(
    void* stream, int32_t dtype, int32_t rms, int64_t seq, int64_t batch, int64_t cols, float eps, const void* x,
    const void* x_bias, const void* residual, const int64_t* keys, int64_t op_key, int32_t threshold,
    int64_t seq_offset, const void* weight, const void* bias, void* y, void* sum, float* mean, float* rstd) {
  const int64_t rows = seq * batch;
  if (seq < 0 || batch < 0 || rows >= (int64_t{1} << 31) || cols < 1 || cols > (1 << 24)) return MP_BAD_SIZE;
  if (rows == 0) return MP_OK;
  const mp::RowMask mask{keys, mp::keep_of(op_key, threshold), seq_offset, static_cast<int>(batch)};
  const mp::Forward a{rows, static_cast<int>(cols), eps, x, residual, weight, bias, y, sum, mean, rstd, x_bias, mask};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (mp::pieces_of<T>(a) <= mp::kMaxBranchPieces) {
      return rms ? mp::forward<T, true, true>(stream, a) : mp::forward<T, false, true>(stream, a);
    }
    const int32_t code = mp_dropout_forward(
        stream, dtype, seq, batch, cols, x, x_bias, residual, keys, op_key, threshold, seq_offset, cols, 0, sum);
    if (code != MP_OK) return code;
    return mp_norm_forward(stream, dtype, rms, rows, cols, eps, sum, nullptr, weight, bias, y, nullptr, mean, rstd);
  });
}

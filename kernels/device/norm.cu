// LayerNorm and RMSNorm with the residual add, forward and backward; include/norm.h says what they compute.
//
// A block takes whole rows, one after another (persistent grid). While a row fits (16-byte pieces, at most kMaxPieces
// a thread) it is read once and stays in registers; the backward pass keeps its columns' sums of dweight and dbias in
// registers over all rows of the block. Bytes: forward (x, residual) in, (y, sum) out, nothing twice. Backward
// (dy, sum, dsum) in, dx out, plus blocks * cols * 8 bytes of partial sums (1 % at 16k rows). Wider or unaligned rows
// are read two or three times (from cache, if a row fits one), and their dweight, dbias read dy and sum once more.
#include "common.cuh"
#include "norm.h"

namespace mp {
namespace {

constexpr int kMaxPieces = 4;
constexpr int kThreads = 512;
constexpr int kBlocksEach = 4;

struct Forward {
  int64_t rows;
  int cols;
  float eps;
  const void *x, *residual, *weight, *bias;
  void *y, *sum;
  float *mean, *rstd;
};

struct Backward {
  int64_t rows;
  int cols;
  const void *dy, *dsum, *sum, *weight;
  const float *mean, *rstd;
  void* dx;
  float* partial;  // [blocks, 2, cols]: dweight, dbias
};

// The row's mean (0 under RMS) and reciprocal deviation, from values that stay in registers.
template <bool RMS, int PIECES, int N>
__device__ inline void statistics(
    const float (&value)[PIECES][N], const bool (&live)[PIECES], int cols, float eps, float* scratch, float& mean,
    float& rstd) {
  float total[1];
  mean = 0.0f;
  if (!RMS) {
    total[0] = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
#pragma unroll
      for (int i = 0; i < N; i++) total[0] += live[p] ? value[p][i] : 0.0f;
    }
    block_reduce(total, scratch, Add(), 0.0f);
    mean = total[0] / cols;
  }
  total[0] = 0.0f;
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float d = live[p] ? value[p][i] - mean : 0.0f;
      total[0] += d * d;
    }
  }
  block_reduce(total, scratch, Add(), 0.0f);
  rstd = rsqrtf(total[0] / cols + eps);
}

template <typename T, bool RMS, int PIECES>
__global__ void __launch_bounds__(kThreads) forward_registers(Forward a) {
  constexpr int N = kVector<T>;
  __shared__ float scratch[kMaxWarps];
  const T* weight = static_cast<const T*>(a.weight);
  const T* bias = static_cast<const T*>(a.bias);
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
        Pack<T, N> out;
#pragma unroll
        for (int i = 0; i < N; i++) {
          out.at[i] = from_float<T>(to_float(in.at[i]) + to_float(more.at[i]));
          value[p][i] = to_float(out.at[i]);
        }
        store<N>(static_cast<T*>(a.sum) + row * a.cols + at, out);
      } else {
#pragma unroll
        for (int i = 0; i < N; i++) value[p][i] = to_float(in.at[i]);
      }
    }
    float mean, rstd;
    statistics<RMS>(value, live, a.cols, a.eps, scratch, mean, rstd);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * blockDim.x + threadIdx.x) * N;
      if (!live[p]) continue;
      const Pack<T, N> w = load<N>(weight + at);
      Pack<T, N> out;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float scaled = (value[p][i] - mean) * rstd * to_float(w.at[i]);
        out.at[i] = from_float<T>(bias != nullptr ? scaled + to_float(bias[at + i]) : scaled);
      }
      store<N>(static_cast<T*>(a.y) + row * a.cols + at, out);
    }
    if (threadIdx.x == 0) {
      if (!RMS) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
  }
}

// Any width and alignment, element by element.
template <typename T, bool RMS>
__global__ void __launch_bounds__(kThreads) forward_any(Forward a) {
  __shared__ float scratch[kMaxWarps];
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* in = static_cast<const T*>(a.x) + row * a.cols;
    if (a.residual != nullptr) {
      const T* more = static_cast<const T*>(a.residual) + row * a.cols;
      T* sum = static_cast<T*>(a.sum) + row * a.cols;
      for (int c = threadIdx.x; c < a.cols; c += blockDim.x) {
        sum[c] = from_float<T>(to_float(in[c]) + to_float(more[c]));
      }
      in = sum;  // each thread reads back only what it wrote itself
    }
    float total[1] = {0.0f}, mean = 0.0f;
    if (!RMS) {
      for (int c = threadIdx.x; c < a.cols; c += blockDim.x) total[0] += to_float(in[c]);
      block_reduce(total, scratch, Add(), 0.0f);
      mean = total[0] / a.cols;
    }
    total[0] = 0.0f;
    for (int c = threadIdx.x; c < a.cols; c += blockDim.x) {
      const float d = to_float(in[c]) - mean;
      total[0] += d * d;
    }
    block_reduce(total, scratch, Add(), 0.0f);
    const float rstd = rsqrtf(total[0] / a.cols + a.eps);
    for (int c = threadIdx.x; c < a.cols; c += blockDim.x) {
      const float scaled = (to_float(in[c]) - mean) * rstd * to_float(static_cast<const T*>(a.weight)[c]);
      const float shift = a.bias != nullptr ? to_float(static_cast<const T*>(a.bias)[c]) : 0.0f;
      static_cast<T*>(a.y)[row * a.cols + c] = from_float<T>(scaled + shift);
    }
    if (threadIdx.x == 0) {
      if (!RMS) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
  }
}

// With g = dy * weight and n the normalised row: dx = rstd * (g - mean(g) - n * mean(g * n)); RMS has no mean(g).
template <typename T, bool RMS, int PIECES>
__global__ void __launch_bounds__(kThreads) backward_registers(Backward a) {
  constexpr int N = kVector<T>;
  __shared__ float scratch[2 * kMaxWarps];
  float dweight[PIECES][N] = {}, dbias[PIECES][N] = {};
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const float mean = RMS ? 0.0f : a.mean[row], rstd = a.rstd[row];
    Pack<T, N> in[PIECES], dy[PIECES];
    float total[2] = {0.0f, 0.0f};  // sum of g * n, sum of g
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * blockDim.x + threadIdx.x) * N;
      if (at >= a.cols) continue;
      in[p] = load<N>(static_cast<const T*>(a.sum) + row * a.cols + at);
      dy[p] = load<N>(static_cast<const T*>(a.dy) + row * a.cols + at);
      const Pack<T, N> w = load<N>(static_cast<const T*>(a.weight) + at);
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float n = (to_float(in[p].at[i]) - mean) * rstd, d = to_float(dy[p].at[i]);
        const float g = d * to_float(w.at[i]);
        total[0] += g * n;
        total[1] += g;
        dweight[p][i] += d * n;
        if (!RMS) dbias[p][i] += d;
      }
    }
    block_reduce(total, scratch, Add(), 0.0f);
    const float along = total[0] / a.cols, shift = RMS ? 0.0f : total[1] / a.cols;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * blockDim.x + threadIdx.x) * N;
      if (at >= a.cols) continue;
      const Pack<T, N> w = load<N>(static_cast<const T*>(a.weight) + at);
      Pack<T, N> more, out;
      if (a.dsum != nullptr) more = load<N>(static_cast<const T*>(a.dsum) + row * a.cols + at);
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float n = (to_float(in[p].at[i]) - mean) * rstd;
        const float g = to_float(dy[p].at[i]) * to_float(w.at[i]);
        const float dx = rstd * (g - shift - n * along);
        out.at[i] = from_float<T>(a.dsum != nullptr ? dx + to_float(more.at[i]) : dx);
      }
      store<N>(static_cast<T*>(a.dx) + row * a.cols + at, out);
    }
  }
  float* partial = a.partial + static_cast<int64_t>(blockIdx.x) * 2 * a.cols;
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const int at = (p * blockDim.x + threadIdx.x) * N;
    if (at >= a.cols) continue;
#pragma unroll
    for (int i = 0; i < N; i++) {
      partial[at + i] = dweight[p][i];
      if (!RMS) partial[a.cols + at + i] = dbias[p][i];
    }
  }
}

// Any width: dx row by row.
template <typename T, bool RMS>
__global__ void __launch_bounds__(kThreads) backward_any(Backward a) {
  __shared__ float scratch[2 * kMaxWarps];
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const float mean = RMS ? 0.0f : a.mean[row], rstd = a.rstd[row];
    const T* in = static_cast<const T*>(a.sum) + row * a.cols;
    const T* dy = static_cast<const T*>(a.dy) + row * a.cols;
    const T* dsum = static_cast<const T*>(a.dsum);
    float total[2] = {0.0f, 0.0f};
    for (int c = threadIdx.x; c < a.cols; c += blockDim.x) {
      const float g = to_float(dy[c]) * to_float(weight[c]);
      total[0] += g * (to_float(in[c]) - mean) * rstd;
      total[1] += g;
    }
    block_reduce(total, scratch, Add(), 0.0f);
    const float along = total[0] / a.cols, shift = RMS ? 0.0f : total[1] / a.cols;
    for (int c = threadIdx.x; c < a.cols; c += blockDim.x) {
      const float n = (to_float(in[c]) - mean) * rstd;
      const float dx = rstd * (to_float(dy[c]) * to_float(weight[c]) - shift - n * along);
      const float more = dsum != nullptr ? to_float(dsum[row * a.cols + c]) : 0.0f;
      static_cast<T*>(a.dx)[row * a.cols + c] = from_float<T>(dx + more);
    }
  }
}

// Any width: the partial sums of dweight and dbias; a thread a column, a block a band of rows. Reads run along rows.
template <typename T, bool RMS>
__global__ void __launch_bounds__(kThreads) backward_any_columns(Backward a, int64_t band, int strips) {
  const int64_t slot = blockIdx.x / strips;
  const int c = (blockIdx.x % strips) * blockDim.x + threadIdx.x;
  if (c >= a.cols) return;
  const int64_t end = (slot + 1) * band < a.rows ? (slot + 1) * band : a.rows;
  float dweight = 0.0f, dbias = 0.0f;
  for (int64_t row = slot * band; row < end; row++) {
    const float d = to_float(static_cast<const T*>(a.dy)[row * a.cols + c]);
    const float mean = RMS ? 0.0f : a.mean[row];
    dweight += d * (to_float(static_cast<const T*>(a.sum)[row * a.cols + c]) - mean) * a.rstd[row];
    dbias += d;
  }
  a.partial[slot * 2 * a.cols + c] = dweight;
  if (!RMS) a.partial[(slot * 2 + 1) * a.cols + c] = dbias;
}

// Pieces a thread needs at `kThreads` threads; more than kMaxPieces: take the kernels for any width.
template <typename T>
int pieces_of(int64_t cols) {
  const int64_t pieces = (cols / kVector<T> + kThreads - 1) / kThreads;
  return pieces > kMaxPieces ? kMaxPieces + 1 : static_cast<int>(pieces);
}

unsigned slots_of(int64_t rows) { return persistent_blocks(rows, kBlocksEach); }

template <typename T, bool RMS>
int32_t forward(void* stream, const Forward& a) {
  const unsigned blocks = persistent_blocks(a.rows, 4 * kBlocksEach);
  const bool fits = vectors_fit<T>(a.cols, a.x, a.residual, a.weight, a.bias, a.y, a.sum);
  const int pieces = fits ? pieces_of<T>(a.cols) : kMaxPieces + 1;
  const unsigned threads = block_threads((a.cols / kVector<T> + pieces - 1) / pieces, kThreads);
  switch (pieces) {
    case 1: return launch(forward_registers<T, RMS, 1>, blocks, threads, stream, a);
    case 2: return launch(forward_registers<T, RMS, 2>, blocks, threads, stream, a);
    case 3: return launch(forward_registers<T, RMS, 3>, blocks, threads, stream, a);
    case 4: return launch(forward_registers<T, RMS, 4>, blocks, threads, stream, a);
    default: return launch(forward_any<T, RMS>, blocks, block_threads(a.cols, kThreads), stream, a);
  }
}

template <typename T, bool RMS>
int32_t backward(void* stream, const Backward& a, void* dweight, void* dbias) {
  const unsigned slots = slots_of(a.rows);
  const bool fits = vectors_fit<T>(a.cols, a.dy, a.dsum, a.sum, a.weight, a.dx);
  const int pieces = fits ? pieces_of<T>(a.cols) : kMaxPieces + 1;
  const unsigned threads = block_threads((a.cols / kVector<T> + pieces - 1) / pieces, kThreads);
  const unsigned wide = block_threads(a.cols, kThreads), strips = static_cast<unsigned>((a.cols + wide - 1) / wide);
  int32_t code;
  switch (pieces) {
    case 1: code = launch(backward_registers<T, RMS, 1>, slots, threads, stream, a); break;
    case 2: code = launch(backward_registers<T, RMS, 2>, slots, threads, stream, a); break;
    case 3: code = launch(backward_registers<T, RMS, 3>, slots, threads, stream, a); break;
    case 4: code = launch(backward_registers<T, RMS, 4>, slots, threads, stream, a); break;
    default:
      code = launch(backward_any<T, RMS>, persistent_blocks(a.rows, 4 * kBlocksEach), wide, stream, a);
      if (code != MP_OK) return code;
      code = launch(
          backward_any_columns<T, RMS>, slots * strips, wide, stream, a, (a.rows + slots - 1) / slots,
          static_cast<int>(strips));
  }
  if (code != MP_OK) return code;
  code = sum_slots<T>(stream, a.partial, slots, 2 * static_cast<int64_t>(a.cols), a.cols, dweight);
  if (code != MP_OK || dbias == nullptr) return code;
  return sum_slots<T>(stream, a.partial + a.cols, slots, 2 * static_cast<int64_t>(a.cols), a.cols, dbias);
}

}  // namespace
}  // namespace mp

extern "C" int64_t mp_norm_workspace(int64_t rows, int64_t cols) { return mp::slots_of(rows) * 2 * cols; }

extern "C" int32_t mp_norm_forward(
    void* stream, int32_t dtype, int32_t rms, int64_t rows, int64_t cols, float eps, const void* x,
    const void* residual, const void* weight, const void* bias, void* y, void* sum, float* mean, float* rstd) {
  if (rows < 0 || cols < 1 || cols > (1 << 24)) return MP_BAD_SIZE;
  if (rows == 0) return MP_OK;
  const mp::Forward a{rows, static_cast<int>(cols), eps, x, residual, weight, bias, y, sum, mean, rstd};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return rms ? mp::forward<T, true>(stream, a) : mp::forward<T, false>(stream, a);
  });
}

extern "C" int32_t mp_norm_backward(
    void* stream, int32_t dtype, int32_t rms, int64_t rows, int64_t cols, const void* dy, const void* dsum,
    const void* sum, const void* weight, const float* mean, const float* rstd, void* dx, void* dweight, void* dbias,
    float* workspace) {
  if (rows < 1 || cols < 1 || cols > (1 << 24)) return MP_BAD_SIZE;
  const mp::Backward a{rows, static_cast<int>(cols), dy, dsum, sum, weight, mean, rstd, dx, workspace};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return rms ? mp::backward<T, true>(stream, a, dweight, dbias) : mp::backward<T, false>(stream, a, dweight, dbias);
  });
}

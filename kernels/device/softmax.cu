// Causal softmax and its gradient; include/softmax.h says what they compute.
//
// A row belongs to a warp (up to 32 columns a lane) or to a block (up to 16k columns) and stays in registers between
// its one read and its one write; wider or unaligned rows are read twice (from cache, if a row fits one). Only the
// live part of a row is read, everything is written. With L = sum over rows of (i + 1 + k - q), e bytes an element:
// forward L e + q k e a matrix, 1.5 q k e at q = k; backward 2 L e + q k e, 2 q k e at q = k. A row's last piece reads
// up to 16 - e bytes beyond the live part.
#include "common.cuh"
#include "softmax.h"

namespace mp {
namespace {

constexpr int kWarpThreads = 256;  // where rows belong to warps
constexpr int kThreads = 512;      // at most, where they belong to blocks
constexpr int kFloats = 32;        // of a row that a thread keeps, at most

struct Shape {
  int64_t rows;
  int queries, cols;
  float scale;
};

__device__ inline float minus_infinity() { return float_of_bits(0xff800000u); }

// The hardware's exp is good enough for what is rounded to half precision.
template <typename T>
__device__ inline float exponential(float x) {
  return __expf(x);
}
template <>
__device__ inline float exponential<float>(float x) {
  return expf(x);
}

// The rows of a team, a warp or the block: first, first + step, ... with the number of live columns of each.
template <bool WARP>
struct Rows {
  int64_t row, step;
  int query, step_query, queries, dead;

  __device__ explicit Rows(const Shape& shape) : queries(shape.queries), dead(shape.cols - shape.queries) {
    const int teams = WARP ? blockDim.x / MP_WARP : 1;
    row = static_cast<int64_t>(blockIdx.x) * teams + (WARP ? threadIdx.x / MP_WARP : 0);
    step = static_cast<int64_t>(gridDim.x) * teams;
    query = static_cast<int>(row % queries);
    step_query = static_cast<int>(step % queries);
  }
  __device__ int live() const { return query + 1 + dead; }
  __device__ void next() {
    row += step;
    query += step_query;
    if (query >= queries) query -= queries;
  }
};

template <bool WARP, int N, typename Op>
__device__ inline void team_reduce(float (&value)[N], float* scratch, Op op, float neutral) {
  if constexpr (WARP) {
#pragma unroll
    for (int i = 0; i < N; i++) value[i] = warp_reduce(value[i], op);
  } else {
    block_reduce(value, scratch, op, neutral);
  }
}

template <typename T, int FLOATS, bool WARP>
__global__ void __launch_bounds__(WARP ? kWarpThreads : kThreads) forward_registers(
    Shape shape, const void* x, void* y) {
  constexpr int N = kVector<T>, PIECES = FLOATS / N;
  __shared__ float scratch[WARP ? 1 : kMaxWarps];
  const int lanes = WARP ? MP_WARP : blockDim.x, lane = threadIdx.x % lanes;
  for (Rows<WARP> rows(shape); rows.row < shape.rows; rows.next()) {
    const T* from = static_cast<const T*>(x) + rows.row * shape.cols;
    T* to = static_cast<T*>(y) + rows.row * shape.cols;
    const int live = rows.live();
    Pack<T, N> in[PIECES];
    float value[PIECES][N], top[1] = {minus_infinity()}, sum[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * lanes + lane) * N;
      if (at < live) in[p] = load<N>(from + at);
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * lanes + lane) * N;
#pragma unroll
      for (int i = 0; i < N; i++) {
        value[p][i] = at + i < live ? to_float(in[p].at[i]) * shape.scale : minus_infinity();
        top[0] = Max()(top[0], value[p][i]);
      }
    }
    team_reduce<WARP>(top, scratch, Max(), minus_infinity());
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const bool some = (p * lanes + lane) * N < live;  // what is dead among it gets e^-inf
#pragma unroll
      for (int i = 0; i < N; i++) {
        value[p][i] = some ? exponential<T>(value[p][i] - top[0]) : 0.0f;
        sum[0] += value[p][i];
      }
    }
    team_reduce<WARP>(sum, scratch, Add(), 0.0f);
    const float inverse = 1.0f / sum[0];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * lanes + lane) * N;
      if (at >= shape.cols) continue;
      Pack<T, N> out;
#pragma unroll
      for (int i = 0; i < N; i++) out.at[i] = from_float<T>(value[p][i] * inverse);
      store<N>(to + at, out);
    }
  }
}

// Any width (N = 1: and alignment): a thread's running maximum and sum (Milakov & Gimelshein, arXiv 1805.02867), joined
// over the block, then the row once more.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) forward_any(Shape shape, const void* x, void* y) {
  __shared__ float scratch[kMaxWarps];
  for (Rows<false> rows(shape); rows.row < shape.rows; rows.next()) {
    const T* from = static_cast<const T*>(x) + rows.row * shape.cols;
    T* to = static_cast<T*>(y) + rows.row * shape.cols;
    const int live = rows.live();
    float own = minus_infinity(), sum[1] = {0.0f};
    for (int at = threadIdx.x * N; at < live; at += blockDim.x * N) {
      const Pack<T, N> in = load<N>(from + at);
      float value[N], top = own;
#pragma unroll
      for (int i = 0; i < N; i++) {
        value[i] = at + i < live ? to_float(in.at[i]) * shape.scale : minus_infinity();
        top = Max()(top, value[i]);
      }
      if (top == minus_infinity()) continue;
      sum[0] *= exponential<T>(own - top);
#pragma unroll
      for (int i = 0; i < N; i++) sum[0] += exponential<T>(value[i] - top);
      own = top;
    }
    float top[1] = {own};
    block_reduce(top, scratch, Max(), minus_infinity());
    sum[0] *= exponential<T>(own - top[0]);
    block_reduce(sum, scratch, Add(), 0.0f);
    const float inverse = 1.0f / sum[0];
    for (int at = threadIdx.x * N; at < shape.cols; at += blockDim.x * N) {
      Pack<T, N> in = {}, out;
      if (at < live) in = load<N>(from + at);
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float value = exponential<T>(to_float(in.at[i]) * shape.scale - top[0]) * inverse;
        out.at[i] = from_float<T>(at + i < live ? value : 0.0f);
      }
      store<N>(to + at, out);
    }
  }
}

template <typename T, int FLOATS, bool WARP>
__global__ void __launch_bounds__(WARP ? kWarpThreads : kThreads) backward_registers(
    Shape shape, const void* dy, const void* y, void* dx) {
  constexpr int N = kVector<T>, PIECES = FLOATS / N;
  __shared__ float scratch[WARP ? 1 : 2 * kMaxWarps];
  const int lanes = WARP ? MP_WARP : blockDim.x, lane = threadIdx.x % lanes;
  for (Rows<WARP> rows(shape); rows.row < shape.rows; rows.next()) {
    const int64_t start = rows.row * shape.cols;
    const int live = rows.live();
    Pack<T, N> probs[PIECES] = {}, grads[PIECES] = {};  // zeros where dead
    float total[2] = {0.0f, 0.0f};                      // sum of dy * y, sum of y
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * lanes + lane) * N;
      if (at >= live) continue;
      probs[p] = load<N>(static_cast<const T*>(y) + start + at);
      grads[p] = load<N>(static_cast<const T*>(dy) + start + at);
#pragma unroll
      for (int i = 0; i < N; i++) {
        if (at + i >= live) probs[p].at[i] = grads[p].at[i] = T{};
      }
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        total[0] += to_float(grads[p].at[i]) * to_float(probs[p].at[i]);
        total[1] += to_float(probs[p].at[i]);
      }
    }
    team_reduce<WARP>(total, scratch, Add(), 0.0f);
    const float mean = total[0] / total[1];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * lanes + lane) * N;
      if (at >= shape.cols) continue;
      Pack<T, N> out;
#pragma unroll
      for (int i = 0; i < N; i++) {
        out.at[i] = from_float<T>(shape.scale * to_float(probs[p].at[i]) * (to_float(grads[p].at[i]) - mean));
      }
      store<N>(static_cast<T*>(dx) + start + at, out);
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) backward_any(Shape shape, const void* dy, const void* y, void* dx) {
  __shared__ float scratch[2 * kMaxWarps];
  for (Rows<false> rows(shape); rows.row < shape.rows; rows.next()) {
    const T* probs = static_cast<const T*>(y) + rows.row * shape.cols;
    const T* grads = static_cast<const T*>(dy) + rows.row * shape.cols;
    const int live = rows.live();
    float total[2] = {0.0f, 0.0f};
    for (int at = threadIdx.x * N; at < live; at += blockDim.x * N) {
      const Pack<T, N> p = load<N>(probs + at), g = load<N>(grads + at);
#pragma unroll
      for (int i = 0; i < N; i++) {
        if (at + i >= live) continue;
        total[0] += to_float(g.at[i]) * to_float(p.at[i]);
        total[1] += to_float(p.at[i]);
      }
    }
    block_reduce(total, scratch, Add(), 0.0f);
    const float mean = total[0] / total[1];
    for (int at = threadIdx.x * N; at < shape.cols; at += blockDim.x * N) {
      Pack<T, N> p = {}, g = {}, out;
      if (at < live) p = load<N>(probs + at), g = load<N>(grads + at);
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float value = shape.scale * to_float(p.at[i]) * (to_float(g.at[i]) - mean);
        out.at[i] = from_float<T>(at + i < live ? value : 0.0f);
      }
      store<N>(static_cast<T*>(dx) + rows.row * shape.cols + at, out);
    }
  }
}

// An odd number of blocks: a team whose step divides the queries would get rows of one length only, and a long one
// would be waited for.
unsigned blocks_for(int64_t work, int each) {
  const unsigned blocks = persistent_blocks(work, each);
  return blocks > 1 && blocks % 2 == 0 ? blocks - 1 : blocks;
}

// Launches the kernel of `Kernels` that fits the width: registers<FLOATS, WARP>() or any<N>().
template <typename T, typename Kernels, typename... Arguments>
int32_t dispatch(void* stream, bool fits, const Shape& shape, Arguments... arguments) {
  const int cols = shape.cols;
  if (fits && cols <= kFloats * MP_WARP) {
    const unsigned blocks = blocks_for((shape.rows * MP_WARP + kWarpThreads - 1) / kWarpThreads, 8);
    const auto kernel = cols <= 8 * MP_WARP    ? Kernels::template registers<T, 8, true>()
                        : cols <= 16 * MP_WARP ? Kernels::template registers<T, 16, true>()
                                               : Kernels::template registers<T, kFloats, true>();
    return launch(kernel, blocks, kWarpThreads, stream, shape, arguments...);
  }
  if (fits && cols <= kFloats * kThreads) {
    const unsigned threads = block_threads((cols + kFloats - 1) / kFloats, kThreads);
    const auto kernel = Kernels::template registers<T, kFloats, false>();
    return launch(kernel, blocks_for(shape.rows, 2048 / threads), threads, stream, shape, arguments...);
  }
  const int n = fits ? kVector<T> : 1;
  const auto kernel = fits ? Kernels::template any<T, kVector<T>>() : Kernels::template any<T, 1>();
  const unsigned threads = block_threads((cols + n - 1) / n, kThreads);
  return launch(kernel, blocks_for(shape.rows, 2048 / threads < 16 ? 2048 / threads : 16), threads, stream, shape,
                arguments...);
}

struct ForwardKernels {
  template <typename T, int FLOATS, bool WARP>
  static auto registers() { return &forward_registers<T, FLOATS, WARP>; }
  template <typename T, int N>
  static auto any() { return &forward_any<T, N>; }
};

struct BackwardKernels {
  template <typename T, int FLOATS, bool WARP>
  static auto registers() { return &backward_registers<T, FLOATS, WARP>; }
  template <typename T, int N>
  static auto any() { return &backward_any<T, N>; }
};

bool good_sizes(int64_t matrices, int64_t queries, int64_t cols) {
  return matrices >= 0 && queries >= 1 && cols >= queries && cols <= (1 << 24);
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_softmax_forward(
    void* stream, int32_t dtype, int64_t matrices, int64_t queries, int64_t cols, float scale, const void* x, void* y) {
  if (!mp::good_sizes(matrices, queries, cols)) return MP_BAD_SIZE;
  if (matrices == 0) return MP_OK;
  const mp::Shape shape{matrices * queries, static_cast<int>(queries), static_cast<int>(cols), scale};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::dispatch<T, mp::ForwardKernels>(stream, mp::vectors_fit<T>(cols, x, y), shape, x, y);
  });
}

extern "C" int32_t mp_softmax_backward(
    void* stream, int32_t dtype, int64_t matrices, int64_t queries, int64_t cols, float scale, const void* dy,
    const void* y, void* dx) {
  if (!mp::good_sizes(matrices, queries, cols)) return MP_BAD_SIZE;
  if (matrices == 0) return MP_OK;
  const mp::Shape shape{matrices * queries, static_cast<int>(queries), static_cast<int>(cols), scale};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::dispatch<T, mp::BackwardKernels>(stream, mp::vectors_fit<T>(cols, dy, y, dx), shape, dy, y, dx);
  });
}

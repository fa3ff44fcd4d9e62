// Causal softmax and its gradient; include/softmax.h says what they compute.
//
// A row belongs to a warp (up to 32 columns a lane) or to a block (up to 16k columns) and stays in registers between
// its one read and its one write; wider or unaligned rows are read twice (from cache, if a row fits one). Only the
// live part of a row is read, everything is written. With L = sum over rows of (i + 1 + k - q), e bytes an element:
// forward L e + q k e a matrix, 1.5 q k e at q = k; backward 2 L e + q k e, 2 q k e at q = k. A row's last piece reads
// up to 16 - e bytes beyond the live part.
// With dropout the forward pass writes q k e more a matrix, the dropped probabilities; no mask is stored or read, both
// passes make it: a hash of 3 64-bit products an aligned group of four live elements, or an element where the rows do
// not come in 16-byte pieces.
#include "common.cuh"
#include "softmax.cuh"

namespace mp {
namespace {

constexpr int kWarpThreads = 256;  // where rows belong to warps
constexpr int kThreads = 512;      // at most, where they belong to blocks
constexpr int kFloats = 32;        // of a row that a thread keeps, at most

// The hardware's exp is good enough for what is rounded to half precision.
template <typename T>
__device__ inline float exponential(float x) {
  return fast_exp(x);
}
template <>
__device__ inline float exponential<float>(float x) {
  return expf(x);
}

// `scratch`: not that of the call before.
template <bool WARP, int N, typename Op>
__device__ inline void team_reduce(float (&value)[N], float* scratch, Op op, float neutral) {
  if constexpr (WARP) {
#pragma unroll
    for (int i = 0; i < N; i++) value[i] = warp_reduce(value[i], op);
  } else {
    block_reduce<false>(value, scratch, op, neutral);
  }
}

template <typename T, int FLOATS, bool WARP, bool MASKED>
__global__ void __launch_bounds__(WARP ? kWarpThreads : kThreads) forward_registers(Forward a) {
  constexpr int N = kVector<T>, PIECES = FLOATS / N;
  __shared__ float scratch[2][WARP ? 1 : kMaxWarps];
  const Shape& shape = a.shape;
  const int lanes = WARP ? MP_WARP : blockDim.x, lane = threadIdx.x % lanes;
  for (Rows<WARP> rows(shape, a.mask); rows.row < shape.rows; rows.next()) {
    const int64_t start = rows.row * shape.cols;
    const T* from = static_cast<const T*>(a.x) + start;
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
        value[p][i] = at + i < live ? in[p].value(i) * shape.scale : minus_infinity();
        top[0] = Max()(top[0], value[p][i]);
      }
    }
    team_reduce<WARP>(top, scratch[0], Max(), minus_infinity());
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const bool some = (p * lanes + lane) * N < live;  // what is dead among it gets e^-inf
#pragma unroll
      for (int i = 0; i < N; i++) {
        value[p][i] = some ? exponential<T>(value[p][i] - top[0]) : 0.0f;
        sum[0] += value[p][i];
      }
    }
    team_reduce<WARP>(sum, scratch[1], Add(), 0.0f);
    const float inverse = 1.0f / sum[0];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * lanes + lane) * N;
      if (at >= shape.cols) continue;
#pragma unroll
      for (int i = 0; i < N; i++) value[p][i] *= inverse;
      const Pack<T, N> out = to_pack<T>(value[p]);
      store<N>(static_cast<T*>(a.y) + start + at, out);
      if (!MASKED) continue;
      const Factors factors(shape, a.mask, rows);
      store<N>(static_cast<T*>(a.dropped) + start + at, dropped(out, at < live, factors, at));
    }
  }
}

// Any width (N = 1: and alignment): a thread's running maximum and sum (Milakov & Gimelshein, arXiv 1805.02867), joined
// over the block, then the row once more.
template <typename T, int N, bool MASKED>
__global__ void __launch_bounds__(kThreads) forward_any(Forward a) {
  __shared__ float scratch[2][kMaxWarps];
  const Shape& shape = a.shape;
  for (Rows<false> rows(shape, a.mask); rows.row < shape.rows; rows.next()) {
    const int64_t start = rows.row * shape.cols;
    const T* from = static_cast<const T*>(a.x) + start;
    const int live = rows.live();
    float own = minus_infinity(), sum[1] = {0.0f};
    for (int at = threadIdx.x * N; at < live; at += blockDim.x * N) {
      const Pack<T, N> in = load<N>(from + at);
      float value[N], top = own;
#pragma unroll
      for (int i = 0; i < N; i++) {
        value[i] = at + i < live ? in.value(i) * shape.scale : minus_infinity();
        top = Max()(top, value[i]);
      }
      if (top == minus_infinity()) continue;
      sum[0] *= exponential<T>(own - top);
#pragma unroll
      for (int i = 0; i < N; i++) sum[0] += exponential<T>(value[i] - top);
      own = top;
    }
    float top[1] = {own};
    block_reduce<false>(top, scratch[0], Max(), minus_infinity());
    sum[0] *= exponential<T>(own - top[0]);
    block_reduce<false>(sum, scratch[1], Add(), 0.0f);
    const float inverse = 1.0f / sum[0];
    for (int at = threadIdx.x * N; at < shape.cols; at += blockDim.x * N) {
      Pack<T, N> in = {}, out;
      if (at < live) in = load<N>(from + at);
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float value = exponential<T>(in.value(i) * shape.scale - top[0]) * inverse;
        out.set(i, from_float<T>(at + i < live ? value : 0.0f));
      }
      store<N>(static_cast<T*>(a.y) + start + at, out);
      if (!MASKED) continue;
      const Factors factors(shape, a.mask, rows);
      store<N>(static_cast<T*>(a.dropped) + start + at, dropped(out, at < live, factors, at));
    }
  }
}

template <typename T, int FLOATS, bool WARP, bool MASKED>
__global__ void __launch_bounds__(WARP ? kWarpThreads : kThreads) backward_registers(Backward a) {
  constexpr int N = kVector<T>, PIECES = FLOATS / N;
  __shared__ float scratch[2][WARP ? 1 : 2 * kMaxWarps];
  int turn = 0;
  const Shape& shape = a.shape;
  const int lanes = WARP ? MP_WARP : blockDim.x, lane = threadIdx.x % lanes;
  for (Rows<WARP> rows(shape, a.mask); rows.row < shape.rows; rows.next()) {
    const int64_t start = rows.row * shape.cols;
    const int live = rows.live();
    Pack<T, N> probs[PIECES] = {}, grads[PIECES] = {};  // zeros where dead
    float total[2] = {0.0f, 0.0f};                      // sum of dy * y, sum of y
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * lanes + lane) * N;
      if (at >= live) continue;
      probs[p] = load<N>(static_cast<const T*>(a.y) + start + at);
      grads[p] = load<N>(static_cast<const T*>(a.dy) + start + at);
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * lanes + lane) * N;
      if (at >= live) continue;
      if (MASKED) drop(grads[p], Factors(shape, a.mask, rows), at);
#pragma unroll
      for (int i = 0; i < N; i++) {
        if (at + i < live) continue;
        probs[p].set(i, T{});
        grads[p].set(i, T{});
      }
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        total[0] += grads[p].value(i) * probs[p].value(i);
        total[1] += probs[p].value(i);
      }
    }
    team_reduce<WARP>(total, scratch[turn], Add(), 0.0f);
    turn ^= 1;
    const float mean = total[0] / total[1];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = (p * lanes + lane) * N;
      if (at >= shape.cols) continue;
      float dx[N];
#pragma unroll
      for (int i = 0; i < N; i++) dx[i] = shape.scale * probs[p].value(i) * (grads[p].value(i) - mean);
      store<N>(static_cast<T*>(a.dx) + start + at, to_pack<T>(dx));
    }
  }
}

template <typename T, int N, bool MASKED>
__global__ void __launch_bounds__(kThreads) backward_any(Backward a) {
  __shared__ float scratch[2 * kMaxWarps];
  const Shape& shape = a.shape;
  for (Rows<false> rows(shape, a.mask); rows.row < shape.rows; rows.next()) {
    const T* probs = static_cast<const T*>(a.y) + rows.row * shape.cols;
    const T* grads = static_cast<const T*>(a.dy) + rows.row * shape.cols;
    const int live = rows.live();
    float total[2] = {0.0f, 0.0f};
    for (int at = threadIdx.x * N; at < live; at += blockDim.x * N) {
      Pack<T, N> p = load<N>(probs + at), g = load<N>(grads + at);
      if (MASKED) drop(g, Factors(shape, a.mask, rows), at);
#pragma unroll
      for (int i = 0; i < N; i++) {
        if (at + i >= live) continue;
        total[0] += g.value(i) * p.value(i);
        total[1] += p.value(i);
      }
    }
    block_reduce(total, scratch, Add(), 0.0f);
    const float mean = total[0] / total[1];
    for (int at = threadIdx.x * N; at < shape.cols; at += blockDim.x * N) {
      Pack<T, N> p = {}, g = {}, out;
      if (at < live) {
        p = load<N>(probs + at), g = load<N>(grads + at);
        if (MASKED) drop(g, Factors(shape, a.mask, rows), at);
      }
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float value = shape.scale * p.value(i) * (g.value(i) - mean);
        out.set(i, from_float<T>(at + i < live ? value : 0.0f));
      }
      store<N>(static_cast<T*>(a.dx) + rows.row * shape.cols + at, out);
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
template <typename T, bool MASKED, typename Kernels, typename Arguments>
int32_t dispatch(void* stream, bool fits, const Arguments& arguments) {
  const Shape& shape = arguments.shape;
  const int cols = shape.cols;
  if (fits && cols <= kFloats * MP_WARP) {
    const unsigned blocks = blocks_for((shape.rows * MP_WARP + kWarpThreads - 1) / kWarpThreads, 8);
    const auto kernel = cols <= 8 * MP_WARP    ? Kernels::template registers<T, 8, true, MASKED>()
                        : cols <= 16 * MP_WARP ? Kernels::template registers<T, 16, true, MASKED>()
                                               : Kernels::template registers<T, kFloats, true, MASKED>();
    return launch(kernel, blocks, kWarpThreads, stream, arguments);
  }
  if (fits && cols <= kFloats * kThreads) {
    const unsigned threads = block_threads((cols + kFloats - 1) / kFloats, kThreads);
    const auto kernel = Kernels::template registers<T, kFloats, false, MASKED>();
    return launch(kernel, blocks_for(shape.rows, 2048 / threads), threads, stream, arguments);
  }
  const int n = fits ? kVector<T> : 1;
  const auto kernel =
      fits ? Kernels::template any<T, kVector<T>, MASKED>() : Kernels::template any<T, 1, MASKED>();
  const unsigned threads = block_threads((cols + n - 1) / n, kThreads);
  return launch(
      kernel, blocks_for(shape.rows, 2048 / threads < 16 ? 2048 / threads : 16), threads, stream, arguments);
}

struct ForwardKernels {
  template <typename T, int FLOATS, bool WARP, bool MASKED>
  static auto registers() { return &forward_registers<T, FLOATS, WARP, MASKED>; }
  template <typename T, int N, bool MASKED>
  static auto any() { return &forward_any<T, N, MASKED>; }
};

struct BackwardKernels {
  template <typename T, int FLOATS, bool WARP, bool MASKED>
  static auto registers() { return &backward_registers<T, FLOATS, WARP, MASKED>; }
  template <typename T, int N, bool MASKED>
  static auto any() { return &backward_any<T, N, MASKED>; }
};

bool good_sizes(int64_t matrices, int64_t queries, int64_t cols, const mp_probability_mask* mask) {
  return matrices >= 0 && queries >= 1 && cols >= queries && cols <= (1 << 24) &&
         (mask == nullptr || (mask->heads >= 1 && mask->heads <= INT32_MAX && mask->threshold >= 1 &&
                              mask->threshold < 65536));
}

Mask mask_of(const mp_probability_mask* mask) {
  if (mask == nullptr) return Mask{nullptr, Keep{}, 0, 1};
  return Mask{
      mask->keys, keep_of(mask->op_key, mask->threshold), mask->head_offset, static_cast<int>(mask->heads)};
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_softmax_forward(
    void* stream, int32_t dtype, int64_t matrices, int64_t queries, int64_t cols, float scale, const void* x, void* y,
    const mp_probability_mask* mask, void* dropped) {
  if (!mp::good_sizes(matrices, queries, cols, mask)) return MP_BAD_SIZE;
  if (matrices == 0) return MP_OK;
  const mp::Shape shape{matrices * queries, static_cast<int>(queries), static_cast<int>(cols), scale};
  const mp::Forward a{shape, mp::mask_of(mask), x, y, dropped};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool fits = mp::vectors_fit<T>(cols, x, y, dropped);
    return mask == nullptr ? mp::dispatch<T, false, mp::ForwardKernels>(stream, fits, a)
                           : mp::dispatch<T, true, mp::ForwardKernels>(stream, fits, a);
  });
}

extern "C" int32_t mp_softmax_backward(
    void* stream, int32_t dtype, int64_t matrices, int64_t queries, int64_t cols, float scale, const void* dy,
    const void* y, const mp_probability_mask* mask, void* dx) {
  if (!mp::good_sizes(matrices, queries, cols, mask)) return MP_BAD_SIZE;
  if (matrices == 0) return MP_OK;
  const mp::Shape shape{matrices * queries, static_cast<int>(queries), static_cast<int>(cols), scale};
  const mp::Backward a{shape, mp::mask_of(mask), dy, y, dx};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool fits = mp::vectors_fit<T>(cols, dy, y, dx);
    return mask == nullptr ? mp::dispatch<T, false, mp::BackwardKernels>(stream, fits, a)
                           : mp::dispatch<T, true, mp::BackwardKernels>(stream, fits, a);
  });
}

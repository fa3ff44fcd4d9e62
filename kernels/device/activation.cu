// GELU of x + bias and SwiGLU, forward and backward; include/activation.h says what they compute.
//
// A block takes a strip of columns (one 16-byte piece a thread) and walks down the rows (persistent grid), so that the
// bias and the sums of dbias stay in registers and no index is divided. Bytes: gelu forward x in, y out; backward x, dy
// in, dx out; swiglu forward 2 f in, f out; backward 3 f in, 2 f out; nothing twice. dbias adds partial sums, written
// and read once: 8 / (rows of a slot * 3 * element size), so at most 8 % in half precision, as a slot has at least
// kRowsOfSlot, and 0.5 % at 16k rows of 16k columns on an H200. Arithmetic: 13 (swiglu) to 29 (backward with erf)
// instructions an element, one or two of them special functions: less than an H200 issues in the time of the bytes.
#include "activation.h"
#include "common.cuh"
#include "gelu.h"
#include "slots.cuh"

namespace mp {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksEach = 4;
constexpr int kRowsOfSlot = 16;

template <bool APPROXIMATE>
__device__ inline float gelu_slope(float x) {
  if (APPROXIMATE) return gelu_tanh_slope(x);
  const float density = power_of_2(-0.5f * kLog2E * (x * x) - 1.32574806f);  // the constant: log2(1 / sqrt(2 pi))
  return normal(x) + x * density;
}

struct Gelu {
  int64_t rows;
  int cols, strips;
  const void *dy, *x, *bias;
  void* out;
  float* partial;  // [slots, cols], or NULL
};

template <typename T, int N>
__device__ inline void load_bias(const void* bias, int at, float (&value)[N]) {
  Pack<T, N> in = {};
  if (bias != nullptr) in = load<N>(static_cast<const T*>(bias) + at);
#pragma unroll
  for (int i = 0; i < N; i++) value[i] = bias != nullptr ? in.value(i) : 0.0f;
}

template <typename T, int N, bool APPROXIMATE>
__global__ void __launch_bounds__(kThreads, kBlocksEach) gelu_forward(Gelu a) {
  constexpr int kRows = 4;  // rows in flight
  const int64_t slots = gridDim.x / a.strips;
  const int at = ((blockIdx.x % a.strips) * blockDim.x + threadIdx.x) * N;
  if (at >= a.cols) return;
  float bias[N];
  load_bias<T>(a.bias, at, bias);
  for (int64_t row = blockIdx.x / a.strips; row < a.rows; row += kRows * slots) {
    Pack<T, N> in[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int64_t here = row + r * slots;
      if (here < a.rows) in[r] = load<N>(static_cast<const T*>(a.x) + here * a.cols + at);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int64_t here = row + r * slots;
      if (here >= a.rows) break;
      float out[N];
#pragma unroll
      for (int i = 0; i < N; i++) out[i] = gelu<APPROXIMATE>(in[r].value(i) + bias[i]);
      store<N>(static_cast<T*>(a.out) + here * a.cols + at, to_pack<T>(out));
    }
  }
}

template <typename T, int N, bool APPROXIMATE>
__global__ void __launch_bounds__(kThreads, kBlocksEach) gelu_backward(Gelu a) {
  constexpr int kRows = 2;
  const int64_t slots = gridDim.x / a.strips, slot = blockIdx.x / a.strips;
  const int at = ((blockIdx.x % a.strips) * blockDim.x + threadIdx.x) * N;
  if (at >= a.cols) return;
  float bias[N], sum[N] = {};
  load_bias<T>(a.bias, at, bias);
  for (int64_t row = slot; row < a.rows; row += kRows * slots) {
    Pack<T, N> in[kRows], dy[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int64_t here = row + r * slots;
      if (here >= a.rows) continue;
      in[r] = load<N>(static_cast<const T*>(a.x) + here * a.cols + at);
      dy[r] = load<N>(static_cast<const T*>(a.dy) + here * a.cols + at);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int64_t here = row + r * slots;
      if (here >= a.rows) break;
      float out[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        out[i] = dy[r].value(i) * gelu_slope<APPROXIMATE>(in[r].value(i) + bias[i]);
        sum[i] += out[i];
      }
      store<N>(static_cast<T*>(a.out) + here * a.cols + at, to_pack<T>(out));
    }
  }
  if (a.partial == nullptr) return;
#pragma unroll
  for (int i = 0; i < N; i++) a.partial[slot * a.cols + at + i] = sum[i];
}

struct Swiglu {
  int64_t rows;
  int cols, strips;
  const void *dy, *x;
  void* out;
};

template <typename T, int N>
__global__ void __launch_bounds__(kThreads, kBlocksEach) swiglu_forward(Swiglu a) {
  constexpr int kRows = 2;
  const int64_t slots = gridDim.x / a.strips;
  const int at = ((blockIdx.x % a.strips) * blockDim.x + threadIdx.x) * N;
  if (at >= a.cols) return;
  for (int64_t row = blockIdx.x / a.strips; row < a.rows; row += kRows * slots) {
    Pack<T, N> gate[kRows], up[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int64_t here = row + r * slots;
      if (here >= a.rows) continue;
      const T* x = static_cast<const T*>(a.x) + here * 2 * a.cols + at;
      gate[r] = load<N>(x);
      up[r] = load<N>(x + a.cols);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int64_t here = row + r * slots;
      if (here >= a.rows) break;
      float out[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float g = gate[r].value(i);
        out[i] = g * sigmoid(g) * up[r].value(i);
      }
      store<N>(static_cast<T*>(a.out) + here * a.cols + at, to_pack<T>(out));
    }
  }
}

// silu' = s + gate s (1 - s), s = sigmoid(gate).
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, kBlocksEach) swiglu_backward(Swiglu a) {
  constexpr int kRows = 2;
  const int64_t slots = gridDim.x / a.strips;
  const int at = ((blockIdx.x % a.strips) * blockDim.x + threadIdx.x) * N;
  if (at >= a.cols) return;
  for (int64_t row = blockIdx.x / a.strips; row < a.rows; row += kRows * slots) {
    Pack<T, N> gate[kRows], up[kRows], dy[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int64_t here = row + r * slots;
      if (here >= a.rows) continue;
      const T* x = static_cast<const T*>(a.x) + here * 2 * a.cols + at;
      gate[r] = load<N>(x);
      up[r] = load<N>(x + a.cols);
      dy[r] = load<N>(static_cast<const T*>(a.dy) + here * a.cols + at);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int64_t here = row + r * slots;
      if (here >= a.rows) break;
      float dgate[N], dup[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float g = gate[r].value(i), d = dy[r].value(i);
        const Sigmoid s = sigmoid_of(-kLog2E * fabsf(g), g < 0.0f);
        dgate[i] = d * up[r].value(i) * (s.at + g * s.slope);
        dup[i] = d * (g * s.at);
      }
      T* out = static_cast<T*>(a.out) + here * 2 * a.cols + at;
      store<N>(out, to_pack<T>(dgate));
      store<N>(out + a.cols, to_pack<T>(dup));
    }
  }
}

// How the grid divides [rows, cols]: `strips` of columns times `slots` of rows.
struct Grid {
  int64_t strips, slots;
  unsigned threads;
  unsigned blocks() const { return static_cast<unsigned>(strips * slots); }
};

Grid grid_of(int64_t rows, int64_t cols, int width, int rows_of_slot) {
  const int64_t pieces = (cols + width - 1) / width, strips = (pieces + kThreads - 1) / kThreads;
  const int64_t most = static_cast<int64_t>(multiprocessors()) * kBlocksEach / strips;
  const int64_t useful = rows / rows_of_slot, slots = useful < most ? useful : most;
  return {strips, slots < 1 ? 1 : slots, block_threads((pieces + strips - 1) / strips, kThreads)};
}

template <typename T, int N>
int32_t run_gelu_forward(void* stream, bool approximate, Gelu a) {
  const Grid grid = grid_of(a.rows, a.cols, N, 1);
  a.strips = static_cast<int>(grid.strips);
  const auto kernel = approximate ? gelu_forward<T, N, true> : gelu_forward<T, N, false>;
  return launch(kernel, grid.blocks(), grid.threads, stream, a);
}

template <typename T, int N>
int32_t run_gelu_backward(void* stream, bool approximate, Gelu a, void* dbias, int64_t* kept) {
  const Grid grid = grid_of(a.rows, a.cols, N, kRowsOfSlot);
  a.strips = static_cast<int>(grid.strips);
  const auto kernel = approximate ? gelu_backward<T, N, true> : gelu_backward<T, N, false>;
  const int32_t code = launch(kernel, grid.blocks(), grid.threads, stream, a);
  if (code != MP_OK || dbias == nullptr) return code;
  return finish_slots<T>(stream, a.partial, grid.slots, a.cols, kept, dbias);
}

template <typename T, int N>
int32_t run_swiglu(void* stream, Swiglu a) {
  const Grid grid = grid_of(a.rows, a.cols, N, 1);
  a.strips = static_cast<int>(grid.strips);
  const auto kernel = a.dy == nullptr ? swiglu_forward<T, N> : swiglu_backward<T, N>;
  return launch(kernel, grid.blocks(), grid.threads, stream, a);
}

bool bad(int64_t rows, int64_t cols) { return rows < 0 || cols < 1 || cols > (1 << 24); }

}  // namespace
}  // namespace mp

// 8, the widest piece: fewer strips, more slots than any other path has.
extern "C" int64_t mp_bias_gelu_workspace(int64_t rows, int64_t cols) {
  return mp::grid_of(rows, cols, 8, mp::kRowsOfSlot).slots * cols;
}

extern "C" int32_t mp_bias_gelu_forward(
    void* stream, int32_t dtype, int32_t approximate, int64_t rows, int64_t cols, const void* x, const void* bias,
    void* y) {
  if (mp::bad(rows, cols)) return MP_BAD_SIZE;
  if (rows == 0) return MP_OK;
  const mp::Gelu a{rows, static_cast<int>(cols), 0, nullptr, x, bias, y, nullptr};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::vectors_fit<T>(cols, x, bias, y) ? mp::run_gelu_forward<T, mp::kVector<T>>(stream, approximate, a)
                                                : mp::run_gelu_forward<T, 1>(stream, approximate, a);
  });
}

extern "C" int32_t mp_bias_gelu_backward(
    void* stream, int32_t dtype, int32_t approximate, int64_t rows, int64_t cols, const void* dy, const void* x,
    const void* bias, void* dx, void* dbias, float* workspace, int64_t* kept) {
  if (mp::bad(rows, cols)) return MP_BAD_SIZE;
  if (rows == 0 && dbias == nullptr) return MP_OK;
  const mp::Gelu a{rows, static_cast<int>(cols), 0, dy, x, bias, dx, dbias == nullptr ? nullptr : workspace};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::vectors_fit<T>(cols, dy, x, bias, dx)
               ? mp::run_gelu_backward<T, mp::kVector<T>>(stream, approximate, a, dbias, kept)
               : mp::run_gelu_backward<T, 1>(stream, approximate, a, dbias, kept);
  });
}

extern "C" int32_t mp_swiglu_forward(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, const void* x, void* y) {
  if (mp::bad(rows, cols)) return MP_BAD_SIZE;
  if (rows == 0) return MP_OK;
  const mp::Swiglu a{rows, static_cast<int>(cols), 0, nullptr, x, y};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::vectors_fit<T>(cols, x, y) ? mp::run_swiglu<T, mp::kVector<T>>(stream, a)
                                          : mp::run_swiglu<T, 1>(stream, a);
  });
}

extern "C" int32_t mp_swiglu_backward(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, const void* dy, const void* x, void* dx) {
  if (mp::bad(rows, cols)) return MP_BAD_SIZE;
  if (rows == 0) return MP_OK;
  const mp::Swiglu a{rows, static_cast<int>(cols), 0, dy, x, dx};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::vectors_fit<T>(cols, dy, x, dx) ? mp::run_swiglu<T, mp::kVector<T>>(stream, a)
                                               : mp::run_swiglu<T, 1>(stream, a);
  });
}

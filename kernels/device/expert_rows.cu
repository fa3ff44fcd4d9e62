// Rows of tokens at the places of their experts; include/expert_rows.h says what they compute.
//
// A warp takes a row (gather) or a token (the others), in pieces of 16 bytes where rows come in such. Indices and
// weights of a token are read by all lanes at once, from cache after the first piece: 8 to 12 bytes beside each row.
// Bytes: gather a row in, a row out; the sum k rows in, one out; backward grad in, then k rows in and k out, nothing
// twice up to 8 rows a token.
// A product and its sum are rounded one by one, as torch's ops round them: no fused multiply-add, on any compiler.
#include "indices.cuh"
#include "expert_rows.h"

namespace mp {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksEach = 8;
constexpr int kFlight = 4;  // pieces of a row, or rows of a token, that a lane has in flight
constexpr int kEach = 8;    // rows of a token whose inner products a lane keeps

__device__ inline float total(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#elif defined(__clang__)
#pragma clang fp contract(off)
  return a + b;
#else
  return a + b;
#endif
}

struct Gather {
  int64_t rows;
  int cols;  // pieces of U
  const void* x;
  const int64_t* source;
  void* out;
  int64_t named;
};

struct Sum {
  int64_t tokens;
  int cols, k;
  const void* y;
  const int64_t* place;
  const float* weight;
  void* out;
  int64_t named;
};

struct Backward {
  int64_t tokens;
  int cols, k;
  const void *grad, *y;
  const int64_t* place;
  const float* weight;
  void* dy;
  float* dweight;
  int64_t named;
};

// The first row or token of this warp, and how many warps there are.
__device__ inline int64_t first_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * (blockDim.x / MP_WARP) + threadIdx.x / MP_WARP;
}
__device__ inline int64_t warps_of_grid() { return static_cast<int64_t>(gridDim.x) * (blockDim.x / MP_WARP); }

template <typename U, int N>
__global__ void __launch_bounds__(kThreads) gather(Gather a) {
  const int lane = threadIdx.x % MP_WARP;
  for (int64_t row = first_of_warp(); row < a.rows; row += warps_of_grid()) {
    const U* from = in_global(static_cast<const U*>(a.x) + checked(a.source[row], 0, a.named, "row of a token") * a.cols);
    U* to = in_global(static_cast<U*>(a.out) + row * a.cols);
    for (int start = lane * N; start < a.cols; start += MP_WARP * N * kFlight) {
      Pack<U, N> piece[kFlight];
#pragma unroll
      for (int p = 0; p < kFlight; p++) {
        const int at = start + p * MP_WARP * N;
        if (at < a.cols) piece[p] = load<N>(from + at);
      }
#pragma unroll
      for (int p = 0; p < kFlight; p++) {
        const int at = start + p * MP_WARP * N;
        if (at < a.cols) store<N>(to + at, piece[p]);
      }
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) sum_rows(Sum a) {
  const int lane = threadIdx.x % MP_WARP;
  for (int64_t token = first_of_warp(); token < a.tokens; token += warps_of_grid()) {
    const int64_t* place = in_global(a.place + token * a.k);
    for (int at = lane * N; at < a.cols; at += MP_WARP * N) {
      float sum[N] = {};
      for (int start = 0; start < a.k; start += kFlight) {
        Pack<T, N> piece[kFlight];
        int64_t row[kFlight];
#pragma unroll
        for (int j = 0; j < kFlight; j++) {
          row[j] = start + j < a.k ? checked(place[start + j], -1, a.named, "place of a token") : -1;
          if (row[j] >= 0) piece[j] = load<N>(in_global(static_cast<const T*>(a.y) + row[j] * a.cols + at));
        }
#pragma unroll
        for (int j = 0; j < kFlight; j++) {
          if (row[j] < 0) continue;
          const float weight = a.weight != nullptr ? a.weight[token * a.k + start + j] : 1.0f;
#pragma unroll
          for (int i = 0; i < N; i++) sum[i] = total(sum[i], rounded_product(weight, piece[j].value(i)));
        }
      }
      store<N>(in_global(static_cast<T*>(a.out) + token * a.cols + at), to_pack<T>(sum));
    }
  }
}

// Up to K rows of a token from number `start` on: the whole of their columns.
template <typename T, int N, int K>
__device__ inline void backward_rows(const Backward& a, int64_t token, int start, int lane) {
  constexpr int kTogether = K < kFlight ? K : kFlight;
  const int64_t first = token * a.k + start;
  const int count = a.k - start < K ? a.k - start : K;
  float dot[K] = {};
  for (int at = lane * N; at < a.cols; at += MP_WARP * N) {
    const Pack<T, N> grad = load<N>(in_global(static_cast<const T*>(a.grad) + token * a.cols + at));
#pragma unroll
    for (int from = 0; from < K; from += kTogether) {
      Pack<T, N> y[kTogether];
      int64_t row[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; j++) {  // before any store, which might be to what is read
        row[j] = from + j < count ? checked(a.place[first + from + j], -1, a.named, "place of a token") : -1;
        if (row[j] >= 0) y[j] = load<N>(in_global(static_cast<const T*>(a.y) + row[j] * a.cols + at));
      }
#pragma unroll
      for (int j = 0; j < kTogether; j++) {
        if (row[j] < 0) continue;
        const float weight = a.weight[first + from + j];
        float dy[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
          const float g = grad.value(i);
          dot[from + j] += g * y[j].value(i);
          dy[i] = g * weight;
        }
        store<N>(in_global(static_cast<T*>(a.dy) + row[j] * a.cols + at), to_pack<T>(dy));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < K; j++) {
    const float sum = warp_reduce(dot[j], Add());
    if (lane == 0 && j < count) a.dweight[first + j] = sum;
  }
}

template <typename T, int N, int K>
__global__ void __launch_bounds__(kThreads, 2) sum_rows_backward(Backward a) {
  const int lane = threadIdx.x % MP_WARP;
  for (int64_t token = first_of_warp(); token < a.tokens; token += warps_of_grid()) {
    for (int start = 0; start < a.k; start += K) backward_rows<T, N, K>(a, token, start, lane);
  }
}

// A warp for each of `work` rows.
template <typename A>
int32_t run(void* stream, void (*kernel)(A), int64_t work, const A& a) {
  constexpr int64_t kWarps = kThreads / MP_WARP;
  return launch(kernel, persistent_blocks((work + kWarps - 1) / kWarps, kBlocksEach), kThreads, stream, a);
}

template <typename T, int N>
int32_t run_backward(void* stream, const Backward& a) {
  return a.k <= 2 ? run(stream, sum_rows_backward<T, N, 2>, a.tokens, a)
                  : run(stream, sum_rows_backward<T, N, kEach>, a.tokens, a);
}

template <typename U, int N>
int32_t run_gather(void* stream, Gather a, int64_t bytes) {
  a.cols = static_cast<int>(bytes / sizeof(U));
  return run(stream, gather<U, N>, a.rows, a);
}

bool good_sizes(int64_t rows, int64_t cols, int64_t k) {
  return rows >= 0 && cols >= 1 && cols <= (1 << 24) && k >= 1 && k <= MP_MOST_CHOICES;
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_gather_rows(
    void* stream, int32_t dtype, int64_t rows, int64_t cols, const void* x, const int64_t* source, void* out,
    int64_t named) {
  if (!mp::good_sizes(rows, cols, 1)) return MP_BAD_SIZE;
  const mp::Gather a{rows, 0, x, source, out, named};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (rows == 0) return static_cast<int32_t>(MP_OK);
    const int64_t bytes = cols * static_cast<int64_t>(sizeof(T));
    if (mp::vectors_fit<T>(cols, x, out)) return mp::run_gather<uint32_t, 4>(stream, a, bytes);
    if (sizeof(T) == 4) return mp::run_gather<uint32_t, 1>(stream, a, bytes);
    return mp::run_gather<uint16_t, 1>(stream, a, bytes);
  });
}

extern "C" int32_t mp_sum_rows(
    void* stream, int32_t dtype, int64_t tokens, int64_t cols, int64_t k, const void* y, const int64_t* place,
    const float* weight, void* out, int64_t named) {
  if (!mp::good_sizes(tokens, cols, k)) return MP_BAD_SIZE;
  const mp::Sum a{tokens, static_cast<int>(cols), static_cast<int>(k), y, place, weight, out, named};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (tokens == 0) return static_cast<int32_t>(MP_OK);
    return mp::vectors_fit<T>(cols, y, out) ? mp::run(stream, mp::sum_rows<T, mp::kVector<T>>, tokens, a)
                                            : mp::run(stream, mp::sum_rows<T, 1>, tokens, a);
  });
}

extern "C" int32_t mp_sum_rows_backward(
    void* stream, int32_t dtype, int64_t tokens, int64_t cols, int64_t k, const void* grad, const void* y,
    const int64_t* place, const float* weight, void* dy, float* dweight, int64_t named) {
  if (!mp::good_sizes(tokens, cols, k)) return MP_BAD_SIZE;
  const mp::Backward a{tokens, static_cast<int>(cols), static_cast<int>(k), grad, y, place, weight, dy, dweight,
                       named};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (tokens == 0) return static_cast<int32_t>(MP_OK);
    return mp::vectors_fit<T>(cols, grad, y, dy) ? mp::run_backward<T, mp::kVector<T>>(stream, a)
                                                 : mp::run_backward<T, 1>(stream, a);
  });
}

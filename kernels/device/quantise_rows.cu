// Rows in 8 bits, each with its scale; include/quantise.h says what is computed, include/fp8.h how.
//
// A block takes whole rows, one after another (persistent grid). A bf16 row of up to 16384 elements stays in registers
// between its largest element and its cast: 2 bytes an element in, 1 out. Others are read twice.
#include "quantise.cuh"

namespace mp {
namespace {

struct Rows {
  int64_t rows, cols;
  const void* x;
  uint8_t* values;
  float* inverse;
  Format format;
};

__device__ inline float row_scale(uint32_t most, const Rows& a, int64_t row, float* scratch) {
  const uint32_t bits = scale_bits(block_largest(most, scratch), a.format);
  if (threadIdx.x == 0) a.inverse[row] = float_of_bits(inverse_bits(bits));
  return float_of_bits(bits);
}

template <typename T, int PIECES>
__global__ void __launch_bounds__(kThreads) rows_registers(Rows a) {
  __shared__ float scratch[kMaxWarps];
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x) + row * a.cols;
    Eight<T> in[PIECES];
    uint32_t most = 0;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int64_t at = (p * blockDim.x + threadIdx.x) * kEight;
      in[p] = load_eight<true>(x + at, at < a.cols ? kEight : 0);
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) most = larger(most, largest_of(in[p]));
    const float scale = row_scale(most, a, row, scratch);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int64_t at = (p * blockDim.x + threadIdx.x) * kEight;
      store_eight<true>(
          a.values + row * a.cols + at, cast_eight(in[p], scale, a.format), at < a.cols ? kEight : 0);
    }
  }
}

// Any width and alignment; a row is read twice.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads) rows_any(Rows a) {
  __shared__ float scratch[kMaxWarps];
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x) + row * a.cols;
    uint32_t most = 0;
    for (int64_t at = threadIdx.x * kEight; at < a.cols; at += blockDim.x * kEight) {
      most = larger(most, largest_of(load_eight<ALIGNED>(x + at, at_most(a.cols - at, kEight))));
    }
    const float scale = row_scale(most, a, row, scratch);
    for (int64_t at = threadIdx.x * kEight; at < a.cols; at += blockDim.x * kEight) {
      const int live = at_most(a.cols - at, kEight);
      const Eight<T> in = load_eight<ALIGNED>(x + at, live);
      store_eight<ALIGNED>(a.values + row * a.cols + at, cast_eight(in, scale, a.format), live);
    }
  }
}

template <typename T>
int32_t run_rows(void* stream, const Rows& a) {
  const unsigned blocks = persistent_blocks(a.rows, kBlocksEach);
  const int64_t packs = (a.cols + kEight - 1) / kEight;
  if constexpr (kFast<T>) {
    if (a.cols % kEight == 0 && on_sixteen(a.x) && on_sixteen(a.values)) {
      const int64_t pieces = (packs + kThreads - 1) / kThreads;
      const unsigned threads = block_threads((packs + pieces - 1) / pieces, kThreads);
      if (pieces == 1) return launch(rows_registers<T, 1>, blocks, threads, stream, a);
      if (pieces == 2) return launch(rows_registers<T, 2>, blocks, threads, stream, a);
      if (pieces <= 4) return launch(rows_registers<T, 4>, blocks, threads, stream, a);
      if (pieces <= 8) return launch(rows_registers<T, 8>, blocks, threads, stream, a);
      return launch(rows_any<T, true>, blocks, threads, stream, a);
    }
  }
  return launch(rows_any<T, false>, blocks, block_threads(packs, kThreads), stream, a);
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_fp8_rows(
    void* stream, int32_t dtype, int32_t format, int64_t rows, int64_t cols, const void* x, void* values,
    float* inverse) {
  return mp::for_input(dtype, format, rows, cols, [&](auto zero, const mp::Format& f) {
    return mp::run_rows<decltype(zero)>(
        stream, mp::Rows{rows, cols, x, static_cast<uint8_t*>(values), inverse, f});
  });
}

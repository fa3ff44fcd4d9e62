// Hashes of memory by rows; include/row_hashes.h says what is computed.
//
// A warp takes a row, in pieces of 16 bytes where the memory is aligned to those, and adds up products modulo 2^64, whose
// order does not matter. Bytes: each word once, 8 bytes a row of 16 KiB out; the factors, 32 KiB, come from cache.
#include "common.cuh"
#include "row_hashes.h"

namespace mp {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksEach = 8;

struct Hash {
  int64_t words;
  const void* data;
  const int64_t* factors;
  int64_t* out;
};

__device__ inline uint64_t product(int64_t word, int64_t factor) {
  return static_cast<uint64_t>(word) * static_cast<uint64_t>(factor);
}

// Of the lanes of a warp, in all of them.
__device__ inline uint64_t lanes_sum(unsigned long long value) {
#pragma unroll
  for (int mask = MP_WARP / 2; mask > 0; mask /= 2) {
#if defined(__HIP_PLATFORM_AMD__) || defined(MP_EMULATOR)
    value += __shfl_xor(value, mask);
#else
    value += __shfl_xor_sync(0xffffffffu, value, mask);
#endif
  }
  return value;
}

template <typename W, int N>
__global__ void __launch_bounds__(kThreads) hash_rows(Hash a) {
  const int lane = threadIdx.x % MP_WARP;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / MP_WARP);
  const int64_t rows = (a.words + MP_HASH_ROW - 1) / MP_HASH_ROW;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / MP_WARP) + threadIdx.x / MP_WARP; row < rows;
       row += warps) {
    const int64_t left = a.words - row * MP_HASH_ROW;
    const int count = left < MP_HASH_ROW ? static_cast<int>(left) : MP_HASH_ROW;
    const W* words = static_cast<const W*>(a.data) + row * MP_HASH_ROW;
    uint64_t sum = 0;
#pragma unroll 4
    for (int at = lane * N; at + N <= count; at += MP_WARP * N) {
      const Pack<W, N> piece = load<N>(words + at);
      if constexpr (N == 1) {
        sum += product(piece.at[0], a.factors[at]);
      } else {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
          const Pack<int64_t, 2> factor = load<2>(a.factors + at + i);
          sum += product(piece.at[i], factor.at[0]) + product(piece.at[i + 1], factor.at[1]);
        }
      }
    }
    const int behind = count / N * N + lane;  // what makes no piece: less than a warp
    if (N > 1 && behind < count) sum += product(words[behind], a.factors[behind]);
    sum = lanes_sum(sum);
    if (lane == 0) a.out[row] = static_cast<int64_t>(sum);
  }
}

template <typename W>
int32_t hash(void* stream, const Hash& a) {
  constexpr int N = 16 / sizeof(W);
  constexpr int64_t at_once = kThreads / MP_WARP;
  const int64_t rows = (a.words + MP_HASH_ROW - 1) / MP_HASH_ROW;
  const unsigned blocks = persistent_blocks((rows + at_once - 1) / at_once, kBlocksEach);
  const bool aligned = (reinterpret_cast<uintptr_t>(a.data) | reinterpret_cast<uintptr_t>(a.factors)) % 16 == 0;
  return launch(aligned ? hash_rows<W, N> : hash_rows<W, 1>, blocks, kThreads, stream, a);
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_row_hashes(
    void* stream, int32_t size, int64_t words, const void* data, const int64_t* factors, int64_t* out) {
  if (words < 1) return MP_BAD_SIZE;
  const mp::Hash a{words, data, factors, out};
  switch (size) {
    case 1: return mp::hash<int8_t>(stream, a);
    case 2: return mp::hash<int16_t>(stream, a);
    case 4: return mp::hash<int32_t>(stream, a);
    default: return MP_BAD_SIZE;
  }
}

// What the sources of the norms' backward pass share: its arguments, and where the sums of a block go.
#pragma once

#include "common.cuh"

namespace mp {

constexpr int kNormThreads = 512;

struct Backward {
  int64_t rows;
  int cols;
  const void *dy, *dsum, *sum, *weight;
  const float *mean, *rstd;
  void* dx;
  float* partial;  // [slots, 1 to 3, cols]: dweight, dbias, dx_bias
  int team;        // threads of a team
  bool has_bias;
};

template <int N>
__device__ inline void store_sums(float* to, const float (&value)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) store<4>(to + i, Pack<float, 4>{value[i], value[i + 1], value[i + 2], value[i + 3]});
}

// dx, and the partial sums in `slots` slots, of rows that norm_backward.cu does not keep in registers. vectors: rows may
// be read in 16-byte pieces.
template <typename T, bool RMS>
int32_t norm_backward_wide(void* stream, Backward a, int64_t slots, bool vectors);

}  // namespace mp

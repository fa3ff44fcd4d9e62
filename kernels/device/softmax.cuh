// The rows that a team of softmax.cu takes, and dropout of their probabilities and of the gradients of those.
#pragma once

#include "common.cuh"
#include "mask.cuh"
#include "softmax.h"

namespace mp {
namespace {

struct Shape {
  int64_t rows;
  int queries, cols;
  float scale;
};

// Of batch * heads matrices. Without dropout: keys NULL, heads 1.
struct Mask {
  const int64_t* keys;
  Keep keep;
  int64_t head_offset;
  int heads;
};

struct Forward {
  Shape shape;
  Mask mask;
  const void* x;
  void *y, *dropped;
};

struct Backward {
  Shape shape;
  Mask mask;
  const void *dy, *y;
  void* dx;
};

// The rows of a team, a warp or the block: first, first + step, ... with the number of live columns of each, and what
// its mask is made from. Additions only: the divisions are in the constructor.
template <bool WARP>
struct Rows {
  int64_t row, step;
  int query, step_query, queries, dead;
  int head, step_head, heads, sample, step_sample;

  __device__ Rows(const Shape& shape, const Mask& mask)
      : queries(shape.queries), dead(shape.cols - shape.queries), heads(mask.heads) {
    const int teams = WARP ? blockDim.x / MP_WARP : 1;
    row = static_cast<int64_t>(blockIdx.x) * teams + (WARP ? threadIdx.x / MP_WARP : 0);
    step = static_cast<int64_t>(gridDim.x) * teams;
    query = static_cast<int>(row % queries);
    step_query = static_cast<int>(step % queries);
    const int64_t matrix = row / queries, step_matrix = step / queries;
    head = static_cast<int>(matrix % heads), sample = static_cast<int>(matrix / heads);
    step_head = static_cast<int>(step_matrix % heads), step_sample = static_cast<int>(step_matrix / heads);
  }
  __device__ int live() const { return query + 1 + dead; }
  __device__ void next() {
    row += step;
    query += step_query;
    head += step_head;
    sample += step_sample;
    if (query >= queries) query -= queries, head++;
    if (head >= heads) head -= heads, sample++;
  }
};

// Scale or 0 of the elements of a row. N > 1: cols is a multiple of 4.
struct Factors {
  const Keep& keep;
  uint64_t key;
  int64_t start;    // position of the row's first element
  uint64_t scaled;  // (start >> 2) * kGolden

  template <bool WARP>
  __device__ Factors(const Shape& shape, const Mask& mask, const Rows<WARP>& rows) : keep(mask.keep) {
    key = static_cast<uint64_t>(mask.keys[rows.sample]);
    start = ((mask.head_offset + rows.head) * shape.cols + rows.query + rows.dead) * shape.cols;
    scaled = static_cast<uint64_t>(start >> 2) * kGolden;
  }
  template <int N>
  __device__ void of(int at, float (&factor)[N]) const {
    if constexpr (N == 1) {
      factor[0] = keep_factor(keep, key, start + at);
    } else {
      keep_factors<N>(keep, key, scaled + static_cast<uint64_t>(at >> 2) * kGolden, factor);
    }
  }
};

// The probabilities of a piece with dropout; zeros where the piece is dead, whose mask is not made.
template <typename T, int N>
__device__ inline Pack<T, N> dropped(const Pack<T, N>& probs, bool live, const Factors& factors, int at) {
  if (!live) return Pack<T, N>{};
  float factor[N];
  factors.of(at, factor);
#pragma unroll
  for (int i = 0; i < N; i++) factor[i] *= probs.value(i);
  return to_pack<T>(factor);
}

// What dropout leaves of the gradient of a piece of dropped probabilities, rounded as a tensor of T would be.
template <typename T, int N>
__device__ inline void drop(Pack<T, N>& grads, const Factors& factors, int at) {
  float factor[N];
  factors.of(at, factor);
#pragma unroll
  for (int i = 0; i < N; i++) factor[i] *= grads.value(i);
  grads = to_pack<T>(factor);
}

}  // namespace
}  // namespace mp

// Split of the fused projection with rotary embedding, and its reverse; include/rotary.h says what they compute.
//
// A thread holds one 16-byte piece of each half of a head, and their angles, for kPasses heads of one position; blocks
// take positions in turn (persistent grid). Bytes: the projection once in, q, k, v once out (backward the reverse), and
// 4 * size of tables a position, which all its heads share through the cache. Of the rest that is 1 / heads in half
// precision (half of it in fp32), counting queries, keys and values of the batch: 4 % for 24, within 1.15 from 7 on.
// Heads whose half is no multiple of 16 bytes, or gradients with such strides, go element by element.
#include "common.cuh"
#include "rotary.h"

namespace mp {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksEach = 3;  // 4 would leave 64 registers, too few for 8 elements of each half and their angles
constexpr int kPasses = 2;

// Where the heads of queries, keys or values lie: elements from one position, batch entry, head to the next.
struct Heads {
  void* at;
  int64_t seq, batch, head;
};

struct Rotary {
  int64_t seq;
  int rows, groups, per_group;     // rows: heads of all kinds of a position, batch * groups * (per_group + 2)
  int half, pieces, step, chunks;  // pieces: threads of a head; step: heads of a pass; chunks: turns of a position
  const float *cos, *sin;
  void* packed;
  Heads q, k, v;
};

// N floats in pieces of at most 16 bytes.
template <int N>
__device__ inline void load_floats(const float* from, float (&to)[N]) {
  constexpr int kEach = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += kEach) {
    const Pack<float, kEach> in = load<kEach>(from + i);
#pragma unroll
    for (int j = 0; j < kEach; j++) to[i + j] = in.at[j];
  }
}

// The head that is row `row` of a position in the packed order; whether it is to be rotated.
template <typename T>
__device__ inline T* split_head(const Rotary& a, int64_t position, int row, bool& rotated) {
  const int heads = a.per_group + 2, group = row / heads, kind = row - group * heads;
  const int batch = group / a.groups, own = group - batch * a.groups;
  rotated = kind <= a.per_group && a.cos != nullptr;
  if (kind < a.per_group) {
    return static_cast<T*>(a.q.at) + position * a.q.seq + batch * a.q.batch + (own * a.per_group + kind) * a.q.head;
  }
  const bool key = kind == a.per_group;
  return static_cast<T*>(key ? a.k.at : a.v.at) + position * (key ? a.k.seq : a.v.seq) +
         batch * (key ? a.k.batch : a.v.batch) + own * (key ? a.k.head : a.v.head);
}

// BACK: from the split tensors to the packed one, by the opposite angle.
template <typename T, int N, bool BACK>
__global__ void __launch_bounds__(kThreads, kBlocksEach) rotate(Rotary a) {
  const int lane = threadIdx.x / a.pieces, at = (threadIdx.x - lane * a.pieces) * N;
  if (lane >= a.step) return;
  const int stride = gridDim.x / a.chunks, more = gridDim.x % a.chunks;
  int64_t position = blockIdx.x / a.chunks;
  int chunk = blockIdx.x % a.chunks;
  while (position < a.seq) {
    Pack<T, N> first[kPasses], second[kPasses];
    T *packed[kPasses], *split[kPasses];
    bool live[kPasses], rotated[kPasses];
#pragma unroll
    for (int p = 0; p < kPasses; p++) {
      const int row = (chunk * kPasses + p) * a.step + lane;
      live[p] = row < a.rows;
      if (!live[p]) continue;
      packed[p] = static_cast<T*>(a.packed) + (position * a.rows + row) * (2 * a.half) + at;
      split[p] = split_head<T>(a, position, row, rotated[p]) + at;
      const T* from = BACK ? split[p] : packed[p];
      first[p] = load<N>(from);
      second[p] = load<N>(from + a.half);
    }
    float cos[N], sin[N];
    if (a.cos != nullptr) {
      load_floats(a.cos + position * a.half + at, cos);
      load_floats(a.sin + position * a.half + at, sin);
    }
#pragma unroll
    for (int p = 0; p < kPasses; p++) {
      if (!live[p]) break;
      if (rotated[p]) {
        float low[N], high[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
          const float x = first[p].value(i), y = second[p].value(i), s = BACK ? -sin[i] : sin[i];
          low[i] = multiply_add(x, cos[i], -rounded_product(y, s));
          high[i] = multiply_add(y, cos[i], rounded_product(x, s));
        }
        first[p] = to_pack<T>(low);
        second[p] = to_pack<T>(high);
      }
      T* to = in_global(BACK ? packed[p] : split[p]);
      store<N>(to, first[p]);
      store<N>(to + a.half, second[p]);
    }
    position += stride;
    chunk += more;
    if (chunk >= a.chunks) {
      chunk -= a.chunks;
      position++;
    }
  }
}

template <typename T, int N, bool BACK>
int32_t run(void* stream, Rotary a) {
  a.pieces = a.half / N;
  const int64_t work = static_cast<int64_t>((a.rows + kPasses - 1) / kPasses) * a.pieces;
  const unsigned threads = block_threads(work, kThreads);
  a.step = static_cast<int>(threads) / a.pieces;
  a.chunks = (a.rows + a.step * kPasses - 1) / (a.step * kPasses);
  // Small blocks, of few heads: more of them, so that as many threads are at work.
  const unsigned blocks = persistent_blocks(a.seq * a.chunks, kBlocksEach * kThreads / static_cast<int>(threads));
  return launch(rotate<T, N, BACK>, blocks, threads, stream, a);
}

bool bad(int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size) {
  return seq < 0 || batch < 0 || groups < 1 || per_group < 1 || size < 2 || size > 512 || size % 2 != 0 ||
         batch * groups * (per_group + 2) > (1 << 24);
}

template <bool BACK>
int32_t run_dtype(void* stream, int32_t dtype, const Rotary& a) {
  return for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    int64_t odd = 0;
    for (const Heads* h : {&a.q, &a.k, &a.v}) {
      odd |= h->seq % kVector<T> | h->batch % kVector<T> | h->head % kVector<T>;
    }
    return odd == 0 && vectors_fit<T>(a.half, a.packed, a.q.at, a.k.at, a.v.at, a.cos, a.sin)
               ? run<T, kVector<T>, BACK>(stream, a)
               : run<T, 1, BACK>(stream, a);
  });
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_rotary_forward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size,
    const void* qkv, const float* cos, const float* sin, void* q, void* k, void* v) {
  if (mp::bad(seq, batch, groups, per_group, size)) return MP_BAD_SIZE;
  if (seq == 0 || batch == 0) return MP_OK;
  const int64_t wide = groups * per_group * size, narrow = groups * size;
  const mp::Rotary a{seq, static_cast<int>(batch * groups * (per_group + 2)), static_cast<int>(groups),
                     static_cast<int>(per_group), static_cast<int>(size / 2), 0, 0, 0, cos, sin,
                     const_cast<void*>(qkv), {q, batch * wide, wide, size}, {k, batch * narrow, narrow, size},
                     {v, batch * narrow, narrow, size}};
  return mp::run_dtype<false>(stream, dtype, a);
}

extern "C" int32_t mp_rotary_backward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size,
    const void* dq, const void* dk, const void* dv, const int64_t* strides, const float* cos, const float* sin,
    void* dqkv) {
  if (mp::bad(seq, batch, groups, per_group, size)) return MP_BAD_SIZE;
  if (seq == 0 || batch == 0) return MP_OK;
  const auto heads = [&](const void* at, int i) {
    return mp::Heads{const_cast<void*>(at), strides[i], strides[i + 1], strides[i + 2]};
  };
  const mp::Rotary a{seq, static_cast<int>(batch * groups * (per_group + 2)), static_cast<int>(groups),
                     static_cast<int>(per_group), static_cast<int>(size / 2), 0, 0, 0, cos, sin, dqkv, heads(dq, 0),
                     heads(dk, 3), heads(dv, 6)};
  return mp::run_dtype<true>(stream, dtype, a);
}

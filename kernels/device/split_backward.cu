// Gradients of queries, keys and values into one packed tensor, and the sums of their bias; include/rotary.h says what
// is computed.
//
// A thread keeps its columns, which are of one head, and walks down the rows (columns.cuh). Bytes: the three gradients
// once in, the packed one once out, and 8 bytes a column of a slot, written and read: with kLeastRows rows a slot at
// least, at most 1.06 times the least in half precision. The sums are of what is stored, so that they are those of the
// packed tensor.
#include "columns.cuh"
#include "rotary.h"
#include "slots.cuh"

namespace mp {
namespace {

constexpr int kRows = 4;  // rows that a thread has in flight
constexpr int kLeastRows = 32;

// Where a gradient lies: elements from one position, batch entry, head to the next.
struct Heads {
  const void* at;
  int64_t seq, batch, head;
};

struct SplitBackward {
  Cut cut;
  int per_group, size;
  Heads q, k, v;
  void* packed;
  float* partial;  // [slots, cols]
};

// The gradient that goes to a column, from that column's place in its head on.
template <typename T>
__device__ inline Heads source_of(const SplitBackward& a, int column) {
  const int row = column / a.size, heads = a.per_group + 2, group = row / heads, kind = row - group * heads;
  Heads from = kind < a.per_group ? a.q : kind == a.per_group ? a.k : a.v;
  const int64_t head = kind < a.per_group ? group * a.per_group + kind : group;
  from.at = static_cast<const T*>(from.at) + head * from.head + (column - row * a.size);
  return from;
}

template <typename T, int N>
__global__ void __launch_bounds__(kCutThreads) split_backward(SplitBackward a) {
  const Cut& cut = a.cut;
  const int column = ((blockIdx.x % cut.strips) * cut.across + threadIdx.x % cut.across) * N;
  const int sub = threadIdx.x / cut.across;
  if (sub >= cut.down || column >= cut.cols) return;
  const Heads from = source_of<T>(a, column);
  const int slots = cut.bands * cut.down, slot = (blockIdx.x / cut.strips) * cut.down + sub;
  const int positions = slots / cut.batch, samples = slots % cut.batch;
  int64_t position = slot / cut.batch;
  int sample = slot % cut.batch;
  float sum[N] = {};
  for (int64_t row = slot; row < cut.rows; row += static_cast<int64_t>(kRows) * slots) {
    Pack<T, N> in[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (row + static_cast<int64_t>(r) * slots < cut.rows) {
        in[r] = load<N>(static_cast<const T*>(from.at) + position * from.seq + sample * from.batch);
      }
      position += positions;
      sample += samples;
      if (sample >= cut.batch) {
        sample -= cut.batch;
        position++;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int64_t at = row + static_cast<int64_t>(r) * slots;
      if (at >= cut.rows) continue;
      store<N>(in_global(static_cast<T*>(a.packed) + at * cut.cols + column), in[r]);
#pragma unroll
      for (int i = 0; i < N; i++) sum[i] += in[r].value(i);
    }
  }
#pragma unroll
  for (int i = 0; i < N; i++) a.partial[static_cast<int64_t>(slot) * cut.cols + column + i] = sum[i];
}

template <typename T, int N>
int32_t run(void* stream, SplitBackward a, int64_t rows, int64_t batch, int64_t cols, void* dbias, int64_t* kept) {
  a.cut = cut_of(rows, batch, cols, N, kLeastRows);
  const unsigned blocks = static_cast<unsigned>(a.cut.strips) * a.cut.bands;
  const int32_t code = launch(split_backward<T, N>, blocks, a.cut.threads, stream, a);
  if (code != MP_OK) return code;
  const int64_t slots = static_cast<int64_t>(a.cut.bands) * a.cut.down;
  return finish_slots<T>(stream, a.partial, slots, static_cast<int>(cols), kept, dbias);
}

}  // namespace
}  // namespace mp

extern "C" int64_t mp_split_workspace(int64_t rows, int64_t cols) { return mp::cut_floats(rows, cols, mp::kLeastRows); }

extern "C" int32_t mp_split_backward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size,
    const void* dq, const void* dk, const void* dv, const int64_t* strides, void* dqkv, void* dbias, float* workspace,
    int64_t* kept) {
  const int64_t rows = seq * batch, cols = groups * (per_group + 2) * size;
  if (rows < 1 || rows >= (int64_t{1} << 31) || per_group < 1 || size < 1 || cols < 1 || cols > (1 << 24)) {
    return MP_BAD_SIZE;
  }
  mp::SplitBackward a{};
  a.per_group = static_cast<int>(per_group), a.size = static_cast<int>(size);
  a.q = {dq, strides[0], strides[1], strides[2]};
  a.k = {dk, strides[3], strides[4], strides[5]};
  a.v = {dv, strides[6], strides[7], strides[8]};
  a.packed = dqkv, a.partial = workspace;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    int64_t odd = 0;
    for (int i = 0; i < 9; i++) odd |= strides[i] % mp::kVector<T>;
    return odd == 0 && mp::vectors_fit<T>(size, dq, dk, dv, dqkv)
               ? mp::run<T, mp::kVector<T>>(stream, a, rows, batch, cols, dbias, kept)
               : mp::run<T, 1>(stream, a, rows, batch, cols, dbias, kept);
  });
}

// Gradients of looked-up rows added to a table's; include/table_rows.h says what is computed.
//
// A block takes MP_RUN neighbours of the sorted list and a strip of columns. An id whose neighbours all lie in them is
// added to its row of the table at once. Of one that goes on, each block keeps the sum of its part: as `tail` where the
// id begins, as `head` where it has begun before. A second launch adds those up, in order.
// Bytes: each gradient in once, each row of the table that is named in and out once, 16 bytes a row of indices; and, of
// ids that cross a multiple of MP_RUN, 8 bytes a column of each part.
#include "indices.cuh"
#include "table_rows.h"

namespace mp {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksEach = 16;
constexpr int kFlight = 4;  // gradients that a thread has in flight

struct Rows {
  int64_t n, chunks;
  int cols, strips;
  const void* rows;
  const int64_t *order, *ids;
  float *total, *tail, *head;  // [chunks, cols] the last two
  int64_t table_rows;
};

__device__ inline int64_t table_row(const Rows& a, int64_t id) {
  return checked(id, 0, a.table_rows, "token id (the data has another vocabulary than model.vocab_size)");
}

__device__ inline int64_t end_of(const Rows& a, int64_t chunk) {
  const int64_t end = (chunk + 1) * MP_RUN;
  return end < a.n ? end : a.n;
}

// Whether the id at place `at - 1` of the list is also at `at`.
__device__ inline bool goes_on(const Rows& a, int64_t at) { return at > 0 && at < a.n && a.ids[at - 1] == a.ids[at]; }

template <int N>
__device__ inline void put(float* to, const float (&value)[N]) {
  if constexpr (N == 1) {
    to[0] = value[0];
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) store<4>(to + i, Pack<float, 4>{value[i], value[i + 1], value[i + 2], value[i + 3]});
  }
}

// value += what lies there.
template <int N>
__device__ inline void take(const float* from, float (&value)[N]) {
  if constexpr (N == 1) {
    value[0] += from[0];
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const Pack<float, 4> there = load<4>(from + i);
#pragma unroll
      for (int j = 0; j < 4; j++) value[i + j] += there.at[j];
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) add_runs(Rows a) {
  for (int64_t work = blockIdx.x; work < a.chunks * a.strips; work += gridDim.x) {
    const int64_t chunk = work / a.strips, begin = chunk * MP_RUN, end = end_of(a, chunk);
    const int c = (static_cast<int>(work % a.strips) * blockDim.x + threadIdx.x) * N;
    if (c >= a.cols) continue;
    bool begun_here = !goes_on(a, begin);
    float sum[N] = {};
    for (int64_t start = begin; start < end; start += kFlight) {
      Pack<T, N> piece[kFlight];
#pragma unroll
      for (int f = 0; f < kFlight; f++) {
        if (start + f >= end) continue;
        piece[f] = load<N>(
            in_global(static_cast<const T*>(a.rows) + checked(a.order[start + f], 0, a.n, "row") * a.cols + c));
      }
#pragma unroll
      for (int f = 0; f < kFlight; f++) {
        const int64_t at = start + f;
        if (at >= end) continue;
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += piece[f].value(i);
        const bool on = goes_on(a, at + 1);
        if (on && at + 1 < end) continue;
        if (begun_here && !on) {
          float* row = in_global(a.total + table_row(a, a.ids[at]) * a.cols + c);
          take(row, sum);
          put(row, sum);
        } else {
          put(in_global((begun_here ? a.tail : a.head) + chunk * a.cols + c), sum);
        }
        begun_here = true;
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] = 0.0f;
      }
    }
  }
}

template <int N>
__global__ void __launch_bounds__(kThreads) join_runs(Rows a) {
  for (int64_t work = blockIdx.x; work < a.chunks * a.strips; work += gridDim.x) {
    const int64_t chunk = work / a.strips, begin = chunk * MP_RUN, end = end_of(a, chunk);
    const int c = (static_cast<int>(work % a.strips) * blockDim.x + threadIdx.x) * N;
    // An id that begins here and is also the next chunk's first.
    if (c >= a.cols || !goes_on(a, end) || (goes_on(a, begin) && a.ids[begin] == a.ids[end])) continue;
    const int64_t id = a.ids[end];
    float sum[N] = {};
    take(a.tail + chunk * a.cols + c, sum);
    int64_t next = chunk;
    do {
      next++;
      take(a.head + next * a.cols + c, sum);
    } while (goes_on(a, end_of(a, next)) && a.ids[end_of(a, next)] == id);
    float* row = in_global(a.total + table_row(a, id) * a.cols + c);
    take(row, sum);
    put(row, sum);
  }
}

template <typename T, int N>
int32_t add(void* stream, Rows a) {
  const int packs = a.cols / N;
  const unsigned threads = block_threads(packs, kThreads);
  a.strips = static_cast<int>((packs + threads - 1) / threads);
  const unsigned blocks = persistent_blocks(a.chunks * a.strips, kBlocksEach);
  const int32_t code = launch(add_runs<T, N>, blocks, threads, stream, a);
  return code != MP_OK || a.chunks == 1 ? code : launch(join_runs<N>, blocks, threads, stream, a);
}

int64_t chunks_of(int64_t n) { return (n + MP_RUN - 1) / MP_RUN; }

}  // namespace
}  // namespace mp

extern "C" int64_t mp_add_rows_workspace(int64_t n, int64_t cols) { return 2 * mp::chunks_of(n) * cols; }

extern "C" int32_t mp_add_rows(
    void* stream, int32_t dtype, int64_t n, int64_t cols, const void* rows, const int64_t* order, const int64_t* ids,
    float* total, float* workspace, int64_t table_rows) {
  if (n < 0 || cols < 1 || cols > (1 << 24)) return MP_BAD_SIZE;
  if (n == 0) return MP_OK;
  const int64_t chunks = mp::chunks_of(n);
  const mp::Rows a{n, chunks, static_cast<int>(cols), 1, rows, order, ids, total, workspace, workspace + chunks * cols,
                   table_rows};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::vectors_fit<T>(cols, rows, total, workspace) ? mp::add<T, mp::kVector<T>>(stream, a)
                                                            : mp::add<T, 1>(stream, a);
  });
}

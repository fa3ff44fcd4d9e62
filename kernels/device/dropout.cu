// Bias, dropout and residual add, forward and backward; include/dropout.h says what they compute.
//
// A thread keeps its columns and walks down the rows: the bias is read once, the sums of dbias stay in registers.
// Bytes: forward x (residual) in, out out, nothing twice; the mask is made, not read. Backward dout in, dx out, plus
// 8 bytes a column and slot of partial sums where there is a bias; a slot has at least 16 rows, so at most 1.13 times
// the least (half precision; 1.01 at 16k rows). With nothing dropped the backward reads dout for dbias, and writes no
// dx.
// Arithmetic: a hash of 3 64-bit products an aligned group of four elements; 18 (backward) to 23 instructions an
// element on sm_90 in all, 2/3 of what it can issue at 4.8 TB/s. Rows whose positions do not fall into whole groups
// (width, width_offset, cols or pointers unaligned) hash each element.
#include "columns.cuh"
#include "dropout.h"
#include "mask.cuh"
#include "slots.cuh"

namespace mp {
namespace {

constexpr int kThreads = kCutThreads;
constexpr int kRows = 2;       // rows that a thread has in flight
constexpr int kSlotRows = 16;  // rows of a slot of partial sums

struct Mask {
  const int64_t* keys;
  Keep keep;
  int64_t seq_offset, width, width_offset;
};

struct Forward {
  Cut cut;
  Mask mask;
  const void *x, *bias, *residual;
  void* out;
};

struct Backward {
  Cut cut;
  Mask mask;
  const void* dout;
  void* dx;
  float* partial;  // [slots, cols]
};

// A piece of a row: the index of its first element, the sample, and what its hash needs.
struct Place {
  int64_t at;
  uint64_t counter;  // N > 1: (position >> 2) * kGolden; else position
  int sample;
};

// Walks down the rows of a slot: additions only, since row = seq * batch + sample goes on by a fixed step.
template <int N>
struct Walk {
  int64_t step, end;
  uint64_t step_counter, seq_counter;
  int step_sample, batch;

  __device__ Walk(const Cut& cut, const Mask& mask) : batch(cut.batch) {
    const int64_t rows = static_cast<int64_t>(cut.bands) * cut.down;
    step = rows * cut.cols;
    end = cut.rows * cut.cols;
    step_sample = static_cast<int>(rows % batch);
    const uint64_t width = static_cast<uint64_t>(mask.width);
    seq_counter = N == 1 ? width : (width >> 2) * kGolden;  // N > 1: width is a multiple of 4
    step_counter = static_cast<uint64_t>(rows / batch) * seq_counter;
  }
  __device__ Place first(const Cut& cut, const Mask& mask, int64_t row, int column) const {
    const int64_t position = (row / batch + mask.seq_offset) * mask.width + mask.width_offset + column;
    return Place{
        row * cut.cols + column,
        N == 1 ? static_cast<uint64_t>(position) : static_cast<uint64_t>(position >> 2) * kGolden,
        static_cast<int>(row % batch)};
  }
  __device__ bool in(const Place& place) const { return place.at < end; }
  __device__ void next(Place& place) const {
    place.at += step;
    place.counter += step_counter;
    place.sample += step_sample;
    if (place.sample >= batch) {
      place.sample -= batch;
      place.counter += seq_counter;
    }
  }
};

// Scale or 0 of the N elements of a place. N > 1: whole groups.
template <int N>
__device__ inline void factors(const Mask& mask, const Place& place, float (&factor)[N]) {
  const uint64_t key = static_cast<uint64_t>(mask.keys[place.sample]);
  if constexpr (N == 1) {
    factor[0] = keep_factor(mask.keep, key, static_cast<int64_t>(place.counter));
  } else {
    keep_factors<N>(mask.keep, key, place.counter, factor);
  }
}

template <typename T, int N, bool MASKED>
__global__ void __launch_bounds__(kThreads) forward(Forward a) {
  const int column = ((blockIdx.x % a.cut.strips) * a.cut.across + threadIdx.x % a.cut.across) * N;
  const int sub = threadIdx.x / a.cut.across;
  if (sub >= a.cut.down || column >= a.cut.cols) return;
  const Walk<N> walk(a.cut, a.mask);
  Place place = walk.first(a.cut, a.mask, static_cast<int64_t>(blockIdx.x / a.cut.strips) * a.cut.down + sub, column);
  Pack<T, N> bias = {};
  if (a.bias != nullptr) bias = load<N>(static_cast<const T*>(a.bias) + column);
  while (walk.in(place)) {
    Place each[kRows];
    Pack<T, N> x[kRows], more[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      each[r] = place;
      walk.next(place);
      if (!walk.in(each[r])) continue;
      x[r] = load<N>(static_cast<const T*>(a.x) + each[r].at);
      if (a.residual != nullptr) more[r] = load<N>(static_cast<const T*>(a.residual) + each[r].at);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (!walk.in(each[r])) continue;
      float factor[N];
      if (MASKED) factors<N>(a.mask, each[r], factor);
      float out[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        // A factor, not a choice: an infinity that is dropped stays visible (as NaN), as it does in torch.
        const float value = x[r].value(i) + bias.value(i), scale = MASKED ? factor[i] : 1.0f;
        out[i] = a.residual != nullptr ? multiply_add(value, scale, more[r].value(i)) : value * scale;
      }
      store<N>(static_cast<T*>(a.out) + each[r].at, to_pack<T>(out));
    }
  }
}

template <typename T, int N, bool MASKED>
__global__ void __launch_bounds__(kThreads) backward(Backward a) {
  const int column = ((blockIdx.x % a.cut.strips) * a.cut.across + threadIdx.x % a.cut.across) * N;
  const int sub = threadIdx.x / a.cut.across;
  if (sub >= a.cut.down || column >= a.cut.cols) return;
  const Walk<N> walk(a.cut, a.mask);
  const int64_t slot = static_cast<int64_t>(blockIdx.x / a.cut.strips) * a.cut.down + sub;
  Place place = walk.first(a.cut, a.mask, slot, column);
  float sum[N] = {};
  while (walk.in(place)) {
    Place each[kRows];
    Pack<T, N> dout[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      each[r] = place;
      walk.next(place);
      if (!walk.in(each[r])) continue;
      dout[r] = load<N>(static_cast<const T*>(a.dout) + each[r].at);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (!walk.in(each[r])) continue;
      float factor[N];
      if (MASKED) factors<N>(a.mask, each[r], factor);
      float dx[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        dx[i] = dout[r].value(i);
        if (MASKED) dx[i] *= factor[i];
        sum[i] += dx[i];
      }
      if (MASKED) store<N>(static_cast<T*>(a.dx) + each[r].at, to_pack<T>(dx));
    }
  }
  if (a.partial == nullptr) return;
#pragma unroll
  for (int i = 0; i < N; i++) a.partial[slot * a.cut.cols + column + i] = sum[i];
}

// Whether N elements from any piece's first column on are whole groups of four.
bool groups_fit(const Mask& mask) {
  return mask.keep.threshold == 0 || (mask.width % 4 == 0 && mask.width_offset % 4 == 0);
}

template <typename T, int N>
int32_t launch_forward(void* stream, Forward a, int64_t rows, int64_t batch, int64_t cols) {
  a.cut = cut_of(rows, batch, cols, N, kRows);
  const unsigned blocks = static_cast<unsigned>(a.cut.strips) * a.cut.bands;
  if (a.mask.keep.threshold == 0) return launch(forward<T, N, false>, blocks, a.cut.threads, stream, a);
  return launch(forward<T, N, true>, blocks, a.cut.threads, stream, a);
}

template <typename T, int N>
int32_t launch_backward(
    void* stream, Backward a, int64_t rows, int64_t batch, int64_t cols, void* dbias, int64_t* kept) {
  a.cut = cut_of(rows, batch, cols, N, a.partial != nullptr ? kSlotRows : kRows);
  const unsigned blocks = static_cast<unsigned>(a.cut.strips) * a.cut.bands;
  const int32_t code = a.mask.keep.threshold == 0 ? launch(backward<T, N, false>, blocks, a.cut.threads, stream, a)
                                             : launch(backward<T, N, true>, blocks, a.cut.threads, stream, a);
  if (code != MP_OK || dbias == nullptr) return code;
  const int64_t slots = static_cast<int64_t>(a.cut.bands) * a.cut.down;
  return finish_slots<T>(stream, a.partial, slots, static_cast<int>(cols), kept, dbias);
}

bool good_sizes(int64_t seq, int64_t batch, int64_t cols, int32_t threshold) {
  return seq >= 0 && batch >= 0 && batch < (1 << 30) && cols >= 1 && cols <= (1 << 24) && threshold >= 0 &&
         threshold < 65536;
}

Mask mask_of(
    const int64_t* keys, int64_t op_key, int32_t threshold, int64_t seq_offset, int64_t width, int64_t width_offset) {
  return Mask{keys, keep_of(op_key, threshold), seq_offset, width, width_offset};
}

}  // namespace
}  // namespace mp

extern "C" int64_t mp_dropout_workspace(int64_t rows, int64_t cols) {
  return mp::cut_floats(rows, cols, mp::kSlotRows);
}

extern "C" int32_t mp_dropout_forward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t cols, const void* x, const void* bias,
    const void* residual, const int64_t* keys, int64_t op_key, int32_t threshold, int64_t seq_offset, int64_t width,
    int64_t width_offset, void* out) {
  if (!mp::good_sizes(seq, batch, cols, threshold)) return MP_BAD_SIZE;
  if (seq * batch == 0) return MP_OK;
  mp::Forward a{};
  a.mask = mp::mask_of(keys, op_key, threshold, seq_offset, width, width_offset);
  a.x = x, a.bias = bias, a.residual = residual, a.out = out;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool fits = mp::vectors_fit<T>(cols, x, bias, residual, out) && mp::groups_fit(a.mask);
    return fits ? mp::launch_forward<T, mp::kVector<T>>(stream, a, seq * batch, batch, cols)
                : mp::launch_forward<T, 1>(stream, a, seq * batch, batch, cols);
  });
}

extern "C" int32_t mp_dropout_backward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t cols, const void* dout, const int64_t* keys,
    int64_t op_key, int32_t threshold, int64_t seq_offset, int64_t width, int64_t width_offset, void* dx, void* dbias,
    float* workspace, int64_t* kept) {
  if (!mp::good_sizes(seq, batch, cols, threshold) || seq * batch == 0) return MP_BAD_SIZE;
  if (threshold == 0 && dbias == nullptr) return MP_OK;
  mp::Backward a{};
  a.mask = mp::mask_of(keys, op_key, threshold, seq_offset, width, width_offset);
  a.dout = dout, a.dx = dx, a.partial = dbias != nullptr ? workspace : nullptr;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool fits = mp::vectors_fit<T>(cols, dout, dx) && mp::groups_fit(a.mask);
    return fits ? mp::launch_backward<T, mp::kVector<T>>(stream, a, seq * batch, batch, cols, dbias, kept)
                : mp::launch_backward<T, 1>(stream, a, seq * batch, batch, cols, dbias, kept);
  });
}

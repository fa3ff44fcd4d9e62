// What the passes of fused attention share: their arguments, tiles of rows in shared memory, what queries see.
//
// A block has kRows rows of a head (queries; keys where their gradients are summed), a warp kTile of them, and walks over
// the others in tiles of COLS. Heads are padded with zeros to HEAD elements.
#pragma once

#include "attention.h"
#include "common.cuh"
#include "mask.cuh"
#include "matrix.cuh"
#include "shared.cuh"

namespace mp {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * MP_WARP;
constexpr int kRows = kWarps * matrix::kTile;
constexpr int kMostPositions = 1 << 24;

// Rows of [seq, batch, groups, heads of a group, d] by strides in elements.
struct Layout {
  int64_t seq, batch, group, head;
};

struct Given {
  const void* data;
  Layout layout;

  template <typename T>
  __device__ const T* rows(int sample, int group, int head) const {
    return in_global(
        static_cast<const T*>(data) + sample * layout.batch + group * layout.group + head * layout.head);
  }
};

struct Taken {
  void* data;
  Layout layout;

  template <typename T>
  __device__ T* rows(int sample, int group, int head) const {
    return in_global(static_cast<T*>(data) + sample * layout.batch + group * layout.group + head * layout.head);
  }
};

// What both passes are told. A score's unit is the logarithm of 2: `unit` = scale * log2(e).
struct Call {
  int seq, keys, batch, groups, per_group, d;
  bool causal;
  float scale, unit;
  const int32_t *first, *end;
  int64_t window;
  const int64_t* sample_keys;  // NULL: no dropout
  Keep keep;
  int64_t head_offset;

  __device__ int heads() const { return groups * per_group; }
  // One more than the last key that a query may see, and its position among all keys where probabilities are dropped.
  __device__ int stop(int query) const { return end != nullptr ? end[query] : causal ? query + 1 : keys; }
  __device__ bool plain() const { return first == nullptr && end == nullptr && window == 0; }
};

// Keys [low, high) that a query sees; none beyond the queries.
struct Seen {
  int low, high;

  __device__ Seen(const Call& call, int sample, int query) : low(0), high(0) {
    if (query >= call.seq) return;
    const int stop = call.stop(query);
    low = call.first == nullptr ? 0 : call.first[static_cast<int64_t>(sample) * call.seq + query];
    if (call.window > 0 && stop - call.window > low) low = static_cast<int>(stop - call.window);
    low = low > 0 ? low : 0;
    high = stop < call.keys ? stop : call.keys;
    if (high <= low) low = high = 0;
  }
};

struct Span {
  int from, upto;  // empty: from >= upto
};

// What `count` queries, at most those of a block, see together. All lanes of a warp call it, and get the same.
__device__ inline Span seen_by(const Call& call, int sample, int query, int count) {
  float from = kMostPositions, upto = 0.0f;  // whole numbers
  for (int i = matrix::lane(); i < count; i += MP_WARP) {
    const Seen seen(call, sample, query + i);
    if (seen.low >= seen.high) continue;
    from = seen.low < from ? seen.low : from;
    upto = seen.high > upto ? seen.high : upto;
  }
  return {-static_cast<int>(warp_reduce(-from, Max())), static_cast<int>(warp_reduce(upto, Max()))};
}

// Where the probabilities of a query stand among those of its sample, for the mask.
struct Fields {
  uint64_t key, scaled;  // of the group of four with the query's first probability
  int shift;

  __device__ Fields(const Call& call, int sample, int head, int query) {
    query = query < call.seq ? query : call.seq - 1;
    key = static_cast<uint64_t>(call.sample_keys[sample]);
    const int64_t row = (call.head_offset + head) * call.keys + call.stop(query) - 1;
    const int64_t start = row * call.keys;
    scaled = static_cast<uint64_t>(start >> 2) * kGolden;
    shift = static_cast<int>(start & 3);
  }
  // Of four keys from one on that is a multiple of 4.
  __device__ uint64_t at(const Keep& keep, int from) const {
    return four_fields(keep, key, scaled + static_cast<uint64_t>(from >> 2) * kGolden, shift);
  }
};

// ------------------------------------------------------------------------------------------------ tiles

template <int HEAD>
constexpr int kStride = HEAD + matrix::kPad;

// Who copies what of a tile: a team of lanes a row, a lane 16 bytes of each of its rows.
template <int HEAD, int ROWS>
struct Copy {
  static constexpr int kTeam = HEAD <= 64 ? 8 : 16, kStep = kThreads / kTeam, kEach = ROWS / kStep;
  __device__ static int row(int i) { return static_cast<int>(threadIdx.x) / kTeam + i * kStep; }
  __device__ static int column() { return static_cast<int>(threadIdx.x) % kTeam * 8; }
};

// ROWS rows of a head on their way from global to shared memory, zeros beyond the head. Rows beyond the last one are
// copies of it: what is made from them is never taken, and a product with 0 stays 0.
template <typename T, int HEAD, int ROWS>
struct Stage {
  using Whole = Copy<HEAD, ROWS>;
  Pack<uint32_t, 4> piece[Whole::kEach];

  __device__ void fetch(const T* rows, int64_t stride, int from, int count, int d) {
    const bool beyond = Whole::column() >= d;
    const T* const base = rows + from * stride + Whole::column();
    const int step = static_cast<int>(stride), last = count - 1 - from;
#pragma unroll
    for (int i = 0; i < Whole::kEach; i++) {
      const int row = Whole::row(i) < last ? Whole::row(i) : last;
      piece[i] = Pack<uint32_t, 4>{};
      if (!beyond) piece[i] = load<4>(reinterpret_cast<const uint32_t*>(base + row * step));
    }
  }
  // PLACED: for `column`, see matrix.cuh.
  template <bool PLACED>
  __device__ void put(T* tile) const {
    if (Whole::column() >= HEAD) return;
#pragma unroll
    for (int i = 0; i < Whole::kEach; i++) {
      const int row = PLACED ? matrix::place(Whole::row(i)) : Whole::row(i);
      uint32_t* const to = reinterpret_cast<uint32_t*>(tile + row * kStride<HEAD> + Whole::column());
      if constexpr (matrix::kPad % 8 == 0) {
        store<4>(to, piece[i]);
      } else {  // rows of 8-byte pieces
        store<2>(to, Pack<uint32_t, 2>{piece[i].at[0], piece[i].at[1]});
        store<2>(to + 2, Pack<uint32_t, 2>{piece[i].at[2], piece[i].at[3]});
      }
    }
  }
};

// Rows of a block that its warps take as left operands, kTile each.
template <typename T, int HEAD>
__device__ inline void hold(
    const T* rows, int64_t stride, int from, int count, int d, T* tile, matrix::Operand<T> (&held)[HEAD / 16]) {
  Stage<T, HEAD, kRows> stage;
  stage.fetch(rows, stride, from, count, d);
  __syncthreads();
  stage.template put<false>(tile);
  __syncthreads();
  const T* own = tile + threadIdx.x / MP_WARP * matrix::kTile * kStride<HEAD>;
#pragma unroll
  for (int i = 0; i < HEAD / 16; i++) held[i] = matrix::left(own + 16 * i, kStride<HEAD>);
}

// Sums of a block's rows, times a factor, rounded, through shared memory to where they belong.
template <typename T, int HEAD>
__device__ inline void give(
    const matrix::Sums (&sums)[HEAD / 16], const float (&factor)[matrix::kLines], T* tile, T* rows, int64_t stride,
    int from, int count, int d) {
  __syncthreads();
  T* own = tile + threadIdx.x / MP_WARP * matrix::kTile * kStride<HEAD>;
#pragma unroll
  for (int i = 0; i < HEAD / 16; i++) {
#pragma unroll
    for (int line = 0; line < matrix::kLines; line++) {
#pragma unroll
      for (int c = 0; c < 4; c += 2) {
        const uint32_t two =
            matrix::rounded_pair<T>(sums[i].at[line][c] * factor[line], sums[i].at[line][c + 1] * factor[line]);
        const int at = matrix::row(line) * kStride<HEAD> + 16 * i + matrix::plain_column(c);
        *reinterpret_cast<uint32_t*>(own + at) = two;
      }
    }
  }
  __syncthreads();
  using Whole = Copy<HEAD, kRows>;
  if (Whole::column() >= d) return;
#pragma unroll
  for (int i = 0; i < Whole::kEach; i++) {
    if (from + Whole::row(i) >= count) continue;
    const uint32_t* const piece =
        reinterpret_cast<const uint32_t*>(tile + Whole::row(i) * kStride<HEAD> + Whole::column());
    const auto left = load<2>(piece), right = load<2>(piece + 2);
    store<4>(
        reinterpret_cast<uint32_t*>(rows + (from + Whole::row(i)) * stride + Whole::column()),
        Pack<uint32_t, 4>{left.at[0], left.at[1], right.at[0], right.at[1]});
  }
}

// Zeros, then left [16, HEAD] times the rows of a stored tile [16 TILES, HEAD].
template <typename T, int HEAD, int TILES>
__device__ inline void score(
    const matrix::Operand<T> (&left)[HEAD / 16], const T* tile, matrix::Sums (&sums)[TILES]) {
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    sums[j] = matrix::Sums{};
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
      matrix::multiply(sums[j], left[i], matrix::right(tile + 16 * j * kStride<HEAD> + 16 * i, kStride<HEAD>));
    }
  }
}

// sums [16, HEAD] += weights [16, 16 TILES], rounded, times a stored tile [16 TILES, HEAD].
template <typename T, int HEAD, int TILES>
__device__ inline void mix(const matrix::Sums (&weights)[TILES], const T* tile, matrix::Sums (&sums)[HEAD / 16]) {
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    const matrix::Operand<T> left = matrix::as_left<T>(weights[j]);
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
      matrix::multiply(sums[i], left, matrix::right_turned(tile + 16 * j * kStride<HEAD> + 16 * i, kStride<HEAD>));
    }
  }
}

}  // namespace

// ------------------------------------------------------------------------------------------------ the host's side

namespace {

inline Layout layout_of(const int64_t* strides, bool grouped) {
  return {strides[0], strides[1], strides[2], grouped ? strides[3] : 0};
}

inline Layout dense_layout(const mp_attention_shape& s) {
  const int64_t group = s.per_group * s.d;
  return {s.batch * s.groups * group, s.groups * group, group, s.d};
}

inline bool pieces_fit(const void* data, const Layout& layout) {
  const int64_t all = layout.seq | layout.batch | layout.group | layout.head;
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && all % 8 == 0 && layout.seq <= INT32_MAX / kRows;
}

inline bool good(const mp_attention_shape& s, const mp_probability_mask* dropout, const mp_attention_mask* mask) {
  const bool moved = mask != nullptr && mask->end != nullptr;
  if (dropout != nullptr && (!s.causal || dropout->threshold < 1 || dropout->threshold > 65535)) return false;
  if (mask != nullptr && (!s.causal || mask->window < 0 || mask->sinks != nullptr || mask->softcap != 0.0f)) return false;
  if (s.causal && s.seq != s.keys && !moved) return false;
  if (s.seq < 0 || s.seq > kMostPositions || s.keys < 1 || s.keys > kMostPositions || s.batch < 0) return false;
  if (s.groups < 1 || s.per_group < 1 || s.d < 8 || s.d > 128 || s.d % 8 != 0 || !(s.scale > 0.0f)) return false;
  const int64_t rows = s.seq > s.keys ? s.seq : s.keys;
  return (rows / kRows + 1) * s.batch * s.groups * s.per_group <= INT32_MAX;
}

inline Call call_of(
    const mp_attention_shape& s, const mp_probability_mask* dropout, const mp_attention_mask* mask) {
  Call call{};
  call.seq = static_cast<int>(s.seq), call.keys = static_cast<int>(s.keys), call.batch = static_cast<int>(s.batch);
  call.groups = static_cast<int>(s.groups), call.per_group = static_cast<int>(s.per_group);
  call.d = static_cast<int>(s.d);
  call.causal = s.causal != 0, call.scale = s.scale, call.unit = s.scale * kLog2E;
  if (mask != nullptr) call.first = mask->first, call.end = mask->end, call.window = mask->window;
  if (dropout != nullptr) {
    call.sample_keys = dropout->keys, call.keep = keep_of(dropout->op_key, dropout->threshold);
    call.head_offset = dropout->head_offset;
  } else {
    call.keep.scale = 1.0f;
  }
  return call;
}

// Blocks of so many rows of each of so many heads.
inline unsigned blocks_of(int64_t rows, int64_t heads) {
  return static_cast<unsigned>((rows + kRows - 1) / kRows * heads);
}

template <int N>
struct Width {
  static constexpr int value = N;
};

// Calls `with(T{}, Width<HEAD>{})`.
template <typename F>
inline int32_t for_head(int32_t dtype, int64_t d, F with) {
  const auto sized = [&](auto zero) {
    return d <= 64 ? with(zero, Width<64>{}) : d <= 96 ? with(zero, Width<96>{}) : with(zero, Width<128>{});
  };
  return dtype == MP_F16 ? sized(f16{}) : dtype == MP_BF16 ? sized(bf16{}) : MP_BAD_DTYPE;
}

}  // namespace
}  // namespace mp

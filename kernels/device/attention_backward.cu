// Gradients of fused attention with dropout by counters; include/attention.h says what they are.
//
// Three kernels, without atomics: the bits are the same every time. `along`, the product of dout with out, of each query;
// then dq over blocks of queries, and dk and dv over blocks of keys, each of which makes the scores, the probabilities
// and the mask again: seven products a probability where a kernel that adds to dq from everywhere has five. dk and dv
// sum over the query heads of their group in one order.
//
// In the second, warps have 16 keys each and walk over queries, because then the probabilities are, as they come out of
// the registers, the left operand of both sums. Four neighbours in a lane are queries there, and each would take a hash
// of its own; so the mask of a step is made by groups of four keys beside the loads, and read as bits.
#include "attention.cuh"

namespace mp {
namespace {

constexpr int kStep = 32;  // keys of a step of dq
constexpr int kTiles = kStep / 16;

struct Backward {
  Call call;
  Given dout, q, k, v;
  const float *rows, *along;
  Taken dq, dk, dv;
};

// ------------------------------------------------------------------------------------------------ along

struct Along {
  int64_t rows;  // seq * batch * heads, as dout and out have them
  int seq, columns, d;
  const void *dout, *out;
  float* along;
};

constexpr int kTeam = 16;  // lanes of a row, 8 elements each

template <typename T>
__global__ void __launch_bounds__(256) attention_along(Along a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (256 / kTeam) + threadIdx.x / kTeam;
  const int col = static_cast<int>(threadIdx.x % kTeam) * 8;
  float sum = 0.0f;
  if (row < a.rows && col < a.d) {
    const Pack<T, 8> x = load<8>(static_cast<const T*>(a.dout) + row * a.d + col);
    const Pack<T, 8> y = load<8>(static_cast<const T*>(a.out) + row * a.d + col);
#pragma unroll
    for (int i = 0; i < 8; i++) sum += x.value(i) * y.value(i);
  }
#pragma unroll
  for (int mask = kTeam / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  if (col != 0 || row >= a.rows) return;
  const int64_t query = row / a.columns, column = row - query * a.columns;  // column: sample and head
  a.along[column * a.seq + query] = sum;
}

// ------------------------------------------------------------------------------------------------ dq

// What the gradients of a query's scores are made from.
struct Row {
  float top, inverse, along;
  int low, high;

  __device__ Row(const Backward& a, int sample, int head, int query) : top(0.0f), inverse(0.0f), along(0.0f) {
    const Seen seen(a.call, sample, query);
    low = seen.low, high = seen.high;
    if (query >= a.call.seq) return;
    const int64_t place = static_cast<int64_t>(sample) * a.call.heads() + head;
    const float* const rows = a.rows + place * 2 * a.call.seq + query;
    top = rows[0], inverse = rows[a.call.seq], along = a.along[place * a.call.seq + query];
  }
};

template <typename T, int HEAD>
__global__ void __launch_bounds__(kThreads) attention_backward_queries(Backward a) {
  T* const keys = reinterpret_cast<T*>(dynamic_shared());
  T* const values = keys + kStep * kStride<HEAD>;
  const Call& call = a.call;
  const int heads = call.heads(), blocks = static_cast<int>(gridDim.x) / (heads * call.batch);
  const int block = blocks - 1 - static_cast<int>(blockIdx.x) / (heads * call.batch);
  const int place = static_cast<int>(blockIdx.x) % (heads * call.batch), sample = place / heads, head = place % heads;
  const int group = head / call.per_group, within = head % call.per_group, first = block * kRows;
  const int warp_first = first + static_cast<int>(threadIdx.x) / MP_WARP * matrix::kTile;

  matrix::Operand<T> q[HEAD / 16], dout[HEAD / 16];
  hold<T, HEAD>(a.q.rows<T>(sample, group, within), a.q.layout.seq, first, call.seq, call.d, keys, q);
  hold<T, HEAD>(a.dout.rows<T>(sample, group, within), a.dout.layout.seq, first, call.seq, call.d, keys, dout);
  matrix::Sums dq[HEAD / 16] = {};
  float top[matrix::kLines], inverse[matrix::kLines], along[matrix::kLines];
  int low[matrix::kLines], high[matrix::kLines], shift[matrix::kLines] = {};
  uint64_t scaled[matrix::kLines] = {}, sample_key = 0;
#pragma unroll
  for (int line = 0; line < matrix::kLines; line++) {
    const int query = warp_first + matrix::row(line);
    const Row row(a, sample, head, query);
    top[line] = row.top, inverse[line] = row.inverse, along[line] = row.along;
    low[line] = row.low, high[line] = row.high;
    if (call.sample_keys == nullptr) continue;
    const Fields fields(call, sample, head, query);
    scaled[line] = fields.scaled, shift[line] = fields.shift, sample_key = fields.key;
  }
  const Span span = seen_by(call, sample, first, kRows);
  const T* const k_rows = a.k.rows<T>(sample, group, 0);
  const T* const v_rows = a.v.rows<T>(sample, group, 0);
  // Where registers allow, a step's keys and values are on their way while the one before is computed.
  constexpr bool kAhead = MP_WARP == 64 || HEAD < 128;
  Stage<T, HEAD, kStep> next_keys, next_values;
  const auto fetch = [&](int from) {
    next_keys.fetch(k_rows, a.k.layout.seq, from, call.keys, call.d);
    next_values.fetch(v_rows, a.v.layout.seq, from, call.keys, call.d);
  };
  int at = span.from & ~(matrix::kTile - 1);
  if (kAhead && at < span.upto) fetch(at);
  for (; at < span.upto; at += kStep) {
    if (!kAhead) fetch(at);
    __syncthreads();
    next_keys.template put<true>(keys);
    next_values.template put<true>(values);
    __syncthreads();
    if (kAhead && at + kStep < span.upto) fetch(at + kStep);
    matrix::Sums scores[kTiles], grads[kTiles];
    score<T, HEAD, kTiles>(q, keys, scores);
    score<T, HEAD, kTiles>(dout, values, grads);
#pragma unroll
    for (int line = 0; line < matrix::kLines; line++) {
      const bool whole = low[line] <= at && at + kStep <= high[line];
#pragma unroll
      for (int j = 0; j < kTiles; j++) {
        const int from = at + 16 * j + matrix::column(0);
        bool kept[4] = {true, true, true, true};
        if (call.sample_keys != nullptr) {
          four_kept(
              four_fields(call.keep, sample_key, scaled[line] + static_cast<uint64_t>(from >> 2) * kGolden, shift[line]),
              call.keep.threshold, kept);
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const float p =
              power_of_2(rounded_product(scores[j].at[line][c], call.unit) - top[line]) * inverse[line];
          const float factor = kept[c] ? call.keep.scale : 0.0f;
          grads[j].at[line][c] = p * (grads[j].at[line][c] * factor - along[line]);
        }
        if (whole) continue;
#pragma unroll
        for (int c = 0; c < 4; c++) {
          if (from + c < low[line] || from + c >= high[line]) grads[j].at[line][c] = 0.0f;
        }
      }
    }
    mix<T, HEAD, kTiles>(grads, keys, dq);
  }
  float factor[matrix::kLines];
#pragma unroll
  for (int line = 0; line < matrix::kLines; line++) factor[line] = call.scale;
  give<T, HEAD>(
      dq, factor, keys, a.dq.rows<T>(sample, group, within), a.dq.layout.seq, first, call.seq, call.d);
}

// ------------------------------------------------------------------------------------------------ dk and dv

// Queries of a step.
template <int HEAD>
constexpr int kQueries = HEAD <= 64 ? 64 : 32;

template <int QUERIES>
struct alignas(16) Step {
  float top[QUERIES], inverse[QUERIES], along[QUERIES];
  int low[QUERIES], high[QUERIES];
  uint16_t kept[kWarps][QUERIES];  // bit r: whether the probability of a warp's key r is kept
};

// Scale or 0 of a lane's four neighbours and their probabilities likewise, without a condition of each: AMD's compilers
// keep conditions in scalar registers, of which there are too few.
__device__ inline float if_bit(float value, uint32_t bits, int bit) {
  return float_of_bits(bits_of_float(value) & (0u - (bits >> bit & 1u)));
}

// Fragments of the block's keys or values: held in registers, or read from shared memory when they are needed.
template <typename T, int HEAD, bool HELD>
struct Own {
  matrix::Operand<T> held[HELD ? HEAD / 16 : 1];
  const T* tile;

  __device__ void take(const T* rows, int64_t stride, int from, int count, int d, T* to) {
    if constexpr (HELD) {
      hold<T, HEAD>(rows, stride, from, count, d, to, held);
    } else {
      Stage<T, HEAD, kRows> stage;
      stage.fetch(rows, stride, from, count, d);
      stage.template put<false>(to);
      tile = to + threadIdx.x / MP_WARP * matrix::kTile * kStride<HEAD>;
    }
  }
  __device__ matrix::Operand<T> at(int i) const {
    if constexpr (HELD) return held[i];
    else return matrix::left(tile + 16 * i, kStride<HEAD>);
  }
};

// 32 lanes keep as many registers of a head of 64 as 64 lanes of one of 128; sums of dk and dv take as many again.
template <int HEAD>
constexpr bool kHeld = MP_WARP == 64 || HEAD <= 64;

// Halves of shared memory: queries and dout of a step, and the block's keys and values where they are not held.
template <int HEAD>
constexpr int kSharedRows = 2 * kQueries<HEAD> + (kHeld<HEAD> ? 0 : 2 * kRows);

template <typename T, int HEAD>
__global__ void __launch_bounds__(kThreads) attention_backward_keys(Backward a) {
  constexpr int QUERIES = kQueries<HEAD>, TILES = QUERIES / 16;
  __shared__ Step<QUERIES> step;
  T* const queries = reinterpret_cast<T*>(dynamic_shared());
  T* const douts = queries + QUERIES * kStride<HEAD>;
  const Call& call = a.call;
  const int groups = call.groups * call.batch, block = static_cast<int>(blockIdx.x) / groups;
  const int place = static_cast<int>(blockIdx.x) % groups, sample = place / call.groups, group = place % call.groups;
  const int first = block * kRows, warp = static_cast<int>(threadIdx.x) / MP_WARP;
  const int warp_first = first + warp * matrix::kTile;

  Own<T, HEAD, kHeld<HEAD>> keys, values;
  T* const spare = kHeld<HEAD> ? queries : douts + QUERIES * kStride<HEAD>;
  keys.take(a.k.rows<T>(sample, group, 0), a.k.layout.seq, first, call.keys, call.d, spare);
  values.take(
      a.v.rows<T>(sample, group, 0), a.v.layout.seq, first, call.keys, call.d,
      kHeld<HEAD> ? queries : spare + kRows * kStride<HEAD>);
  matrix::Sums dk[HEAD / 16] = {}, dv[HEAD / 16] = {};
  // Queries that stand where their keys do see none of the block before its first key.
  const int begin = call.causal && call.end == nullptr ? first / QUERIES * QUERIES : 0;
  const T *q_rows = a.q.rows<T>(sample, group, 0), *dout_rows = a.dout.rows<T>(sample, group, 0);
  const int steps = begin < call.seq ? (call.seq - begin + QUERIES - 1) / QUERIES : 0;
  int within = 0, at = begin;
  Stage<T, HEAD, QUERIES> next_queries, next_douts;
#pragma unroll 1
  for (int left = steps * call.per_group; left > 0; left--, at += QUERIES) {
    if (at >= call.seq) at = begin, within++;
    if (!call.plain()) {
      const Span span = seen_by(call, sample, at, QUERIES);
      if (span.from >= first + kRows || span.upto <= first) continue;
    }
    const int head = group * call.per_group + within;
    // Whether all of these queries see all keys of the warp.
    const bool whole = call.plain() && at + QUERIES <= call.seq && warp_first + matrix::kTile <= call.stop(at);
    next_queries.fetch(q_rows + within * a.q.layout.head, a.q.layout.seq, at, call.seq, call.d);
    next_douts.fetch(dout_rows + within * a.dout.layout.head, a.dout.layout.seq, at, call.seq, call.d);
    __syncthreads();
    next_queries.template put<true>(queries);
    next_douts.template put<true>(douts);
    for (int i = threadIdx.x; i < QUERIES; i += kThreads) {
      const Row row(a, sample, head, at + i);
      step.top[i] = row.top, step.inverse[i] = row.inverse, step.along[i] = row.along;
      step.low[i] = row.low, step.high[i] = row.high;
    }
    for (int i = threadIdx.x; i < kWarps * QUERIES; i += kThreads) {
      const int query = i % QUERIES, from = first + i / QUERIES * matrix::kTile;
      uint32_t bits = 0xffffu;
      if (call.sample_keys != nullptr) {
        const Fields fields(call, sample, head, at + query);
        bits = 0;
#pragma unroll
        for (int four = 0; four < 4; four++) {
          bool kept[4];
          four_kept(fields.at(call.keep, from + 4 * four), call.keep.threshold, kept);
#pragma unroll
          for (int c = 0; c < 4; c++) bits |= kept[c] ? 1u << (4 * four + c) : 0u;
        }
      }
      step.kept[i / QUERIES][query] = static_cast<uint16_t>(bits);
    }
    __syncthreads();

    matrix::Sums probs[TILES] = {}, grads[TILES] = {};
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
      const matrix::Operand<T> key = keys.at(i), value = values.at(i);
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const int tile = 16 * j * kStride<HEAD> + 16 * i;
        matrix::multiply(probs[j], key, matrix::right(queries + tile, kStride<HEAD>));
        matrix::multiply(grads[j], value, matrix::right(douts + tile, kStride<HEAD>));
      }
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const int query = 16 * j + matrix::column(0);
      const auto top = load<4>(step.top + query), inverse = load<4>(step.inverse + query);
      const auto along = load<4>(step.along + query);
      const auto low = load<4>(step.low + query), high = load<4>(step.high + query);
      const auto bits = load<4>(step.kept[warp] + query);
#pragma unroll
      for (int line = 0; line < matrix::kLines; line++) {
        const int key = warp_first + matrix::row(line);
#pragma unroll
        for (int c = 0; c < 4; c++) {
          float p = power_of_2(rounded_product(probs[j].at[line][c], call.unit) - top.at[c]) * inverse.at[c];
          if (!whole) p = low.at[c] <= key && key < high.at[c] ? p : 0.0f;
          const float factor = if_bit(call.keep.scale, bits.at[c], matrix::row(line));
          grads[j].at[line][c] = p * (grads[j].at[line][c] * factor - along.at[c]);
          probs[j].at[line][c] = if_bit(p, bits.at[c], matrix::row(line));
        }
      }
    }
    mix<T, HEAD, TILES>(probs, douts, dv);
    mix<T, HEAD, TILES>(grads, queries, dk);
  }
  float factor[matrix::kLines];
#pragma unroll
  for (int line = 0; line < matrix::kLines; line++) factor[line] = call.keep.scale;
  give<T, HEAD>(dv, factor, queries, a.dv.rows<T>(sample, group, 0), a.dv.layout.seq, first, call.keys, call.d);
#pragma unroll
  for (int line = 0; line < matrix::kLines; line++) factor[line] = call.scale;
  give<T, HEAD>(dk, factor, queries, a.dk.rows<T>(sample, group, 0), a.dk.layout.seq, first, call.keys, call.d);
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_attention_backward(
    void* stream, int32_t dtype, const mp_attention_shape* shape, const void* dout, const void* q,
    const int64_t* q_strides, const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides,
    const void* out, const float* rows, const mp_probability_mask* dropout, const mp_attention_mask* mask, void* dq,
    const int64_t* dq_strides, void* dk, const int64_t* dk_strides, void* dv, const int64_t* dv_strides,
    float* dsinks, float* along) {
#ifdef MP_NO_MATRIX
  return MP_BAD_SIZE;
#else
  using namespace mp;
  Backward a{
      {}, {dout, dense_layout(*shape)}, {q, layout_of(q_strides, true)}, {k, layout_of(k_strides, false)},
      {v, layout_of(v_strides, false)}, rows, along, {dq, layout_of(dq_strides, true)},
      {dk, layout_of(dk_strides, false)}, {dv, layout_of(dv_strides, false)}};
  if (dtype != MP_F16 && dtype != MP_BF16) return MP_BAD_DTYPE;
  if (!good(*shape, dropout, mask) || !pieces_fit(out, a.dout.layout)) return MP_BAD_SIZE;
  for (const Given& given : {a.dout, a.q, a.k, a.v}) {
    if (!pieces_fit(given.data, given.layout)) return MP_BAD_SIZE;
  }
  for (const Taken& taken : {a.dq, a.dk, a.dv}) {
    if (!pieces_fit(taken.data, taken.layout)) return MP_BAD_SIZE;
  }
  a.call = call_of(*shape, dropout, mask);
  const int64_t columns = shape->batch * shape->groups * shape->per_group, count = shape->seq * columns;
  if (columns == 0) return MP_OK;
  return for_head(dtype, shape->d, [&](auto zero, auto width) {
    using T = decltype(zero);
    constexpr int HEAD = decltype(width)::value;
    constexpr int64_t row_bytes = kStride<HEAD> * 2;
    int32_t code = MP_OK;
    if (count > 0) {
      const Along sums{count, a.call.seq, static_cast<int>(columns), a.call.d, dout, out, along};
      const int64_t each = 256 / kTeam;
      code = launch(&attention_along<T>, static_cast<unsigned>((count + each - 1) / each), 256, stream, sums);
      if (code != MP_OK) return code;
      code = launch_shared<&attention_backward_queries<T, HEAD>>(
          blocks_of(shape->seq, columns), kThreads, kRows * row_bytes, stream, a);
      if (code != MP_OK) return code;
    }
    return launch_shared<&attention_backward_keys<T, HEAD>>(
        blocks_of(shape->keys, shape->batch * shape->groups), kThreads, kSharedRows<HEAD> * row_bytes, stream, a);
  });
#endif
}

// Fused attention with dropout by counters, forward (FlashAttention-2's order of work, arXiv 2307.08691);
// include/attention.h says what it computes, attention_backward.cu has the gradients.
//
// A block takes 64 queries of a head and walks over the keys that they see. Scores and probabilities exist as sums of
// matrix instructions in registers only; a probability's tile is rounded to halves and multiplied with the values from
// there. Keys and values of the next step are on their way while a step is computed.
//
// Of a probability, with heads of 64: 128 multiply-adds (2 of 32 lanes' mma, 4 of 64 lanes' MFMA by lane), a
// multiplication, a subtraction, the maximum, an exponential, a sum, a conversion, a quarter of the hash of a group of
// four, and a comparison: the vector instructions are several times the matrix ones, so the mask and the exponential
// set the pace (kernels/budgets has the counts). Memory: q and out once, k and v once for 64 queries, from the cache of
// the second level; 128 bytes of a key head's row for 64 probabilities. Nothing of seq * keys is stored.
#include "attention.cuh"

namespace mp {
namespace {

// Keys of a step.
template <int HEAD>
constexpr int kKeys = HEAD <= 64 ? 64 : 32;

struct Forward {
  Call call;
  Given q, k, v;
  Taken out;
  float* rows;
};

struct Largest {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// A warp's queries: what their rows' softmax is made from.
struct Softmax {
  float top[matrix::kLines], sum[matrix::kLines];  // sum: of the lane's columns alone
};

// Scores to probabilities over `top`, which grows; what was summed before is scaled down to it.
template <int HEAD, int TILES>
__device__ inline void exponentials(
    float unit, matrix::Sums (&scores)[TILES], Softmax& softmax, matrix::Sums (&out)[HEAD / 16]) {
  float scaled[matrix::kLines];
  bool grown = false;
#pragma unroll
  for (int line = 0; line < matrix::kLines; line++) {
    float top = softmax.top[line];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        scores[j].at[line][c] = rounded_product(scores[j].at[line][c], unit);
        top = fmaxf(top, scores[j].at[line][c]);  // passes over NaN, which the exponential keeps
      }
    }
    top = matrix::row_reduce(top, Largest());
    const float base = top == minus_infinity() ? 0.0f : top;  // nothing seen yet
    scaled[line] = power_of_2(softmax.top[line] - base);
    grown |= scaled[line] != 1.0f;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
#pragma unroll
      for (int c = 0; c < 4; c++) sum += scores[j].at[line][c] = power_of_2(scores[j].at[line][c] - base);
    }
    softmax.sum[line] = softmax.sum[line] * scaled[line] + sum;
    softmax.top[line] = top;
  }
  if (!grown) return;
#pragma unroll
  for (int i = 0; i < HEAD / 16; i++) {
#pragma unroll
    for (int line = 0; line < matrix::kLines; line++) {
#pragma unroll
      for (int c = 0; c < 4; c++) out[i].at[line][c] *= scaled[line];
    }
  }
}

template <typename T, int HEAD>
__global__ void __launch_bounds__(kThreads) attention_forward(Forward a) {
  constexpr int COLS = kKeys<HEAD>, TILES = COLS / 16;
  T* const keys = reinterpret_cast<T*>(dynamic_shared());
  T* const values = keys + COLS * kStride<HEAD>;
  const Call& call = a.call;
  // The last queries, which see most keys, first.
  const int heads = call.heads(), blocks = static_cast<int>(gridDim.x) / (heads * call.batch);
  const int block = blocks - 1 - static_cast<int>(blockIdx.x) / (heads * call.batch);
  const int place = static_cast<int>(blockIdx.x) % (heads * call.batch), sample = place / heads, head = place % heads;
  const int group = head / call.per_group, first = block * kRows;
  const int warp_first = first + static_cast<int>(threadIdx.x) / MP_WARP * matrix::kTile;

  matrix::Operand<T> q[HEAD / 16];
  hold<T, HEAD>(a.q.rows<T>(sample, group, head % call.per_group), a.q.layout.seq, first, call.seq, call.d, keys, q);
  matrix::Sums out[HEAD / 16] = {};
  Softmax softmax;
  int low[matrix::kLines], high[matrix::kLines];
  uint64_t scaled[matrix::kLines] = {}, sample_key = 0;
  int shift[matrix::kLines] = {};
#pragma unroll
  for (int line = 0; line < matrix::kLines; line++) {
    const Seen seen(call, sample, warp_first + matrix::row(line));
    low[line] = seen.low, high[line] = seen.high;
    softmax.top[line] = minus_infinity(), softmax.sum[line] = 0.0f;
    if (call.sample_keys == nullptr) continue;
    const Fields fields(call, sample, head, warp_first + matrix::row(line));
    scaled[line] = fields.scaled, shift[line] = fields.shift, sample_key = fields.key;
  }
  const Span span = seen_by(call, sample, first, kRows);
  const T* const k_rows = a.k.rows<T>(sample, group, 0);
  const T* const v_rows = a.v.rows<T>(sample, group, 0);
  Stage<T, HEAD, COLS> next_keys, next_values;
  int at = span.from & ~(matrix::kTile - 1);
  const auto fetch = [&](int from) {
    next_keys.fetch(k_rows, a.k.layout.seq, from, call.keys, call.d);
    next_values.fetch(v_rows, a.v.layout.seq, from, call.keys, call.d);
  };
  if (at < span.upto) fetch(at);
  for (; at < span.upto; at += COLS) {
    __syncthreads();
    next_keys.template put<true>(keys);
    next_values.template put<true>(values);
    __syncthreads();
    if (at + COLS < span.upto) fetch(at + COLS);
    matrix::Sums scores[TILES];
    score<T, HEAD, TILES>(q, keys, scores);
#pragma unroll
    for (int line = 0; line < matrix::kLines; line++) {
      if (low[line] <= at && at + COLS <= high[line]) continue;
#pragma unroll
      for (int j = 0; j < TILES; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const int key = at + 16 * j + matrix::column(c);
          if (key < low[line] || key >= high[line]) scores[j].at[line][c] = minus_infinity();
        }
      }
    }
    exponentials<HEAD, TILES>(call.unit, scores, softmax, out);
    if (call.sample_keys != nullptr) {
#pragma unroll
      for (int line = 0; line < matrix::kLines; line++) {
#pragma unroll
        for (int j = 0; j < TILES; j++) {
          const int from = at + 16 * j + matrix::column(0);
          bool kept[4];
          four_kept(
              four_fields(call.keep, sample_key, scaled[line] + static_cast<uint64_t>(from >> 2) * kGolden, shift[line]),
              call.keep.threshold, kept);
#pragma unroll
          for (int c = 0; c < 4; c++) scores[j].at[line][c] = kept[c] ? scores[j].at[line][c] : 0.0f;
        }
      }
    }
    mix<T, HEAD, TILES>(scores, values, out);
  }

  float factor[matrix::kLines];
  float* const rows = a.rows + static_cast<int64_t>(sample * heads + head) * 2 * call.seq;
#pragma unroll
  for (int line = 0; line < matrix::kLines; line++) {
    const int query = warp_first + matrix::row(line);
    const float sum = matrix::row_reduce(softmax.sum[line], Add());
    const bool blind = low[line] >= high[line];
    const float inverse = blind ? 0.0f : 1.0f / sum;
    factor[line] = inverse * call.keep.scale;
    if (matrix::quad() != 0 || query >= call.seq) continue;
    rows[query] = blind ? 0.0f : softmax.top[line];
    rows[call.seq + query] = inverse;
  }
  give<T, HEAD>(
      out, factor, keys, a.out.rows<T>(sample, group, head % call.per_group), a.out.layout.seq, first, call.seq,
      call.d);
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_attention_forward(
    void* stream, int32_t dtype, const mp_attention_shape* shape, const void* q, const int64_t* q_strides,
    const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides,
    const mp_probability_mask* dropout, const mp_attention_mask* mask, void* out, float* rows) {
#ifdef MP_NO_MATRIX
  return MP_BAD_SIZE;
#else
  using namespace mp;
  Forward a{
      {}, {q, layout_of(q_strides, true)}, {k, layout_of(k_strides, false)}, {v, layout_of(v_strides, false)},
      {out, dense_layout(*shape)}, rows};
  if (dtype != MP_F16 && dtype != MP_BF16) return MP_BAD_DTYPE;
  if (!good(*shape, dropout, mask) || !pieces_fit(q, a.q.layout) || !pieces_fit(k, a.k.layout) ||
      !pieces_fit(v, a.v.layout) || !pieces_fit(out, a.out.layout)) {
    return MP_BAD_SIZE;
  }
  a.call = call_of(*shape, dropout, mask);
  const unsigned blocks = blocks_of(shape->seq, shape->batch * shape->groups * shape->per_group);
  if (blocks == 0) return MP_OK;
  return for_head(dtype, shape->d, [&](auto zero, auto width) {
    using T = decltype(zero);
    constexpr int HEAD = decltype(width)::value;
    const int64_t tiles = 2 * kKeys<HEAD> > kRows ? 2 * kKeys<HEAD> : kRows;
    return launch_shared<&attention_forward<T, HEAD>>(blocks, kThreads, tiles * kStride<HEAD> * 2, stream, a);
  });
#endif
}

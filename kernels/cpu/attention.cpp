// Causal attention with grouped queries; include/attention.h says what it computes.
//
// A key head's keys and values are copied once into contiguous floats, padded with zeros to whole tiles, so that every
// product runs over the same dense tiles whatever the strides, sizes and dtype were. Queries are taken in blocks whose
// scores stay in the cache; the products leave out the tiles that no query of theirs sees. Each key head of a sample is
// one thread's, with its gradients: the bits do not depend on the number of threads.
#include "attention.h"

#include <algorithm>
#include <array>

#include "common.h"
#include "mask_row.h"
#include "sums.h"
#include "tiles.h"
#include "vmath.h"

namespace mp {
namespace {

constexpr int64_t kQueries = 32;  // of a block
constexpr int64_t kBlocks = 64;   // whose gradients of keys and values are added in a row
constexpr int64_t kKeys = 256;    // whose weighted rows are added in a row

// Keys [low, high) that each query of a sample sees.
struct Seen {
  const int32_t *first = nullptr, *end = nullptr;
  int64_t window = 0, keys;
  bool causal;

  Seen(const mp_attention_shape& s, const mp_attention_mask* mask, int64_t sample) : keys(s.keys), causal(s.causal) {
    if (mask == nullptr) return;
    first = mask->first == nullptr ? nullptr : mask->first + sample * s.seq;
    end = mask->end;
    window = mask->window;
  }
  int64_t stop(int64_t row) const { return end != nullptr ? end[row] : causal ? row + 1 : keys; }
  int64_t high(int64_t row) const { return std::min(stop(row), keys); }
  int64_t low(int64_t row) const {
    const int64_t from = first == nullptr ? 0 : std::max<int64_t>(first[row], 0);
    return window > 0 ? std::max(from, stop(row) - window) : from;
  }
};

// A block of queries: what each of its rows sees, each of its tiles of kDown rows, and all of them.
struct Block {
  int64_t first, count, rows;  // rows: of whole tiles; those past `count` see nothing
  int64_t low[kQueries], high[kQueries];
  int64_t from[kQueries / kDown], upto[kQueries / kDown], begin, end;
  int64_t latest[kQueries], earliest[kQueries];  // largest high of the rows so far; smallest low of it and those below

  Block(const mp_attention_shape& s, const Seen& seen, int64_t at)
      : first(at), count(std::min(kQueries, s.seq - at)), rows(whole(count, kDown)), begin(s.keys), end(0) {
    for (int64_t t = 0; t < rows / kDown; t++) {
      from[t] = s.keys;
      upto[t] = 0;
    }
    for (int64_t r = 0; r < rows; r++) {
      low[r] = high[r] = 0;
      if (r >= count) continue;
      const int64_t a = seen.low(first + r), b = seen.high(first + r);
      latest[r] = r > 0 ? latest[r - 1] : 0;
      if (a >= b) continue;
      low[r] = a;
      high[r] = b;
      latest[r] = std::max(latest[r], b);
      from[r / kDown] = std::min(from[r / kDown], a);
      upto[r / kDown] = std::max(upto[r / kDown], b);
    }
    int64_t smallest = s.keys;
    for (int64_t r = count - 1; r >= 0; r--) {
      if (low[r] < high[r]) smallest = std::min(smallest, low[r]);
      earliest[r] = smallest;
    }
    for (int64_t t = 0; t < rows / kDown; t++) {
      from[t] = std::min(from[t], upto[t]);
      if (from[t] == upto[t]) continue;
      begin = std::min(begin, from[t]);
      end = std::max(end, upto[t]);
    }
    begin = std::min(begin, end);
  }
  int64_t live(int64_t r) const { return high[r] - low[r]; }
};

// What one thread works with. Widths are padded: `wide` of a head, `long_` of the keys, with a tile more, so that the
// rows do not fall onto the same lines of the cache where the keys are a power of two.
struct Space {
  int64_t wide, long_;
  std::vector<float> store, factor;  // factor: of a row of probabilities, where there is dropout
  MaskRow room;
  int64_t blocks = 0;  // that dk and dv have since they were added to their totals
  float *k, *k_turned, *v, *v_turned, *q, *dout, *scores, *dscores, *sum, *dk, *dv, *dk_total, *dv_total;

  Space(const mp_attention_shape& s, bool backward, bool masked)
      : wide(whole(s.d, kAcross)),
        long_(whole(s.keys, kAcross) + kAcross),
        factor(masked ? s.keys : 0),
        room(masked ? s.keys : 0) {
    const int64_t head = long_ * wide, block = kQueries * wide, square = kQueries * long_;
    const int64_t sizes[] = {head, head, head, backward ? head : 0, block, backward ? block : 0, square,
                             backward ? square : 0, block, backward ? head : 0, backward ? head : 0,
                             backward && several_totals(s) ? head : 0, backward && several_totals(s) ? head : 0};
    float** places[] = {&k, &k_turned, &v, &v_turned, &q, &dout, &scores, &dscores, &sum, &dk, &dv,
                        &dk_total, &dv_total};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    store.resize(total + 16);
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(store.data()) + 63) / 64 * 64);
    for (int i = 0; i < 13; i++) {
      *places[i] = at;
      at += sizes[i];
    }
  }

  static bool several_totals(const mp_attention_shape& s) { return s.per_group * s.seq > kBlocks * kQueries; }

  // Begins the gradients of a key head.
  void clear_gradients(const mp_attention_shape& s) {
    const int64_t head = long_ * wide;
    std::fill(dk, dk + head, 0.0f);
    std::fill(dv, dv + head, 0.0f);
    blocks = 0;
    if (!several_totals(s)) return;
    std::fill(dk_total, dk_total + head, 0.0f);
    std::fill(dv_total, dv_total + head, 0.0f);
  }

  // Counts a block, and adds up where there have been many, or `last`; then the totals are in dk and dv.
  void end_block(const mp_attention_shape& s, bool last) {
    if (!several_totals(s) || (!last && ++blocks < kBlocks)) return;
    add_up(dk, dk_total, last);
    add_up(dv, dv_total, last);
    blocks = 0;
  }

  void add_up(float* part, float* total, bool last) const {
#pragma omp simd
    for (int64_t i = 0; i < long_ * wide; i++) {
      total[i] += part[i];
      part[i] = last ? total[i] : 0.0f;
    }
  }

  // to [block, long_] = rows [block, wide] times the transposed keys or values, where a row of the tile sees them.
  void times(const mp_attention_shape& s, const Block& block, const float* rows, const float* turned, float* to) {
    for (int64_t r = 0; r < block.rows; r += kDown) {
      const int64_t end = block.upto[r / kDown];
      for (int64_t c = block.from[r / kDown] / kAcross * kAcross; c < end; c += kAcross) {
        tile<false>(rows + r * wide, wide, 1, turned + c, long_, s.d, to + r * long_ + c, long_);
      }
    }
  }

  // to [block, wide] = weights [block, keys] times keys or values.
  void mix(const mp_attention_shape& s, const Block& block, const float* weights, const float* rows, float* to) {
    for (int64_t r = 0; r < block.rows; r += kDown) {
      const int64_t from = block.from[r / kDown], upto = block.upto[r / kDown], first = std::min(from + kKeys, upto);
      for (int64_t c = 0; c < s.d; c += kAcross) {
        tile<false>(
            weights + r * long_ + from, long_, 1, rows + from * wide + c, wide, first - from, to + r * wide + c, wide);
      }
      for (int64_t k = first; k < upto; k += kKeys) {
        for (int64_t c = 0; c < s.d; c += kAcross) {
          tile<true>(
              weights + r * long_ + k, long_, 1, rows + k * wide + c, wide, std::min(kKeys, upto - k),
              to + r * wide + c, wide);
        }
      }
    }
  }

  // to [keys, wide] += the transposed weights times rows [block, wide].
  void collect(const mp_attention_shape& s, const Block& block, const float* weights, const float* rows, float* to) {
    int64_t from = 0, upto = 0;  // rows that may see a key of the tile; both only grow with it
    for (int64_t j = block.begin / kDown * kDown; j < block.end; j += kDown) {
      while (from < block.count && block.latest[from] <= j) from++;
      while (upto < block.count && block.earliest[upto] < j + kDown) upto++;
      if (from >= upto) continue;
      for (int64_t c = 0; c < s.d; c += kAcross) {
        tile<true>(
            weights + from * long_ + j, 1, long_, rows + from * wide + c, wide, upto - from, to + j * wide + c, wide);
      }
    }
  }
};

// Of contiguous [seq, batch, groups, per_group, d].
std::array<int64_t, 4> dense_strides(const mp_attention_shape& s) {
  const int64_t group = s.per_group * s.d;
  return {s.batch * s.groups * group, s.groups * group, group, s.d};
}

// Dropout of one head's probabilities; without keys: none.
struct HeadMask {
  const int64_t* keys = nullptr;
  Keep keep{};
  int64_t sample = 0, start = 0, cols = 0;  // start: position of the head's first probability

  HeadMask(const mp_attention_shape& s, const mp_probability_mask* mask, int64_t sample, int64_t head)
      : sample(sample), cols(s.keys) {
    if (mask == nullptr) return;
    keys = mask->keys;
    keep = keep_of(mask->op_key, mask->threshold);
    start = (mask->head_offset + head) * s.keys * s.keys;
  }
  // Scale or 0 of `live` probabilities of the query at `position` from key `low` on; NULL without dropout.
  const float* factors(Space& space, int64_t position, int64_t low, int64_t live) const {
    if (keys == nullptr) return nullptr;
    space.room.factors(keep, keys[sample], start + position * cols + low, live, space.factor.data());
    return space.factor.data();
  }
};

// Runs `work(space, sample, group)` for every key head, on all threads.
template <typename F>
void for_heads(const mp_attention_shape& s, bool backward, bool masked, F work) {
  const int64_t count = s.batch * s.groups;
#pragma omp parallel if (count > 1 && count * s.seq * s.keys > kParallelFrom)
  {
    Space space(s, backward, masked);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) work(space, i / s.groups, i % s.groups);
  }
}

// What happens to the scores of one head.
struct Scores {
  float softcap = 0.0f, sink = 0.0f;
  bool has_sink = false;

  Scores(const mp_attention_mask* mask, int64_t head) {
    if (mask == nullptr) return;
    softcap = mask->softcap;
    has_sink = mask->sinks != nullptr;
    if (has_sink) sink = mask->sinks[head];
  }
};

inline void cap(float* row, int64_t live, float softcap) {
  const float over = 1.0f / softcap;
#pragma omp simd
  for (int64_t c = 0; c < live; c++) row[c] = softcap * tanh_float(row[c] * over);
}

template <typename T>
void forward_head(
    const mp_attention_shape& s, Space& space, const Seen& seen, const Scores& scores, const HeadMask& mask,
    const Rows<const T>& q, const Rows<T>& out, float* of_rows) {
  for (int64_t first = 0; first < s.seq; first += kQueries) {
    const Block block(s, seen, first);
    pack(q, first, block.count, block.rows, s.scale, space.q, space.wide);
    space.times(s, block, space.q, space.k_turned, space.scores);
    float inverse[kQueries];
    for (int64_t r = 0; r < block.count; r++) {
      const int64_t live = block.live(r), low = live > 0 ? block.low[r] : block.from[r / kDown];
      float *line = space.scores + r * space.long_, *row = line + low;
      if (scores.softcap > 0.0f) cap(row, live, scores.softcap);
      float top = largest(row, live);
      if (scores.has_sink) {
        top = std::max(top, scores.sink);
      } else if (live == 0) {
        top = 0.0f;
      }
      double sum = sum_in_blocks(live, [=](int64_t c) { return row[c] = exp_of_negative(row[c] - top); });
      if (scores.has_sink) sum += exp_of_negative(scores.sink - top);
      if (const float* factor = mask.factors(space, seen.stop(first + r) - 1, low, live)) {
        for (int64_t c = 0; c < live; c++) row[c] *= factor[c];
      }
      // The tile has the keys of all its rows.
      std::fill(line + block.from[r / kDown], row, 0.0f);
      std::fill(row + live, line + block.upto[r / kDown], 0.0f);
      inverse[r] = live == 0 && !scores.has_sink ? 0.0f : 1.0f / static_cast<float>(sum);
      of_rows[first + r] = top;
      of_rows[s.seq + first + r] = inverse[r];
    }
    space.mix(s, block, space.scores, space.v, space.sum);
    for (int64_t r = 0; r < block.count; r++) {
      float* row = space.sum + r * space.wide;
      for (int64_t c = 0; c < s.d; c++) row[c] *= inverse[r];
      narrow(row, out.at(first + r), s.d);
    }
  }
}

// The probabilities again, from the scores; then in `d` the gradient of the scaled scores, from that of the
// probabilities and `along`, the product of dout with out. With dropout `p` gets the dropped probabilities.
inline void score_gradients(
    float* p, float* d, int64_t live, float top, float inverse, float along, const float* factor) {
  if (factor == nullptr) {
#pragma omp simd
    for (int64_t c = 0; c < live; c++) {
      p[c] = exp_of_negative(p[c] - top) * inverse;
      d[c] = p[c] * (d[c] - along);
    }
  } else {
#pragma omp simd
    for (int64_t c = 0; c < live; c++) {
      const float whole = exp_of_negative(p[c] - top) * inverse;
      p[c] = whole * factor[c];
      d[c] = whole * (d[c] * factor[c] - along);
    }
  }
}

// The same of soft-capped scores; `slope` [live] is room.
inline void capped_gradients(
    float* p, float* d, int64_t live, float top, float inverse, float along, const float* factor, float softcap,
    float* slope) {
  const float over = 1.0f / softcap;
#pragma omp simd
  for (int64_t c = 0; c < live; c++) {
    const float t = tanh_float(p[c] * over);
    p[c] = softcap * t;
    slope[c] = 1.0f - t * t;
  }
  score_gradients(p, d, live, top, inverse, along, factor);
#pragma omp simd
  for (int64_t c = 0; c < live; c++) d[c] *= slope[c];
}

// `dsink` gets the gradient of the head's sink.
template <typename T>
void backward_head(
    const mp_attention_shape& s, Space& space, const Seen& seen, const Scores& scores, const HeadMask& mask,
    const Rows<const T>& q, const Rows<const T>& dout, const Rows<const T>& out, const float* of_rows,
    const Rows<T>& dq, float* dsink) {
  std::vector<float> whole_out(space.wide), slope(scores.softcap > 0.0f ? s.keys : 0);
  double sink_gradient = 0.0;
  for (int64_t first = 0; first < s.seq; first += kQueries) {
    const Block block(s, seen, first);
    pack(q, first, block.count, block.rows, s.scale, space.q, space.wide);
    pack(dout, first, block.count, block.rows, 1.0f, space.dout, space.wide);
    space.times(s, block, space.q, space.k_turned, space.scores);
    space.times(s, block, space.dout, space.v_turned, space.dscores);
    // The last tile of keys goes on past the block's: their weights are zeros.
    const int64_t begin = block.begin / kDown * kDown, end = whole(block.end, kDown);
    for (int64_t r = 0; r < block.rows; r++) {
      const int64_t live = block.live(r), low = live > 0 ? block.low[r] : begin;
      float *p = space.scores + r * space.long_, *d = space.dscores + r * space.long_;
      if (r < block.count) {
        const float top = of_rows[first + r], inverse = of_rows[s.seq + first + r];
        const float *a = space.dout + r * space.wide, *b = row_as_floats(out.at(first + r), whole_out.data(), s.d);
        const float along = static_cast<float>(sum_in_blocks(s.d, [=](int64_t c) { return a[c] * b[c]; }));
        const float* factor = mask.factors(space, seen.stop(first + r) - 1, low, live);
        if (scores.softcap > 0.0f) {
          capped_gradients(p + low, d + low, live, top, inverse, along, factor, scores.softcap, slope.data());
        } else {
          score_gradients(p + low, d + low, live, top, inverse, along, factor);
        }
        if (scores.has_sink) sink_gradient -= exp_of_negative(scores.sink - top) * inverse * along;
      }
      std::fill(p + begin, p + low, 0.0f);
      std::fill(d + begin, d + low, 0.0f);
      std::fill(p + low + live, p + end, 0.0f);
      std::fill(d + low + live, d + end, 0.0f);
    }
    space.mix(s, block, space.dscores, space.k, space.sum);
    for (int64_t r = 0; r < block.count; r++) {
      float* row = space.sum + r * space.wide;
      for (int64_t c = 0; c < s.d; c++) row[c] *= s.scale;
      narrow(row, dq.at(first + r), s.d);
    }
    space.collect(s, block, space.scores, space.dout, space.dv);
    space.collect(s, block, space.dscores, space.q, space.dk);  // the queries carry the scale
    space.end_block(s, false);
  }
  if (dsink != nullptr) *dsink = static_cast<float>(sink_gradient);
}

bool bad(const mp_attention_shape& s, const mp_probability_mask* dropout, const mp_attention_mask* mask) {
  const bool moved = mask != nullptr && mask->end != nullptr;
  if (dropout != nullptr && (!s.causal || dropout->threshold < 1 || dropout->threshold > 65535)) return true;
  if (mask != nullptr && (!s.causal || mask->window < 0 || !(mask->softcap >= 0.0f))) return true;
  return s.seq < 0 || s.keys < 1 || s.batch < 0 || s.groups < 1 || s.per_group < 1 || s.d < 1 || s.d > 1024 ||
         (s.causal && s.seq != s.keys && !moved);
}

template <typename T>
int32_t forward(
    const mp_attention_shape& s, const T* q, const int64_t* q_strides, const T* k, const int64_t* k_strides,
    const T* v, const int64_t* v_strides, const mp_probability_mask* dropout, const mp_attention_mask* mask, T* out,
    float* rows) {
  const auto dense = dense_strides(s);
  for_heads(s, false, dropout != nullptr, [&](Space& space, int64_t sample, int64_t group) {
    pack(rows_of(k, k_strides, sample, group, s.d), 0, s.keys, space.long_, 1.0f, space.k, space.wide);
    pack(rows_of(v, v_strides, sample, group, s.d), 0, s.keys, space.long_, 1.0f, space.v, space.wide);
    transpose(space.k, space.long_, space.wide, space.k_turned);
    const Rows<const T> queries = rows_of(q, q_strides, sample, group, s.d);
    const Rows<T> to = rows_of(out, dense.data(), sample, group, s.d);
    const Seen seen(s, mask, sample);
    for (int64_t h = 0; h < s.per_group; h++) {
      const int64_t head = group * s.per_group + h;
      float* of_rows = rows + (sample * s.groups * s.per_group + head) * 2 * s.seq;
      forward_head<T>(
          s, space, seen, Scores(mask, head), HeadMask(s, dropout, sample, head), queries.moved(h * q_strides[3]),
          to.moved(h * dense[3]), of_rows);
    }
  });
  return MP_OK;
}

template <typename T>
int32_t backward(
    const mp_attention_shape& s, const T* dout, const T* q, const int64_t* q_strides, const T* k,
    const int64_t* k_strides, const T* v, const int64_t* v_strides, const T* out, const float* rows,
    const mp_probability_mask* dropout, const mp_attention_mask* mask, T* dq, const int64_t* dq_strides, T* dk,
    const int64_t* dk_strides, T* dv, const int64_t* dv_strides, float* dsinks) {
  const auto dense = dense_strides(s);
  for_heads(s, true, dropout != nullptr, [&](Space& space, int64_t sample, int64_t group) {
    pack(rows_of(k, k_strides, sample, group, s.d), 0, s.keys, space.long_, 1.0f, space.k, space.wide);
    pack(rows_of(v, v_strides, sample, group, s.d), 0, s.keys, space.long_, 1.0f, space.v, space.wide);
    transpose(space.k, space.long_, space.wide, space.k_turned);
    transpose(space.v, space.long_, space.wide, space.v_turned);
    space.clear_gradients(s);
    const Rows<const T> queries = rows_of(q, q_strides, sample, group, s.d);
    const Rows<const T> of_out = rows_of(out, dense.data(), sample, group, s.d);
    const Rows<const T> of_dout = rows_of(dout, dense.data(), sample, group, s.d);
    const Rows<T> of_dq = rows_of(dq, dq_strides, sample, group, s.d);
    const Seen seen(s, mask, sample);
    for (int64_t h = 0; h < s.per_group; h++) {
      const int64_t head = group * s.per_group + h, place = sample * s.groups * s.per_group + head;
      const bool has_sink = mask != nullptr && mask->sinks != nullptr;
      backward_head<T>(
          s, space, seen, Scores(mask, head), HeadMask(s, dropout, sample, head), queries.moved(h * q_strides[3]),
          of_dout.moved(h * dense[3]), of_out.moved(h * dense[3]), rows + place * 2 * s.seq,
          of_dq.moved(h * dq_strides[3]), has_sink ? dsinks + place : nullptr);
    }
    space.end_block(s, true);
    const auto to_k = rows_of(dk, dk_strides, sample, group, s.d), to_v = rows_of(dv, dv_strides, sample, group, s.d);
    for (int64_t row = 0; row < s.keys; row++) {
      narrow(space.dk + row * space.wide, to_k.at(row), s.d);
      narrow(space.dv + row * space.wide, to_v.at(row), s.d);
    }
  });
  return MP_OK;
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_attention_forward(
    void* stream, int32_t dtype, const mp_attention_shape* shape, const void* q, const int64_t* q_strides,
    const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides,
    const mp_probability_mask* dropout, const mp_attention_mask* mask, void* out, float* rows) {
  if (mp::bad(*shape, dropout, mask)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::forward<T>(
        *shape, static_cast<const T*>(q), q_strides, static_cast<const T*>(k), k_strides, static_cast<const T*>(v),
        v_strides, dropout, mask, static_cast<T*>(out), rows);
  });
}

extern "C" int32_t mp_attention_backward(
    void* stream, int32_t dtype, const mp_attention_shape* shape, const void* dout, const void* q,
    const int64_t* q_strides, const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides,
    const void* out, const float* rows, const mp_probability_mask* dropout, const mp_attention_mask* mask, void* dq,
    const int64_t* dq_strides, void* dk, const int64_t* dk_strides, void* dv, const int64_t* dv_strides,
    float* dsinks, float* along) {
  const bool has_sinks = mask != nullptr && mask->sinks != nullptr;
  if (mp::bad(*shape, dropout, mask) || (has_sinks && dsinks == nullptr)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::backward<T>(
        *shape, static_cast<const T*>(dout), static_cast<const T*>(q), q_strides, static_cast<const T*>(k), k_strides,
        static_cast<const T*>(v), v_strides, static_cast<const T*>(out), rows, dropout, mask, static_cast<T*>(dq),
        dq_strides, static_cast<T*>(dk), dk_strides, static_cast<T*>(dv), dv_strides, dsinks);
  });
}

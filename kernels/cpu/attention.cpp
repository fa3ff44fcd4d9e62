// Causal attention with grouped queries; include/attention.h says what it computes.
//
// A key head's keys and values are copied once into contiguous floats, padded with zeros to whole tiles, so that every
// product runs over the same dense tiles whatever the strides, sizes and dtype were. Queries are taken in blocks whose
// scores stay in the cache; the products leave out the tiles above the diagonal. Each key head of a sample is one
// thread's, with its gradients: the bits do not depend on the number of threads.
#include "attention.h"

#include <algorithm>
#include <array>
#include <limits>

#include "common.h"
#include "mask_row.h"
#include "vmath.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace mp {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
// The same in memory, where it may lie at any float.
typedef float Unaligned __attribute__((vector_size(kLanes * sizeof(float)), aligned(alignof(float)), may_alias));

constexpr int64_t kDown = 4, kAcross = 2 * kLanes;  // a tile of the result, in registers
constexpr int64_t kQueries = 32;                    // of a block

int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline Lanes load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Lanes value) { *reinterpret_cast<Unaligned*>(to) = value; }

// c [kDown, kAcross] = a b, or c += a b, over `depth`: a(i, k) at a[i * down + k * along], b(k, j) at b[k * width + j].
template <bool ADD>
inline void tile(
    const float* a, int64_t down, int64_t along, const float* b, int64_t width, int64_t depth, float* c,
    int64_t pitch) {
  Lanes left[kDown] = {}, right[kDown] = {};
  for (int64_t k = 0; k < depth; k++) {
    const Lanes b0 = load(b + k * width), b1 = load(b + k * width + kLanes);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kDown; i++) {
      const float x = a[i * down + k * along];
      left[i] += x * b0;
      right[i] += x * b1;
    }
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < kDown; i++) {
    float* to = c + i * pitch;
    store(to, ADD ? load(to) + left[i] : left[i]);
    store(to + kLanes, ADD ? load(to + kLanes) + right[i] : right[i]);
  }
}

// Where the rows of one head are.
template <typename T>
struct Rows {
  T* data;
  int64_t step, size;
  T* at(int64_t row) const { return data + row * step; }
  Rows moved(int64_t by) const { return {data + by, step, size}; }
};

template <typename T>
Rows<T> rows_of(T* data, const int64_t* strides, int64_t sample, int64_t group, int64_t d) {
  return {data + sample * strides[1] + group * strides[2], strides[0], d};
}

// Rows [from, from + count) as floats times `scale`, `pitch` apart, zeros behind them and in the rows up to `upto`.
template <typename T>
void pack(const Rows<const T>& rows, int64_t from, int64_t count, int64_t upto, float scale, float* to, int64_t pitch) {
  for (int64_t r = 0; r < count; r++, to += pitch) {
    widen(rows.at(from + r), to, rows.size);
    for (int64_t c = 0; c < rows.size; c++) to[c] *= scale;
    std::fill(to + rows.size, to + pitch, 0.0f);
  }
  std::fill(to, to + (upto - count) * pitch, 0.0f);
}

// to [cols, rows] of from [rows, cols], both multiples of 4.
void transpose(const float* from, int64_t rows, int64_t cols, float* to) {
  for (int64_t r = 0; r < rows; r += 4) {
    for (int64_t c = 0; c < cols; c += 4) {
      const float* at = from + r * cols + c;
#if defined(__SSE__)
      __m128 a = _mm_loadu_ps(at), b = _mm_loadu_ps(at + cols), d = _mm_loadu_ps(at + 2 * cols),
             e = _mm_loadu_ps(at + 3 * cols);
      _MM_TRANSPOSE4_PS(a, b, d, e);
      _mm_storeu_ps(to + c * rows + r, a);
      _mm_storeu_ps(to + (c + 1) * rows + r, b);
      _mm_storeu_ps(to + (c + 2) * rows + r, d);
      _mm_storeu_ps(to + (c + 3) * rows + r, e);
#else
      for (int64_t j = 0; j < 4; j++) {
        for (int64_t i = 0; i < 4; i++) to[(c + j) * rows + r + i] = at[i * cols + j];
      }
#endif
    }
  }
}

float largest(const float* v, int64_t n) {
  constexpr int64_t kMany = 16;
  float most[kMany];
  for (int64_t j = 0; j < kMany; j++) most[j] = -std::numeric_limits<float>::infinity();
  int64_t c = 0;
  for (; c + kMany <= n; c += kMany) {
    for (int64_t j = 0; j < kMany; j++) most[j] = v[c + j] > most[j] ? v[c + j] : most[j];
  }
  for (; c < n; c++) most[0] = v[c] > most[0] ? v[c] : most[0];
  for (int64_t j = 1; j < kMany; j++) most[0] = most[j] > most[0] ? most[j] : most[0];
  return most[0];
}

// What one thread works with. Widths are padded: `wide` of a head, `long_` of the keys, with a tile more, so that the
// rows do not fall onto the same lines of the cache where the keys are a power of two.
struct Space {
  int64_t wide, long_;
  std::vector<float> store, factor;  // factor: of a row of probabilities, where there is dropout
  MaskRow room;
  float *k, *k_turned, *v, *v_turned, *q, *dout, *scores, *dscores, *sum, *dk, *dv;

  Space(const mp_attention_shape& s, bool backward, bool masked)
      : wide(whole(s.d, kAcross)),
        long_(whole(s.keys, kAcross) + kAcross),
        factor(masked ? s.keys : 0),
        room(masked ? s.keys : 0) {
    const int64_t head = long_ * wide, block = kQueries * wide, square = kQueries * long_;
    const int64_t sizes[] = {head, head, head, backward ? head : 0, block, backward ? block : 0, square,
                             backward ? square : 0, block, backward ? head : 0, backward ? head : 0};
    float** places[] = {&k, &k_turned, &v, &v_turned, &q, &dout, &scores, &dscores, &sum, &dk, &dv};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    store.resize(total + 16);
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(store.data()) + 63) / 64 * 64);
    for (int i = 0; i < 11; i++) {
      *places[i] = at;
      at += sizes[i];
    }
  }

  // Keys that the rows up to the block's row `row`, from query `first` on, see.
  int64_t seen(const mp_attention_shape& s, int64_t first, int64_t row) const {
    return s.causal ? std::min(first + row + 1, s.keys) : s.keys;
  }

  // to [block, long_] = rows [block, wide] times the transposed keys or values, below the diagonal.
  void times(
      const mp_attention_shape& s, int64_t first, int64_t count, const float* rows, const float* turned, float* to) {
    for (int64_t r = 0; r < count; r += kDown) {
      const int64_t end = seen(s, first, r + kDown - 1);
      for (int64_t c = 0; c < end; c += kAcross) {
        tile<false>(rows + r * wide, wide, 1, turned + c, long_, s.d, to + r * long_ + c, long_);
      }
    }
  }

  // to [block, wide] = weights [block, keys] times keys or values.
  void mix(
      const mp_attention_shape& s, int64_t first, int64_t count, const float* weights, const float* rows, float* to) {
    for (int64_t r = 0; r < count; r += kDown) {
      const int64_t depth = seen(s, first, r + kDown - 1);
      for (int64_t c = 0; c < s.d; c += kAcross) {
        tile<false>(weights + r * long_, long_, 1, rows + c, wide, depth, to + r * wide + c, wide);
      }
    }
  }

  // to [keys, wide] += the transposed weights times rows [block, wide].
  void collect(
      const mp_attention_shape& s, int64_t first, int64_t count, const float* weights, const float* rows, float* to) {
    const int64_t end = seen(s, first, count - 1);
    for (int64_t j = 0; j < end; j += kDown) {
      const int64_t from = s.causal ? std::max<int64_t>(0, j - first) : 0;  // the first row that sees key j
      for (int64_t c = 0; c < s.d; c += kAcross) {
        tile<true>(
            weights + from * long_ + j, 1, long_, rows + from * wide + c, wide, count - from, to + j * wide + c, wide);
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
  // Scale or 0 of the first `live` probabilities of a row; NULL without dropout.
  const float* factors(Space& space, int64_t row, int64_t live) const {
    if (keys == nullptr) return nullptr;
    space.room.factors(keep, keys[sample], start + row * cols, live, space.factor.data());
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

template <typename T>
void forward_head(
    const mp_attention_shape& s, Space& space, const HeadMask& mask, const Rows<const T>& q, const Rows<T>& out,
    float* of_rows) {
  for (int64_t first = 0; first < s.seq; first += kQueries) {
    const int64_t count = std::min(kQueries, s.seq - first), rows = whole(count, kDown);
    pack(q, first, count, rows, s.scale, space.q, space.wide);
    space.times(s, first, rows, space.q, space.k_turned, space.scores);
    float inverse[kQueries];
    for (int64_t r = 0; r < count; r++) {
      const int64_t live = space.seen(s, first, r), end = space.seen(s, first, r / kDown * kDown + kDown - 1);
      float* row = space.scores + r * space.long_;
      const float top = largest(row, live);
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < live; c++) {
        row[c] = exp_of_negative(row[c] - top);
        sum += row[c];
      }
      if (const float* factor = mask.factors(space, first + r, live)) {
        for (int64_t c = 0; c < live; c++) row[c] *= factor[c];
      }
      std::fill(row + live, row + end, 0.0f);  // the tile goes as far as its last row does
      inverse[r] = 1.0f / sum;
      of_rows[first + r] = top;
      of_rows[s.seq + first + r] = inverse[r];
    }
    space.mix(s, first, rows, space.scores, space.v, space.sum);
    for (int64_t r = 0; r < count; r++) {
      float* row = space.sum + r * space.wide;
      for (int64_t c = 0; c < s.d; c++) row[c] *= inverse[r];
      narrow(row, out.at(first + r), s.d);
    }
  }
}

// The probabilities again, from the scores; then in `dscores` the gradient of the scaled scores, from that of the
// probabilities and `along`, the product of dout with out. With dropout `scores` gets the dropped probabilities.
inline void score_gradients(
    Space& space, int64_t r, int64_t live, int64_t end, float top, float inverse, float along, const float* factor) {
  float *p = space.scores + r * space.long_, *d = space.dscores + r * space.long_;
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
  std::fill(p + live, p + end, 0.0f);
  std::fill(d + live, d + end, 0.0f);
}

template <typename T>
void backward_head(
    const mp_attention_shape& s, Space& space, const HeadMask& mask, const Rows<const T>& q,
    const Rows<const T>& dout, const Rows<const T>& out, const float* of_rows, const Rows<T>& dq) {
  std::vector<float> whole_out(space.wide);
  for (int64_t first = 0; first < s.seq; first += kQueries) {
    const int64_t count = std::min(kQueries, s.seq - first), rows = whole(count, kDown);
    pack(q, first, count, rows, s.scale, space.q, space.wide);
    pack(dout, first, count, rows, 1.0f, space.dout, space.wide);
    space.times(s, first, rows, space.q, space.k_turned, space.scores);
    space.times(s, first, rows, space.dout, space.v_turned, space.dscores);
    for (int64_t r = 0; r < rows; r++) {
      // A last tile goes on past the block's rows: their weights are zeros.
      const int64_t end = space.seen(s, first, rows - 1), live = r < count ? space.seen(s, first, r) : 0;
      float along = 0.0f, top = 0.0f, inverse = 0.0f;
      if (r < count) {
        top = of_rows[first + r];
        inverse = of_rows[s.seq + first + r];
        const float *a = space.dout + r * space.wide, *b = row_as_floats(out.at(first + r), whole_out.data(), s.d);
#pragma omp simd reduction(+ : along)
        for (int64_t c = 0; c < s.d; c++) along += a[c] * b[c];
      }
      const float* factor = mask.factors(space, first + r, live);
      score_gradients(space, r, live, whole(end, kDown), top, inverse, along, factor);
    }
    space.mix(s, first, rows, space.dscores, space.k, space.sum);
    for (int64_t r = 0; r < count; r++) {
      float* row = space.sum + r * space.wide;
      for (int64_t c = 0; c < s.d; c++) row[c] *= s.scale;
      narrow(row, dq.at(first + r), s.d);
    }
    space.collect(s, first, count, space.scores, space.dout, space.dv);
    space.collect(s, first, count, space.dscores, space.q, space.dk);  // the queries carry the scale
  }
}

bool bad(const mp_attention_shape& s, const mp_probability_mask* mask) {
  if (mask != nullptr && (!s.causal || mask->threshold < 1 || mask->threshold > 65535)) return true;
  return s.seq < 0 || s.keys < 1 || s.batch < 0 || s.groups < 1 || s.per_group < 1 || s.d < 1 || s.d > 1024 ||
         (s.causal && s.seq != s.keys);
}

template <typename T>
int32_t forward(
    const mp_attention_shape& s, const T* q, const int64_t* q_strides, const T* k, const int64_t* k_strides,
    const T* v, const int64_t* v_strides, const mp_probability_mask* mask, T* out, float* rows) {
  const auto dense = dense_strides(s);
  for_heads(s, false, mask != nullptr, [&](Space& space, int64_t sample, int64_t group) {
    pack(rows_of(k, k_strides, sample, group, s.d), 0, s.keys, space.long_, 1.0f, space.k, space.wide);
    pack(rows_of(v, v_strides, sample, group, s.d), 0, s.keys, space.long_, 1.0f, space.v, space.wide);
    transpose(space.k, space.long_, space.wide, space.k_turned);
    const Rows<const T> queries = rows_of(q, q_strides, sample, group, s.d);
    const Rows<T> to = rows_of(out, dense.data(), sample, group, s.d);
    for (int64_t h = 0; h < s.per_group; h++) {
      float* of_rows = rows + ((sample * s.groups + group) * s.per_group + h) * 2 * s.seq;
      const HeadMask dropout(s, mask, sample, group * s.per_group + h);
      forward_head<T>(s, space, dropout, queries.moved(h * q_strides[3]), to.moved(h * dense[3]), of_rows);
    }
  });
  return MP_OK;
}

template <typename T>
int32_t backward(
    const mp_attention_shape& s, const T* dout, const T* q, const int64_t* q_strides, const T* k,
    const int64_t* k_strides, const T* v, const int64_t* v_strides, const T* out, const float* rows,
    const mp_probability_mask* mask, T* dq, const int64_t* dq_strides, T* dk, const int64_t* dk_strides, T* dv,
    const int64_t* dv_strides) {
  const auto dense = dense_strides(s);
  for_heads(s, true, mask != nullptr, [&](Space& space, int64_t sample, int64_t group) {
    pack(rows_of(k, k_strides, sample, group, s.d), 0, s.keys, space.long_, 1.0f, space.k, space.wide);
    pack(rows_of(v, v_strides, sample, group, s.d), 0, s.keys, space.long_, 1.0f, space.v, space.wide);
    transpose(space.k, space.long_, space.wide, space.k_turned);
    transpose(space.v, space.long_, space.wide, space.v_turned);
    std::fill(space.dk, space.dk + space.long_ * space.wide, 0.0f);
    std::fill(space.dv, space.dv + space.long_ * space.wide, 0.0f);
    const Rows<const T> queries = rows_of(q, q_strides, sample, group, s.d);
    const Rows<const T> of_out = rows_of(out, dense.data(), sample, group, s.d);
    const Rows<const T> of_dout = rows_of(dout, dense.data(), sample, group, s.d);
    const Rows<T> of_dq = rows_of(dq, dq_strides, sample, group, s.d);
    for (int64_t h = 0; h < s.per_group; h++) {
      const float* of_rows = rows + ((sample * s.groups + group) * s.per_group + h) * 2 * s.seq;
      const HeadMask dropout(s, mask, sample, group * s.per_group + h);
      backward_head<T>(
          s, space, dropout, queries.moved(h * q_strides[3]), of_dout.moved(h * dense[3]), of_out.moved(h * dense[3]),
          of_rows, of_dq.moved(h * dq_strides[3]));
    }
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
    const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides, const mp_probability_mask* mask,
    void* out, float* rows) {
  if (mp::bad(*shape, mask)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::forward<T>(
        *shape, static_cast<const T*>(q), q_strides, static_cast<const T*>(k), k_strides, static_cast<const T*>(v),
        v_strides, mask, static_cast<T*>(out), rows);
  });
}

extern "C" int32_t mp_attention_backward(
    void* stream, int32_t dtype, const mp_attention_shape* shape, const void* dout, const void* q,
    const int64_t* q_strides, const void* k, const int64_t* k_strides, const void* v, const int64_t* v_strides,
    const void* out, const float* rows, const mp_probability_mask* mask, void* dq, const int64_t* dq_strides, void* dk,
    const int64_t* dk_strides, void* dv, const int64_t* dv_strides) {
  if (mp::bad(*shape, mask)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::backward<T>(
        *shape, static_cast<const T*>(dout), static_cast<const T*>(q), q_strides, static_cast<const T*>(k), k_strides,
        static_cast<const T*>(v), v_strides, static_cast<const T*>(out), rows, mask, static_cast<T*>(dq), dq_strides,
        static_cast<T*>(dk), dk_strides, static_cast<T*>(dv), dv_strides);
  });
}

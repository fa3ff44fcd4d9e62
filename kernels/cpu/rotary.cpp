// Split of the fused projection with rotary embedding; include/rotary.h says what it computes.
#include "rotary.h"

#include "common.h"
#include "dropout.h"

namespace mp {
namespace {

// One head: to = from rotated by the angles of its position, by the opposite ones for sign -1; a copy without tables.
template <typename T>
inline void rotate(const T* from, T* to, const float* cos, const float* sin, float sign, int64_t half) {
  if (cos == nullptr) {
    memcpy(to, from, 2 * half * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < half; i++) {
    const float a = to_float(from[i]), b = to_float(from[i + half]), s = sign * sin[i];
    to[i] = from_float<T>(a * cos[i] - b * s);
    to[i + half] = from_float<T>(b * cos[i] + a * s);
  }
}

template <typename T>
int32_t forward(
    int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size, const T* qkv, const float* cos,
    const float* sin, T* q, T* k, T* v) {
  const int64_t half = size / 2, heads = per_group + 2;
#pragma omp parallel for schedule(static) if (seq * batch * groups * heads * size > kParallelFrom)
  for (int64_t at = 0; at < seq * batch * groups; at++) {
    const int64_t row = at / (batch * groups);
    const float *c = cos == nullptr ? nullptr : cos + row * half, *s = cos == nullptr ? nullptr : sin + row * half;
    const T* from = qkv + at * heads * size;
    for (int64_t h = 0; h < per_group; h++) {
      rotate(from + h * size, q + (at * per_group + h) * size, c, s, 1.0f, half);
    }
    rotate(from + per_group * size, k + at * size, c, s, 1.0f, half);
    memcpy(v + at * size, from + (per_group + 1) * size, size * sizeof(T));
  }
  return MP_OK;
}

template <typename T>
int32_t backward(
    int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size, const T* dq, const T* dk, const T* dv,
    const int64_t* strides, const float* cos, const float* sin, T* dqkv) {
  const int64_t half = size / 2, heads = per_group + 2;
#pragma omp parallel for schedule(static) if (seq * batch * groups * heads * size > kParallelFrom)
  for (int64_t at = 0; at < seq * batch * groups; at++) {
    const int64_t row = at / (batch * groups), b = at / groups % batch, g = at % groups;
    const float *c = cos == nullptr ? nullptr : cos + row * half, *s = cos == nullptr ? nullptr : sin + row * half;
    T* to = dqkv + at * heads * size;
    const T* from = dq + row * strides[0] + b * strides[1] + g * per_group * strides[2];
    for (int64_t h = 0; h < per_group; h++) rotate(from + h * strides[2], to + h * size, c, s, -1.0f, half);
    from = dk + row * strides[3] + b * strides[4] + g * strides[5];
    rotate(from, to + per_group * size, c, s, -1.0f, half);
    from = dv + row * strides[6] + b * strides[7] + g * strides[8];
    memcpy(to + (per_group + 1) * size, from, size * sizeof(T));
  }
  return MP_OK;
}

bool bad(int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size) {
  return seq < 0 || batch < 0 || groups < 1 || per_group < 1 || size < 2 || size > 512 || size % 2 != 0 ||
         batch * groups * (per_group + 2) > (1 << 24);
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_rotary_forward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size,
    const void* qkv, const float* cos, const float* sin, void* q, void* k, void* v) {
  if (mp::bad(seq, batch, groups, per_group, size)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::forward<T>(
        seq, batch, groups, per_group, size, static_cast<const T*>(qkv), cos, sin, static_cast<T*>(q),
        static_cast<T*>(k), static_cast<T*>(v));
  });
}

extern "C" int32_t mp_rotary_backward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size,
    const void* dq, const void* dk, const void* dv, const int64_t* strides, const float* cos, const float* sin,
    void* dqkv) {
  if (mp::bad(seq, batch, groups, per_group, size)) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::backward<T>(
        seq, batch, groups, per_group, size, static_cast<const T*>(dq), static_cast<const T*>(dk),
        static_cast<const T*>(dv), strides, cos, sin, static_cast<T*>(dqkv));
  });
}

extern "C" int64_t mp_split_workspace(int64_t rows, int64_t cols) { return mp_dropout_workspace(rows, cols); }

extern "C" int32_t mp_split_backward(
    void* stream, int32_t dtype, int64_t seq, int64_t batch, int64_t groups, int64_t per_group, int64_t size,
    const void* dq, const void* dk, const void* dv, const int64_t* strides, void* dqkv, void* dbias, float* workspace,
    int64_t* kept) {
  const int32_t code = mp_rotary_backward(
      stream, dtype, seq, batch, groups, per_group, size, dq, dk, dv, strides, nullptr, nullptr, dqkv);
  if (code != MP_OK) return code;
  // Nothing is dropped: the sums alone.
  return mp_dropout_backward(
      stream, dtype, seq, batch, groups * (per_group + 2) * size, dqkv, nullptr, 0, 0, 0, 0, 0, nullptr, dbias, workspace,
      kept);
}

// What the casts to 8 bits share: eight elements in and out, their codes, the largest magnitude of a block.
#pragma once

#include "common.cuh"
#include "fp8.h"

namespace mp {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksEach = 8;
constexpr int kEight = 8;  // elements that a thread takes at once

struct MaxBits {
  __device__ float operator()(float a, float b) const { return bits_of_float(a) > bits_of_float(b) ? a : b; }
};

__device__ inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
__device__ inline uint32_t magnitude(float x) { return bits_of_float(x) & 0x7fffffffu; }

__device__ inline uint32_t block_largest(uint32_t most, float* scratch) {
  float value[1] = {float_of_bits(most)};
  block_reduce(value, scratch, MaxBits(), 0.0f);
  return bits_of_float(value[0]);
}

// ---------------------------------------------------------------------------------------------- eight elements

template <typename T>
struct Eight {
  static constexpr int kEach = kVector<T>, kParts = kEight / kVector<T>;
  Pack<T, kEach> part[kParts];
  __device__ float value(int i) const { return part[i / kEach].value(i % kEach); }
};

// ALIGNED: all eight, from a 16-byte boundary, or none. Otherwise `live` elements one by one
// and the first again, which changes no maximum, in place of what is not there; zeros if there is none.
template <bool ALIGNED, typename T>
__device__ inline Eight<T> load_eight(const T* from, int live) {
  Eight<T> out = {};
  if (live <= 0) return out;
  if constexpr (ALIGNED) {
#pragma unroll
    for (int p = 0; p < Eight<T>::kParts; p++) out.part[p] = load<Eight<T>::kEach>(from + p * Eight<T>::kEach);
  } else {
#pragma unroll
    for (int i = 0; i < kEight; i++) {
      out.part[i / Eight<T>::kEach].set(i % Eight<T>::kEach, from[i < live ? i : 0]);
    }
  }
  return out;
}

template <typename T>
__device__ inline uint32_t largest_of(const Eight<T>& in) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kEight; i++) most = larger(most, magnitude(in.value(i)));
  return most;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
__device__ inline uint32_t hardware_pair(float low, float high, bool wide) {
  uint16_t out;
  if (wide) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  }
  return out;
}
#endif

// Codes of eight floats, the first in the lowest byte: by the hardware, which rounds pairs, from sm_89 on.
__device__ inline Pack<uint32_t, 2> encode_eight(const float (&value)[kEight], const Format& f) {
  Pack<uint32_t, 2> out;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  // The instruction ends at the largest number, e5m2 at infinity; a NaN stays one.
  float most = 0.0f;
  if (f.code == MP_E5M2) {
#pragma unroll
    for (int i = 0; i < kEight; i++) most = fmaxf(most, fabsf(value[i]));
  }
  if (f.code <= MP_E5M2 && most <= float_of_bits(f.largest)) {
    const bool wide = f.code == MP_E5M2;
#pragma unroll
    for (int w = 0; w < 2; w++) {
      out.at[w] = hardware_pair(value[4 * w], value[4 * w + 1], wide) |
                  hardware_pair(value[4 * w + 2], value[4 * w + 3], wide) << 16;
    }
    return out;
  }
#endif
#pragma unroll
  for (int w = 0; w < 2; w++) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= encode(value[4 * w + i], f) << (8 * i);
    out.at[w] = word;
  }
  return out;
}

template <typename T>
__device__ inline Pack<uint32_t, 2> cast_eight(const Eight<T>& in, float scale, const Format& f) {
  float value[kEight];
#pragma unroll
  for (int i = 0; i < kEight; i++) value[i] = in.value(i) * scale;
  return encode_eight(value, f);
}

template <bool ALIGNED>
__device__ inline void store_eight(uint8_t* to, const Pack<uint32_t, 2>& codes, int live) {
  if constexpr (ALIGNED) {
    if (live > 0) store<2>(reinterpret_cast<uint32_t*>(to), codes);
  } else {
#pragma unroll
    for (int i = 0; i < kEight; i++) {
      if (i < live) to[i] = static_cast<uint8_t>(codes.at[i / 4] >> (8 * (i % 4)));
    }
  }
}

// ---------------------------------------------------------------------------------------------- sizes, launches

__device__ inline int at_most(int64_t left, int most) { return left < most ? static_cast<int>(left) : most; }

inline bool on_sixteen(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// What training casts is bf16: it has kernels of 16-byte loads. A float matrix goes element by element.
template <typename T>
constexpr bool kFast = sizeof(T) == 2;

template <typename F>
int32_t for_input(int32_t dtype, int32_t format, int64_t rows, int64_t cols, F with) {
  Format f;
  const int64_t most = int64_t{1} << 30;
  if (rows < 1 || cols < 1 || rows > most || cols > most || !format_of(format, f)) return MP_BAD_SIZE;
  switch (dtype) {
    case MP_F32: return with(float{}, f);
    case MP_BF16: return with(bf16{}, f);
    default: return MP_BAD_DTYPE;
  }
}

}  // namespace
}  // namespace mp

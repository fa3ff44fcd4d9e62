// Matrices in 8 bits with scales; include/quantise.h says what is computed.
//
// What is transposed goes through blocks of 64 by 64 that stay in the first-level cache.
#include "quantise.h"

#include <algorithm>

#include "common.h"
#include "fp8.h"

namespace mp {
namespace {

constexpr int64_t kBlock = 64;

inline uint32_t magnitude(float x) { return bits_of_float(x) & 0x7fffffffu; }
inline uint32_t magnitude(bf16 x) { return static_cast<uint32_t>(x.bits & 0x7fffu) << 16; }

template <typename T>
inline uint32_t largest_of(const T* x, int64_t n) {
  uint32_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; i++) most = std::max(most, magnitude(x[i]));
  return most;
}

template <typename T>
inline void cast(const T* x, float scale, const Format& f, uint8_t* to, int64_t n) {
  const Format g = f;  // a copy: what is written through `to` cannot change it
#pragma omp simd
  for (int64_t i = 0; i < n; i++) to[i] = static_cast<uint8_t>(encode(to_float(x[i]) * scale, g));
}

// A block at (row, col), at most kBlock by kBlock: cast by one scale, or by that of each column.
template <typename T>
void cast_block(
    const T* x, int64_t rows, int64_t cols, int64_t row, int64_t col, float scale, const float* scales,
    const Format& f, uint8_t* values, uint8_t* transposed) {
  const int64_t height = std::min(kBlock, rows - row), width = std::min(kBlock, cols - col);
  alignas(64) uint8_t block[kBlock][kBlock];
  for (int64_t r = 0; r < height; r++) {
    const T* from = x + (row + r) * cols + col;
    if (scales == nullptr) {
      cast(from, scale, f, block[r], width);
    } else {
      const Format g = f;
#pragma omp simd
      for (int64_t c = 0; c < width; c++) {
        block[r][c] = static_cast<uint8_t>(encode(to_float(from[c]) * scales[c], g));
      }
    }
    if (values != nullptr) memcpy(values + (row + r) * cols + col, block[r], width);
  }
  for (int64_t c = 0; c < width; c++) {
    uint8_t* to = transposed + (col + c) * rows + row;
    for (int64_t r = 0; r < height; r++) to[r] = block[r][c];
  }
}

inline int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }

template <typename T>
int32_t whole(
    const Format& f, int64_t rows, int64_t cols, const T* x, const float* known, uint8_t* values, uint8_t* transposed,
    float* inverse) {
  uint32_t bits;
  if (known != nullptr) {
    bits = inverse_bits(bits_of_float(*known));
  } else {
    uint32_t most = 0;
#pragma omp parallel for schedule(static) reduction(max : most) if (rows * cols > kParallelFrom)
    for (int64_t row = 0; row < rows; row++) most = std::max(most, largest_of(x + row * cols, cols));
    bits = scale_bits(most, f);
    *inverse = float_of_bits(inverse_bits(bits));
  }
  const float scale = float_of_bits(bits);
  if (transposed == nullptr) {
#pragma omp parallel for schedule(static) if (rows * cols > kParallelFrom)
    for (int64_t row = 0; row < rows; row++) cast(x + row * cols, scale, f, values + row * cols, cols);
    return MP_OK;
  }
  const int64_t down = blocks_of(rows), across = blocks_of(cols);
#pragma omp parallel for schedule(static) if (rows * cols > kParallelFrom)
  for (int64_t block = 0; block < down * across; block++) {
    cast_block(
        x, rows, cols, block / across * kBlock, block % across * kBlock, scale, nullptr, f, values, transposed);
  }
  return MP_OK;
}

template <typename T>
int32_t by_rows(const Format& f, int64_t rows, int64_t cols, const T* x, uint8_t* values, float* inverse) {
#pragma omp parallel for schedule(static) if (rows * cols > kParallelFrom)
  for (int64_t row = 0; row < rows; row++) {
    const uint32_t bits = scale_bits(largest_of(x + row * cols, cols), f);
    inverse[row] = float_of_bits(inverse_bits(bits));
    cast(x + row * cols, float_of_bits(bits), f, values + row * cols, cols);
  }
  return MP_OK;
}

template <typename T>
int32_t by_columns(const Format& f, int64_t rows, int64_t cols, const T* x, uint8_t* transposed, float* inverse) {
#pragma omp parallel for schedule(static) if (rows * cols > kParallelFrom)
  for (int64_t strip = 0; strip < blocks_of(cols); strip++) {
    const int64_t col = strip * kBlock, width = std::min(kBlock, cols - col);
    alignas(64) uint32_t most[kBlock] = {};
    alignas(64) float scales[kBlock];
    for (int64_t row = 0; row < rows; row++) {
      const T* from = x + row * cols + col;
#pragma omp simd
      for (int64_t c = 0; c < width; c++) most[c] = std::max(most[c], magnitude(from[c]));
    }
    for (int64_t c = 0; c < width; c++) {
      const uint32_t bits = scale_bits(most[c], f);
      scales[c] = float_of_bits(bits);
      inverse[col + c] = float_of_bits(inverse_bits(bits));
    }
    for (int64_t row = 0; row < rows; row += kBlock) {
      cast_block(x, rows, cols, row, col, 0.0f, scales, f, nullptr, transposed);
    }
  }
  return MP_OK;
}

template <typename F>
int32_t for_input(int32_t dtype, int32_t format, int64_t rows, int64_t cols, F with) {
  Format f;
  if (rows < 1 || cols < 1 || !format_of(format, f)) return MP_BAD_SIZE;
  switch (dtype) {
    case MP_F32: return with(float{}, f);
    case MP_BF16: return with(bf16{}, f);
    default: return MP_BAD_DTYPE;
  }
}

}  // namespace
}  // namespace mp

extern "C" int64_t mp_fp8_tensor_workspace(int64_t rows, int64_t cols) { return 0; }
extern "C" int64_t mp_fp8_columns_workspace(int64_t rows, int64_t cols) { return 0; }

extern "C" int32_t mp_fp8_tensor(
    void* stream, int32_t dtype, int32_t format, int64_t rows, int64_t cols, const void* x, const float* known,
    void* values, void* transposed, float* inverse, float* workspace) {
  if (values == nullptr && transposed == nullptr) return MP_BAD_SIZE;
  return mp::for_input(dtype, format, rows, cols, [&](auto zero, const mp::Format& f) {
    using T = decltype(zero);
    return mp::whole<T>(
        f, rows, cols, static_cast<const T*>(x), known, static_cast<uint8_t*>(values),
        static_cast<uint8_t*>(transposed), inverse);
  });
}

extern "C" int32_t mp_fp8_rows(
    void* stream, int32_t dtype, int32_t format, int64_t rows, int64_t cols, const void* x, void* values,
    float* inverse) {
  return mp::for_input(dtype, format, rows, cols, [&](auto zero, const mp::Format& f) {
    using T = decltype(zero);
    return mp::by_rows<T>(f, rows, cols, static_cast<const T*>(x), static_cast<uint8_t*>(values), inverse);
  });
}

extern "C" int32_t mp_fp8_columns(
    void* stream, int32_t dtype, int32_t format, int64_t rows, int64_t cols, const void* x, void* transposed,
    float* inverse, float* workspace) {
  return mp::for_input(dtype, format, rows, cols, [&](auto zero, const mp::Format& f) {
    using T = decltype(zero);
    return mp::by_columns<T>(f, rows, cols, static_cast<const T*>(x), static_cast<uint8_t*>(transposed), inverse);
  });
}

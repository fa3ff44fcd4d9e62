// Hashes of memory by rows; include/row_hashes.h says what is computed. A thread takes whole rows.
#include "row_hashes.h"

#include <algorithm>
#include <limits>

#include "common.h"

namespace mp {
namespace {

// Rows from which on splitting the factors pays. AVX-512 has a product of 64 bits.
#if defined(__AVX512DQ__)
constexpr int64_t kRowsToSplit = std::numeric_limits<int64_t>::max();
#else
constexpr int64_t kRowsToSplit = 4;
#endif

// Factors as low + 2^32 high, low signed: of a product of 64 bits modulo 2^64 remain one of 32 x 32 signed bits and one
// modulo 2^32. Vectors below AVX-512 have both.
struct Factors {
  int32_t low[MP_HASH_ROW];
  uint32_t high[MP_HASH_ROW];

  explicit Factors(const int64_t* factors) {
    for (int64_t i = 0; i < MP_HASH_ROW; i++) {
      low[i] = static_cast<int32_t>(static_cast<uint64_t>(factors[i]));
      const uint64_t rest = static_cast<uint64_t>(factors[i]) - static_cast<uint64_t>(static_cast<int64_t>(low[i]));
      high[i] = static_cast<uint32_t>(rest >> 32);
    }
  }
};

template <typename W>
uint64_t hash_row(const W* from, const Factors& factors, int64_t count) {
  uint32_t upper = 0;
  const int32_t* low = factors.low;
  const uint32_t* high = factors.high;
  uint64_t total = 0;
#pragma omp simd reduction(+ : total, upper)
  for (int64_t i = 0; i < count; i++) {
    const int32_t word = from[i];
    total += static_cast<uint64_t>(static_cast<int64_t>(word) * low[i]);
    upper += static_cast<uint32_t>(word) * high[i];
  }
  return total + (static_cast<uint64_t>(upper) << 32);
}

// Of so few rows that splitting the factors would take longer.
template <typename W>
uint64_t hash_whole(const W* from, const int64_t* factors, int64_t count) {
  uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; i++) {
    sum += static_cast<uint64_t>(static_cast<int64_t>(from[i])) * static_cast<uint64_t>(factors[i]);
  }
  return sum;
}

template <typename W>
int32_t hash(int64_t words, const W* data, const int64_t* factors, int64_t* out) {
  const int64_t rows = (words + MP_HASH_ROW - 1) / MP_HASH_ROW;
  if (rows < kRowsToSplit) {
    for (int64_t at = 0; at < words; at += MP_HASH_ROW) {
      *out++ = static_cast<int64_t>(hash_whole(data + at, factors, std::min<int64_t>(words - at, MP_HASH_ROW)));
    }
    return MP_OK;
  }
  const Factors split(factors);
#pragma omp parallel for schedule(static) if (words > kParallelFrom)
  for (int64_t row = 0; row < rows; row++) {
    const int64_t count = std::min<int64_t>(words - row * MP_HASH_ROW, MP_HASH_ROW);
    out[row] = static_cast<int64_t>(hash_row(data + row * MP_HASH_ROW, split, count));
  }
  return MP_OK;
}

}  // namespace
}  // namespace mp

extern "C" int32_t mp_row_hashes(
    void*, int32_t size, int64_t words, const void* data, const int64_t* factors, int64_t* out) {
  if (words < 1) return MP_BAD_SIZE;
  switch (size) {
    case 1: return mp::hash(words, static_cast<const int8_t*>(data), factors, out);
    case 2: return mp::hash(words, static_cast<const int16_t*>(data), factors, out);
    case 4: return mp::hash(words, static_cast<const int32_t*>(data), factors, out);
    default: return MP_BAD_SIZE;
  }
}

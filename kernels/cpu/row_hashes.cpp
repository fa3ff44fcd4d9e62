// Hashes of memory by rows; include/row_hashes.h says what is computed. A thread takes whole rows.
#include "row_hashes.h"

#include <algorithm>

#include "common.h"

namespace mp {
namespace {

template <typename W>
int32_t hash(int64_t words, const W* data, const int64_t* factors, int64_t* out) {
  const int64_t rows = (words + MP_HASH_ROW - 1) / MP_HASH_ROW;
#pragma omp parallel for schedule(static) if (words > kParallelFrom)
  for (int64_t row = 0; row < rows; row++) {
    const W* from = data + row * MP_HASH_ROW;
    const int64_t count = std::min<int64_t>(words - row * MP_HASH_ROW, MP_HASH_ROW);
    uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
      sum += static_cast<uint64_t>(static_cast<int64_t>(from[i])) * static_cast<uint64_t>(factors[i]);
    }
    out[row] = static_cast<int64_t>(sum);
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

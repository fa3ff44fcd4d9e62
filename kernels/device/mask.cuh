// Dropout factors of vectors of elements from counters; include/counter.h has the rule of an element.
#pragma once

#include "common.cuh"
#include "counter.h"

namespace mp {

// Scale or 0 of N elements, N a multiple of 4, from the first of a group of four on. `scaled`: its position / 4 *
// kGolden.
template <int N>
__device__ inline void keep_factors(const Keep& keep, uint64_t key, uint64_t scaled, float (&factor)[N]) {
  const uint32_t threshold = keep.threshold << 16;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const uint64_t bits = random_bits(scaled, key, keep.op);
    scaled += kGolden;
    const uint32_t low = static_cast<uint32_t>(bits), high = static_cast<uint32_t>(bits >> 32);
    // The upper field needs no extraction: what stands below it cannot reach the threshold's lowest bit.
    factor[i] = (low << 16) >= threshold ? keep.scale : 0.0f;
    factor[i + 1] = low >= threshold ? keep.scale : 0.0f;
    factor[i + 2] = (high << 16) >= threshold ? keep.scale : 0.0f;
    factor[i + 3] = high >= threshold ? keep.scale : 0.0f;
  }
}

// The random fields of four neighbours from `position` on, 16 bits each from the low end, wherever they stand in their
// groups of four: shift = position % 4, and scaled = position / 4 * kGolden.
__device__ inline uint64_t four_fields(const Keep& keep, uint64_t key, uint64_t scaled, int shift) {
  const uint64_t bits = random_bits(scaled, key, keep.op);
  if (shift == 0) return bits;
  return bits >> (16 * shift) | random_bits(scaled + kGolden, key, keep.op) << (64 - 16 * shift);
}

// Whether each of four neighbours is kept.
__device__ inline void four_kept(uint64_t fields, uint32_t threshold, bool (&kept)[4]) {
  const uint32_t low = static_cast<uint32_t>(fields), high = static_cast<uint32_t>(fields >> 32);
  const uint32_t least = threshold << 16;  // what stands below an upper field cannot reach its lowest bit
  kept[0] = (low << 16) >= least;
  kept[1] = low >= least;
  kept[2] = (high << 16) >= least;
  kept[3] = high >= least;
}

// The mask of rows [seq, batch, cols] that are whole in their sample.
struct RowMask {
  const int64_t* keys;
  Keep keep;
  int64_t seq_offset;
  int batch;
};

// Scale or 0 of N elements of a row from `column` on, N, cols and column multiples of 4. Rows: fewer than 2^31.
template <int N>
__device__ inline void row_factors(const RowMask& mask, int64_t row, int cols, int column, float (&factor)[N]) {
  const uint32_t seq = static_cast<uint32_t>(row) / static_cast<uint32_t>(mask.batch);
  const uint32_t sample = static_cast<uint32_t>(row) - seq * static_cast<uint32_t>(mask.batch);
  const int64_t position = (seq + mask.seq_offset) * cols + column;
  keep_factors<N>(
      mask.keep, static_cast<uint64_t>(mask.keys[sample]), static_cast<uint64_t>(position >> 2) * kGolden, factor);
}

}  // namespace mp

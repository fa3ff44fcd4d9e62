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

}  // namespace mp

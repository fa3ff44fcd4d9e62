// Rows of dropout factors from counters; include/counter.h has the rule of an element.
#pragma once

#include "common.h"
#include "counter.h"

namespace mp {

// Makes the factors of a row; one object a thread, with room for rows of up to `cols` elements.
class MaskRow {
 public:
  explicit MaskRow(int64_t cols) : bits_(cols / 4 + 2), fields_(4 * bits_.size()) {}

  // Scale or 0 of `cols` elements from position `start` of the sample with this key on.
  void factors(const Keep& keep, int64_t key, int64_t start, int64_t cols, float* factor) {
    const int64_t before = start & 3, groups = (before + cols + 3) / 4;
    const uint64_t first = static_cast<uint64_t>(start >> 2);
    for (int64_t g = 0; g < groups; g++) {
      bits_[g] = random_bits((first + static_cast<uint64_t>(g)) * kGolden, static_cast<uint64_t>(key), keep.op);
    }
    memcpy(fields_.data(), bits_.data(), groups * sizeof(uint64_t));  // little-endian: the fields lie in order
    const uint16_t* field = fields_.data() + before;
    const uint16_t threshold = static_cast<uint16_t>(keep.threshold);
    for (int64_t c = 0; c < cols; c++) factor[c] = field[c] >= threshold ? keep.scale : 0.0f;
  }

 private:
  std::vector<uint64_t> bits_;
  std::vector<uint16_t> fields_;
};

}  // namespace mp

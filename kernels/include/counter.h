// 64 random bits of a (counter, keys), for device and CPU sources: bit for bit what core/dist/counter.py's random_bits
// gives. The mixer is of SplitMix64's kind (Steele, Lea & Flood, OOPSLA 2014). Little-endian machines only.
#pragma once

#include <stdint.h>

#include "both.h"

namespace mp {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr uint64_t kMix1 = 0xBF58476D1CE4E5B9u;
constexpr uint64_t kMix2 = 0x94D049BB133111EBu;

// What random_bits takes for its second key: a shift distributes over xor, so the key's share of a round is made once.
MP_BOTH inline uint64_t folded_key(int64_t key2) {
  const uint64_t k = static_cast<uint64_t>(key2);
  return k ^ (k >> 27);
}

// `scaled`: counter * kGolden; neighbouring counters then cost an addition each.
MP_BOTH inline uint64_t random_bits(uint64_t scaled, uint64_t key, uint64_t folded_key2) {
  uint64_t z = scaled + key;
  z = (z ^ (z >> 30)) * kMix1;
  z = (z ^ (z >> 27) ^ folded_key2) * kMix2;
  z ^= z >> 31;
  z = (z ^ (z >> 29)) * kMix1;
  return z ^ (z >> 32);
}

// What decides of every dropout mask which elements are kept.
struct Keep {
  uint64_t op;         // folded
  uint32_t threshold;  // 0 to 65535
  float scale;         // of what is kept
};

MP_BOTH inline Keep keep_of(int64_t op_key, int32_t threshold) {
  return Keep{folded_key(op_key), static_cast<uint32_t>(threshold), 65536.0f / (65536 - threshold)};
}

// Scale or 0 of the element at a position of its sample: one hash serves four neighbours, 16 bits each from the low end.
MP_BOTH inline float keep_factor(const Keep& keep, uint64_t key, int64_t position) {
  const uint64_t bits = random_bits(static_cast<uint64_t>(position >> 2) * kGolden, key, keep.op);
  return (static_cast<uint32_t>(bits >> (16 * (position & 3))) & 0xffffu) >= keep.threshold ? keep.scale : 0.0f;
}

}  // namespace mp

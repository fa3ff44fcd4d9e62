// The slots of partial sums that kernels leave: summed at once, or kept for mp_add_slots.
#pragma once

#include "common.cuh"

namespace mp {

// As sum_slots, or where `kept` is given only the number of slots goes there: see mp.h.
template <typename T>
inline int32_t finish_slots(
    void* stream, const float* partial, int64_t slots, int cols, int64_t* kept, void* out, void* second = nullptr,
    void* third = nullptr) {
  if (kept == nullptr) return sum_slots<T>(stream, partial, slots, cols, out, second, third);
  *kept = slots;
  return MP_OK;
}

// The sum over slots of a column that a lane reads from, in the order of sum_slots; the first warp has it. scratch:
// shared, a float a thread of a block of kSumThreads.
__device__ inline float slot_sum(const float* from, int slots, int stride, bool live, float* scratch) {
  constexpr int kMost = kSumThreads / MP_WARP;
  const int lane = threadIdx.x % MP_WARP, warp = threadIdx.x / MP_WARP, warps = slots < kMost ? slots : kMost;
  float sum = 0.0f;
  if (live) {
#pragma unroll 8
    for (int slot = warp; slot < slots; slot += warps) sum += from[static_cast<int64_t>(slot) * stride];
  }
  scratch[threadIdx.x] = sum;
  __syncthreads();
  if (warp == 0) {
    for (int w = 1; w < warps; w++) sum += scratch[w * MP_WARP + lane];
  }
  return sum;
}

}  // namespace mp

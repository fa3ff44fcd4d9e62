// Pieces of 16 bytes that a thread has copied to its own place in shared memory while it works on others: they wait for
// no register. NVIDIA's, from sm_80 on (cp.async); AMD's GPUs, which have registers to spare, load when they need a piece.
// The emulator does one with 32 lanes and the other with 64.
#pragma once

#include "shared.cuh"

#if defined(__HIP_PLATFORM_AMD__) || (defined(MP_EMULATOR) && MP_WARP == 64)
#define MP_NO_COPIES_AHEAD
#endif

namespace mp {

#ifdef MP_NO_COPIES_AHEAD
constexpr bool kCopiesAhead = false;
#else
constexpr bool kCopiesAhead = true;
#endif

// Starts a copy of 16 bytes to shared memory; zeros where `there` is false, and nothing is read. The place is the
// thread's own, and what it held must have been read before the block's last barrier, or the last reads_done().
__device__ inline void copy_ahead(void* place, const void* from, bool there) {
#ifdef MP_EMULATOR
  emulator::copy_ahead(place, from, there);
#elif !defined(MP_NO_COPIES_AHEAD)
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(place)), bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#endif
}

// Waits until all copies that this thread started are there.
__device__ inline void copies_arrived() {
#ifdef MP_EMULATOR
  emulator::copies_arrived();
#elif !defined(MP_NO_COPIES_AHEAD)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Orders what the lanes of a warp have read before the copies that they start next. PTX does not order a thread's own
// read before its later copy to the same place; for several warps the barrier between does.
__device__ inline void reads_done() {
#ifdef MP_EMULATOR
  emulator::reads_done();
#elif !defined(MP_NO_COPIES_AHEAD)
  __syncwarp();
#endif
}

// KINDS tensors' pieces of a row, PIECES of each a thread.
template <typename T, int N, int KINDS, int PIECES>
struct Ahead {
  static constexpr int64_t kBytes = kCopiesAhead ? KINDS * PIECES * 16 : 0;  // of a thread
  Pack<T, N>* mine = reinterpret_cast<Pack<T, N>*>(dynamic_shared()) + threadIdx.x;

  // Starts the copy of a piece.
  __device__ void start(int kind, int piece, const T* from, bool there) const {
    if (kCopiesAhead) copy_ahead(mine + (kind * PIECES + piece) * blockDim.x, from, there);
  }
  // The piece, which has arrived.
  __device__ Pack<T, N> take(int kind, int piece, const T* from, bool there) const {
    if (kCopiesAhead) {
      const Pack<T, N>* place = mine + (kind * PIECES + piece) * blockDim.x;
#ifdef MP_EMULATOR
      emulator::read_copy(place);
#endif
      return *place;
    }
    return there ? load<N>(from) : Pack<T, N>{};
  }
};

}  // namespace mp

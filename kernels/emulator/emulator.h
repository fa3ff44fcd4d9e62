// Runs device sources on a CPU: a block's threads are fibers, warps have MP_WARP lanes (32 or 64).
//
// Blocks run one after another, so __shared__ is a static. Barriers and shuffles switch fibers. What it finds, with no
// GPU: a warp size that is written as a number, a shuffle or barrier that not all threads reach (it stops and says so),
// misaligned vector access, reads of what another thread has not written yet (fibers run out of step on purpose, in
// rotating order; a warp may leave a barrier late), reads of a copy ahead that was not awaited, copies over what was read
// with no barrier since. What it does not find: other races inside a warp between barriers, and anything about speed.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static
// What every thread calls all the time, whatever the level of optimisation.
#define MP_INLINE __attribute__((always_inline)) inline

struct dim3 {
  unsigned x, y, z;
};

namespace emulator {

[[noreturn]] inline void stop(const char* what) {
  fprintf(stderr, "emulator: %s\n", what);
  fflush(stderr);
  abort();
}

[[noreturn]] inline void bad_index(const char* what, int64_t index, int64_t least, int64_t end) {
  char text[256];
  snprintf(text, sizeof(text), "%s %lld is not from %lld to %lld", what, static_cast<long long>(index),
           static_cast<long long>(least), static_cast<long long>(end - 1));
  stop(text);
}

MP_INLINE void check_aligned(const void* pointer, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes) stop("misaligned vector access");
}

constexpr int kSharedBytes = 232448;  // of sm_90

// One block at a time: all of its dynamic shared memory, with what the last block left.
inline float* dynamic_shared() {
  alignas(16) static float memory[kSharedBytes / sizeof(float)];
  return memory;
}

struct Barrier {
  int arrived = 0;
  int generation = 0;
};

struct Warp {
  Barrier barrier;
  int alive = 0;
  uint64_t slot[2][64];
  uint32_t registers[2][64][8];  // of instructions that all lanes of a warp carry out together (matrix.h)
  int exchange[64] = {};
};

// A copy that a thread has started and not awaited.
struct Copy {
  void* to;
  const void* from;
  bool there;
};

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  std::vector<char> stack;
  std::vector<Copy> copies;
  std::vector<const void*> copies_read;  // since the last barrier: places of copies
  bool started = false, done = false;
};

constexpr size_t kStack = 128 << 10;

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  int alive = 0, lanes = 32;
  int current = 0;
  unsigned block = 0, blocks = 0, threads = 0;
  long waits = 0;  // switches since anything moved on
  std::function<void()> body;
  jmp_buf scheduler;
};

inline Block running;

MP_INLINE Block& state() { return running; }

// What a fiber does all its life: its thread's part of one block after another.
inline void enter() {
  Block& b = state();
  for (;;) {
    b.body();
    Fiber& f = b.fibers[b.current];
    if (!f.copies.empty()) stop("a thread ends before its copies have arrived");
    f.copies_read.clear();
    f.done = true;
    b.alive--;
    b.warps[b.current / b.lanes].alive--;
    b.waits = 0;
    if (_setjmp(f.at) == 0) _longjmp(b.scheduler, 1);
  }
}

// Back to the scheduler, which runs the next fiber that is not done.
inline void yield() {
  Block& b = state();
  if (++b.waits > 4L * static_cast<long>(b.threads) + 8) {
    stop("a barrier or shuffle that some threads of its block or warp never reach");
  }
  Fiber& f = b.fibers[b.current];
  if (_setjmp(f.at) == 0) _longjmp(b.scheduler, 1);
}

inline void wait(Barrier& barrier, const int& expected) {
  Block& b = state();
  const int generation = barrier.generation;
  barrier.arrived++;
  for (;;) {
    if (barrier.generation != generation) return;
    if (barrier.arrived >= expected) {
      barrier.arrived = 0;
      barrier.generation++;
      b.waits = 0;
      return;
    }
    yield();
  }
}

inline void resume(int index) {
  Block& b = state();
  Fiber& f = b.fibers[index];
  b.current = index;
  if (_setjmp(b.scheduler) != 0) return;
  if (f.started) _longjmp(f.at, 1);
  f.started = true;
  setcontext(&f.start);
}

inline int run(unsigned blocks, unsigned threads, int lanes, std::function<void()> body) {
  if (threads == 0 || threads > 1024 || threads % lanes) {
    stop("a block is not made of whole warps, at most 1024 threads");
  }
  Block& b = state();
  b.lanes = lanes;
  b.blocks = blocks;
  b.threads = threads;
  b.body = std::move(body);
  if (b.fibers.size() < threads) b.fibers.resize(threads);
  for (unsigned block = 0; block < blocks; block++) {
    b.block = block;
    b.alive = static_cast<int>(threads);
    b.barrier = Barrier{};
    b.warps.assign(threads / lanes, Warp{});
    b.waits = 0;
    for (Warp& w : b.warps) w.alive = lanes;
    for (unsigned t = 0; t < threads; t++) {
      Fiber& f = b.fibers[t];
      f.done = false;
      if (f.started) continue;  // it waits for its next block
      f.stack.resize(kStack);
      getcontext(&f.start);
      f.start.uc_stack.ss_sp = f.stack.data();
      f.start.uc_stack.ss_size = kStack;
      f.start.uc_link = nullptr;
      makecontext(&f.start, enter, 0);
    }
    // Backwards and forwards in turn: no order between threads can be relied on.
    for (bool forward = false; b.alive > 0; forward = !forward) {
      for (unsigned i = 0; i < threads; i++) {
        const unsigned t = forward ? i : threads - 1 - i;
        if (!b.fibers[t].done) resume(static_cast<int>(t));
      }
    }
  }
  return 0;
}

// What the host side of a source asks of a device; another machine that runs kernels this way has its own (MP_GHOST).
#ifndef MP_GHOST
inline int multiprocessors() { return 3; }

template <typename... P>
inline int launch(void (*kernel)(P...), unsigned blocks, unsigned threads, void*, P... arguments) {
  return run(blocks, threads, MP_WARP, [&] { kernel(arguments...); });
}
#endif

template <typename T>
MP_INLINE T exchange(T value, int source_lane) {
  static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
  Block& b = state();
  const int lane = b.current % b.lanes;
  Warp& w = b.warps[b.current / b.lanes];
  // Two slots in turn: a lane can be one exchange ahead of another, never two.
  const int side = w.exchange[lane]++ & 1;
  memcpy(&w.slot[side][lane], &value, sizeof(T));
  wait(w.barrier, w.alive);
  T out;
  memcpy(&out, &w.slot[side][source_lane], sizeof(T));
  return out;
}

inline void read_copy(const void* place) { state().fibers[state().current].copies_read.push_back(place); }

inline void reads_done() { state().fibers[state().current].copies_read.clear(); }

// Until it has arrived, the place of a copy is unreadable: NaN. It stays so where the thread has read what was there since
// the last barrier, as the read may have got the new value.
inline void copy_ahead(void* to, const void* from, bool there) {
  check_aligned(to, 16);
  if (there) check_aligned(from, 16);
  memset(to, 0xff, 16);
  Fiber& f = state().fibers[state().current];
  for (const void* read : f.copies_read) {
    if (read == to) return;
  }
  f.copies.push_back({to, from, there});
}

inline void copies_arrived() {
  Block& b = state();
  std::vector<Copy>& copies = b.fibers[b.current].copies;
  for (const Copy& c : copies) {
    if (c.there) {
      memcpy(c.to, c.from, 16);
    } else {
      memset(c.to, 0, 16);
    }
  }
  copies.clear();
}

// `mine` of every lane, [lanes][8], the first N of which are set; valid until this warp's next exchange but one.
template <int N>
inline const uint32_t (*exchange_registers(const uint32_t (&mine)[N]))[8] {
  static_assert(N <= 8, "more registers than a slot has");
  Block& b = state();
  const int lane = b.current % b.lanes;
  Warp& w = b.warps[b.current / b.lanes];
  const int side = w.exchange[lane]++ & 1;
  memcpy(w.registers[side][lane], mine, sizeof(mine));
  wait(w.barrier, w.alive);
  return w.registers[side];
}

struct Index {
  struct Thread {
    MP_INLINE operator unsigned() const { return static_cast<unsigned>(state().current); }
  } x;
};
struct BlockIndex {
  struct Value {
    MP_INLINE operator unsigned() const { return state().block; }
  } x;
};
struct BlockSize {
  struct Value {
    MP_INLINE operator unsigned() const { return state().threads; }
  } x;
};
struct GridSize {
  struct Value {
    MP_INLINE operator unsigned() const { return state().blocks; }
  } x;
};

}  // namespace emulator

static const emulator::Index threadIdx;
static const emulator::BlockIndex blockIdx;
static const emulator::BlockSize blockDim;
static const emulator::GridSize gridDim;

inline void __syncthreads() {
  emulator::Block& b = emulator::state();
  emulator::reads_done();
  emulator::wait(b.barrier, b.alive);
  // Of some barriers one warp comes late, when the others have written what they write next.
  const int generation = b.barrier.generation, number = generation / 8 + static_cast<int>(b.block);
  if (generation % 8 % 3 == 1 && b.current / b.lanes == number % static_cast<int>(b.warps.size())) {
    for (int i = 0; i < 12; i++) {
      b.waits = 0;
      emulator::yield();
    }
  }
}

template <typename T>
MP_INLINE T __shfl_xor(T value, int mask) {
  return emulator::exchange(value, (emulator::state().current % emulator::state().lanes) ^ mask);
}

template <typename T>
MP_INLINE T __shfl(T value, int lane) {
  return emulator::exchange(value, lane);
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }

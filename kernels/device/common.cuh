// What every device source shares: number types, vector loads, reductions, launches.
//
// No header of torch, cub or cuda_bf16: the same text compiles with nvcc, after hipify with hipcc (whose older
// versions lack hip_bf16 and the _sync shuffles), and with g++ against emulator/emulator.h.
#pragma once

#ifdef MP_EMULATOR
#include "emulator.h"
#else
#include <cuda_runtime.h>
#endif

#include "mp.h"
#include "number.h"

// Lanes of a warp, for host and device code alike: ROCm 7 made warpSize no constant. The build sets 64 for gfx9.
#ifndef MP_WARP
#define MP_WARP 32
#endif

// Of a type whose memory is read as another type too. g++ does not take it here; the emulator is built without
// -fstrict-aliasing.
#ifdef __clang__
#define MP_MAY_ALIAS __attribute__((may_alias))
#else
#define MP_MAY_ALIAS
#endif

namespace mp {

constexpr int kMaxWarps = 1024 / MP_WARP;

// ---------------------------------------------------------------------------------------------- number types

template <typename T>
inline constexpr bool is_bf16 = false;
template <>
inline constexpr bool is_bf16<bf16> = true;
template <typename T>
inline constexpr bool is_f16 = false;
template <>
inline constexpr bool is_f16<f16> = true;

__device__ inline float to_float(f16 x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
  return out;
#else
  union {
    uint16_t u;
    _Float16 h;
  } both;
  both.u = x.bits;
  return static_cast<float>(both.h);
#endif
}

template <typename T>
__device__ inline T from_float(float x);

template <>
__device__ inline float from_float<float>(float x) {
  return x;
}

template <>
__device__ inline bf16 from_float<bf16>(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  bf16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
  return out;
#else
  return bf16_of_float(x);
#endif
}

template <>
__device__ inline f16 from_float<f16>(float x) {
#if defined(__CUDA_ARCH__)
  f16 out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
  return out;
#else
  union {
    _Float16 h;
    uint16_t u;
  } both;
  both.h = static_cast<_Float16>(x);
  return f16{both.u};
#endif
}

// The value that a tensor of T would hold: what a separate kernel would have read back.
template <typename T>
__device__ inline float rounded(float x) {
  return to_float(from_float<T>(x));
}

// 2^x to 2 ulp; subnormal results may be 0.
__device__ inline float power_of_2(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#elif defined(__HIP_DEVICE_COMPILE__)
#if __has_builtin(__builtin_amdgcn_exp2f)
  return __builtin_amdgcn_exp2f(x);
#else
  return __builtin_exp2f(x);  // v_exp_f32 alone, in the compilers before that builtin
#endif
#else
  return exp2f(x);
#endif
}

// The same for x ≤ 0, where a CPU need not look for infinity.
__device__ inline float power_of_2_of_negative(float x) { return power_of_2(x); }

// 1 / x to 1 ulp; subnormal results may be 0.
__device__ inline float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#elif defined(__HIP_DEVICE_COMPILE__)
  return __builtin_amdgcn_rcpf(x);
#else
  return 1.0f / x;
#endif
}

// e^x likewise: what is rounded to half precision, or summed over a vocabulary, needs no more.
__device__ inline float fast_exp(float x) { return power_of_2(kLog2E * x); }

// A product that is rounded before anything is added to it or subtracted from it, on any compiler.
__device__ inline float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#elif defined(__clang__)
#pragma clang fp contract(off)
  return a * b;
#else
  return a * b;
#endif
}

// a * b + c, rounded once on a GPU, so that two kernels that compute the same have the same bits: compilers choose by
// what stands around an expression. Not on a CPU, whose own kernels round twice.
__device__ inline float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

__device__ inline float minus_infinity() { return float_of_bits(0xff800000u); }

// ---------------------------------------------------------------------------------------------- vector loads

// Elements of T in 16 bytes, the widest load of a lane.
template <typename T>
constexpr int kVector = 16 / sizeof(T);

// One of two halves of a word.
template <typename T>
__device__ inline float half_of(uint32_t word, bool upper) {
  if constexpr (is_bf16<T>) {
    return float_of_bits(upper ? word & 0xffff0000u : word << 16);
  } else {
    return to_float(T{static_cast<uint16_t>(upper ? word >> 16 : word)});
  }
}

template <bool HALVES, typename T>
struct WordOf {
  using type = T;
};
template <typename T>
struct WordOf<true, T> {
  using type = uint32_t;
};

// Pairs of halves are kept as words: nvcc splits an array of 16-bit numbers up, which takes an instruction for each, and
// another where a condition stands around its load. The memory holds halves, so compilers have to be told that words may
// be the same memory.
template <typename T, int N>
struct alignas(sizeof(T) * N) MP_MAY_ALIAS Pack {
  static constexpr bool kHalves = (is_bf16<T> || is_f16<T>) && N % 2 == 0;
  typename WordOf<kHalves, T>::type at[kHalves ? N / 2 : N];

  __device__ float value(int i) const {
    if constexpr (kHalves) {
      return half_of<T>(at[i / 2], i % 2 != 0);
    } else {
      return to_float(at[i]);
    }
  }
  __device__ void set(int i, T x) {
    if constexpr (kHalves) {
      const uint32_t bits = x.bits;
      at[i / 2] = i % 2 != 0 ? (at[i / 2] & 0xffffu) | bits << 16 : (at[i / 2] & 0xffff0000u) | bits;
    } else {
      at[i] = x;
    }
  }
};

template <int N, typename T>
__device__ inline Pack<T, N> load(const T* from) {
#ifdef MP_EMULATOR
  emulator::check_aligned(from, sizeof(T) * N);
#endif
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <int N, typename T>
__device__ inline void store(T* to, const Pack<T, N>& pack) {
#ifdef MP_EMULATOR
  emulator::check_aligned(to, sizeof(T) * N);
#endif
#if defined(__CUDA_ARCH__)
  // As one word: of elements chosen by a condition nvcc else makes a store each.
  if constexpr (sizeof(pack) == 16) {
    uint4 word;
    memcpy(&word, &pack, sizeof(word));
    *reinterpret_cast<uint4*>(to) = word;
    return;
  }
#endif
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// From here on a piece is unpacked anew: nvcc else keeps its floats, twice as many registers, to where it is used again.
template <typename T, int N>
__device__ inline void forget_floats(Pack<T, N>& pack) {
#if defined(__CUDA_ARCH__)
  uint32_t words[sizeof(pack) / 4];
  memcpy(words, &pack, sizeof(pack));
#pragma unroll
  for (uint32_t& word : words) asm volatile("" : "+r"(word));
  memcpy(&pack, words, sizeof(pack));
#endif
}

// A pointer to global memory, told to clang, which makes flat stores of one that it cannot follow to a kernel's argument.
template <typename T>
__device__ inline T* in_global(T* pointer) {
#if defined(__HIP_DEVICE_COMPILE__)
  auto global = (__attribute__((address_space(1))) T*)pointer;
  asm("" : "+v"(global));
  return (T*)global;
#else
  return pointer;
#endif
}

// Floats as a piece of T: in pairs where the hardware converts pairs.
template <typename T, int N>
__device__ inline Pack<T, N> to_pack(const float (&x)[N]) {
  Pack<T, N> out;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    uint32_t pair[N / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2) {  // the first operand goes to the upper half
      if constexpr (is_bf16<T>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair[i / 2]) : "f"(x[i + 1]), "f"(x[i]));
      } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair[i / 2]) : "f"(x[i + 1]), "f"(x[i]));
      }
    }
    memcpy(&out, pair, sizeof(out));
    return out;
  }
#endif
#pragma unroll
  for (int i = 0; i < N; i++) out.set(i, from_float<T>(x[i]));
  return out;
}

// Whether rows of `cols` elements that start at these pointers may be read in 16-byte pieces. NULL does not matter.
template <typename T, typename... Pointers>
inline bool vectors_fit(int64_t cols, const Pointers*... pointers) {
  uintptr_t all = 0;
  for (const void* p : {static_cast<const void*>(pointers)...}) all |= reinterpret_cast<uintptr_t>(p);
  return cols % kVector<T> == 0 && all % 16 == 0;
}

// ---------------------------------------------------------------------------------------------- reductions

__device__ inline float shuffle_xor(float value, int mask) {
#if defined(__HIP_PLATFORM_AMD__) || defined(MP_EMULATOR)
  return __shfl_xor(value, mask);
#else
  return __shfl_xor_sync(0xffffffffu, value, mask);
#endif
}

// The lane that differs in the bits of MASK, a power of two, of a warp whose lanes hold the same as those that differ in
// a higher bit below 16. AMD: MASK below 16 goes along with the next instruction (DPP) and waits for no shared memory;
// turning a row of 16 lanes by 8, then by 4, brings what those hold.
template <int MASK>
__device__ inline float exchange(float value) {
#if defined(__HIP_DEVICE_COMPILE__)
  constexpr int kTurn8 = 0x128, kTurn4 = 0x124, kSwap2 = 0x4E, kSwap1 = 0xB1, kXor16 = 0x401F;
  const int bits = static_cast<int>(bits_of_float(value));
  if constexpr (MASK < 16) {
    constexpr int kControl = MASK == 8 ? kTurn8 : MASK == 4 ? kTurn4 : MASK == 2 ? kSwap2 : kSwap1;
    return float_of_bits(static_cast<uint32_t>(__builtin_amdgcn_update_dpp(0, bits, kControl, 0xf, 0xf, true)));
  } else if constexpr (MASK == 16) {
    return float_of_bits(static_cast<uint32_t>(__builtin_amdgcn_ds_swizzle(bits, kXor16)));
  }
#endif
  return shuffle_xor(value, MASK);
}

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  __device__ float operator()(float a, float b) const { return a > b || a != a ? a : b; }
};

// Over the lanes of a warp; every lane gets the result.
template <typename Op>
__device__ inline float warp_reduce(float value, Op op) {
  if constexpr (MP_WARP == 64) value = op(value, exchange<32>(value));
  value = op(value, exchange<16>(value));
  value = op(value, exchange<8>(value));
  value = op(value, exchange<4>(value));
  value = op(value, exchange<2>(value));
  return op(value, exchange<1>(value));
}

// Over a block of whole warps, N values at once; every thread gets the results. `scratch`: shared, N * kMaxWarps. AGAIN:
// it may be that of the call before, whose results others may still be reading, which takes a barrier more.
template <bool AGAIN = true, int N, typename Op>
__device__ inline void block_reduce(float (&value)[N], float* scratch, Op op, float neutral) {
  const int lane = threadIdx.x % MP_WARP, warp = threadIdx.x / MP_WARP;
  const int warps = static_cast<int>(blockDim.x / MP_WARP);
#pragma unroll
  for (int i = 0; i < N; i++) value[i] = warp_reduce(value[i], op);
  if (warps == 1) return;
  if (AGAIN) __syncthreads();
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < N; i++) scratch[i * kMaxWarps + warp] = value[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++) {
    value[i] = warp_reduce(lane < warps ? scratch[i * kMaxWarps + lane] : neutral, op);
  }
}

// ---------------------------------------------------------------------------------------------- launches

// Multiprocessors (compute units) of the current device; asked once a device.
inline int multiprocessors() {
#ifdef MP_EMULATOR
  return emulator::multiprocessors();
#else
  static int known[64] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return 108;
  if (known[device] == 0) cudaDeviceGetAttribute(&known[device], cudaDevAttrMultiProcessorCount, device);
  return known[device];
#endif
}

// Blocks of a persistent grid: no more than the work, at most `each` a multiprocessor.
inline unsigned persistent_blocks(int64_t work, int each) {
  const int64_t most = static_cast<int64_t>(multiprocessors()) * each;
  return static_cast<unsigned>(work < 1 ? 1 : work < most ? work : most);
}

template <typename T>
struct Same {
  using type = T;
};

// Not <<<>>>: neither hipify nor the emulator has to understand a launch then.
template <typename... P>
inline int32_t launch(
    void (*kernel)(P...), unsigned blocks, unsigned threads, void* stream, typename Same<P>::type... args) {
#ifdef MP_EMULATOR
  return emulator::launch<P...>(kernel, blocks, threads, stream, args...);
#else
  void* list[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  return static_cast<int32_t>(cudaLaunchKernel(
      reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads), list, 0,
      static_cast<cudaStream_t>(stream)));
#endif
}

// Threads of a block for `work` items: whole warps, at most `most`.
inline unsigned block_threads(int64_t work, int most) {
  int64_t warps = (work + MP_WARP - 1) / MP_WARP;
  if (warps < 1) warps = 1;
  return static_cast<unsigned>(warps * MP_WARP < most ? warps * MP_WARP : most);
}

// Calls `with(T{})` for the number type of a dtype code.
template <typename F>
inline int32_t for_dtype(int32_t dtype, F with) {
  switch (dtype) {
    case MP_F32: return with(float{});
    case MP_F16: return with(f16{});
    case MP_BF16: return with(bf16{});
    default: return MP_BAD_DTYPE;
  }
}

// ---------------------------------------------------------------------------------------------- partial sums

constexpr int kSumThreads = 512;

// out[c] = the sum of partial[slot * stride + c] over the slots, in the same order every time; columns from `cols` on go
// to `second`, those from 2 * cols on to `third`. A block takes one column a lane, its warps share the slots. stride: the
// columns in all.
template <typename T>
__global__ void __launch_bounds__(kSumThreads) sum_slots_kernel(
    const float* partial, int slots, int stride, int cols, void* out, void* second, void* third) {
  __shared__ float scratch[kSumThreads];
  const int lane = threadIdx.x % MP_WARP, warp = threadIdx.x / MP_WARP, warps = blockDim.x / MP_WARP;
  const int c = blockIdx.x * MP_WARP + lane;
  float sum = 0.0f;
  if (c < stride) {
#pragma unroll 8
    for (int slot = warp; slot < slots; slot += warps) sum += partial[static_cast<int64_t>(slot) * stride + c];
  }
  scratch[threadIdx.x] = sum;
  __syncthreads();
  if (warp != 0 || c >= stride) return;
  for (int w = 1; w < warps; w++) sum += scratch[w * MP_WARP + lane];
  if (c < cols) static_cast<T*>(out)[c] = from_float<T>(sum);
  else if (c < 2 * cols) static_cast<T*>(second)[c - cols] = from_float<T>(sum);
  else static_cast<T*>(third)[c - 2 * cols] = from_float<T>(sum);
}

// The gradient of one to three rows of parameters [cols] from the sums that blocks kept in their slots, in one launch.
template <typename T>
inline int32_t sum_slots(
    void* stream, const float* partial, int64_t slots, int cols, void* out, void* second = nullptr,
    void* third = nullptr) {
  const int stride = second == nullptr ? cols : third == nullptr ? 2 * cols : 3 * cols;
  return launch(
      sum_slots_kernel<T>, static_cast<unsigned>((stride + MP_WARP - 1) / MP_WARP),
      block_threads(slots * MP_WARP, kSumThreads), stream, partial, static_cast<int>(slots), stride, cols, out, second,
      third);
}

}  // namespace mp

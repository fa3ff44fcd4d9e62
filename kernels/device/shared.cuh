// Dynamic shared memory, for kernels that take more of it than a declaration may.
#pragma once

#include "common.cuh"

// AMD's matrix GPUs: a lane may use 256 registers in a block of 512 threads, where NVIDIA's have 128.
#if (defined(__HIP_PLATFORM_AMD__) || defined(MP_EMULATOR)) && MP_WARP == 64
#define MP_REGISTERS_256
#endif

namespace mp {

// A block's dynamic shared memory, 16-byte aligned.
__device__ inline float* dynamic_shared() {
#ifdef MP_EMULATOR
  return emulator::dynamic_shared();
#else
  extern __shared__ float4 mp_dynamic_shared[];
  return reinterpret_cast<float*>(mp_dynamic_shared);
#endif
}

// Bytes that a block may have, those that its kernel declares included.
inline int64_t shared_limit() {
#ifdef MP_EMULATOR
  return emulator::kSharedBytes;
#elif defined(__HIP_PLATFORM_AMD__)
  return 65536;
#else
  static int known[64] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return 49152;
  if (known[device] == 0) cudaDeviceGetAttribute(&known[device], cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return known[device];
#endif
}

#if !defined(MP_EMULATOR) && !defined(__HIP_PLATFORM_AMD__)
// Tells the current device that a kernel may take all the shared memory there is: needed beyond 48 KB, with what the
// kernel declares. Once a kernel and device, always of the same bytes: no thread's call can undo another's.
template <auto KERNEL>
inline cudaError_t allow_shared(const void* function) {
  static bool told[64] = {};
  int device = 0;
  cudaError_t code = cudaGetDevice(&device);
  const bool known = code == cudaSuccess && device < 64;
  if (code != cudaSuccess || (known && told[device])) return code;
  cudaFuncAttributes declared{};
  if ((code = cudaFuncGetAttributes(&declared, function)) != cudaSuccess) return code;
  const int rest = static_cast<int>(shared_limit() - static_cast<int64_t>(declared.sharedSizeBytes));
  code = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, rest);
  if (known && code == cudaSuccess) told[device] = true;
  return code;
}
#endif

template <auto KERNEL>
struct SharedLaunch;
template <typename... P, void (*KERNEL)(P...)>
struct SharedLaunch<KERNEL> {
  static int32_t of(unsigned blocks, unsigned threads, int64_t bytes, void* stream, P... args) {
#ifdef MP_EMULATOR
    if (bytes > emulator::kSharedBytes) emulator::stop("more shared memory than a block may have");
    return emulator::launch<P...>(KERNEL, blocks, threads, stream, args...);
#else
    const void* function = reinterpret_cast<const void*>(KERNEL);
#if !defined(__HIP_PLATFORM_AMD__)
    if (bytes > 32768) {
      const cudaError_t code = allow_shared<KERNEL>(function);
      if (code != cudaSuccess) return static_cast<int32_t>(code);
    }
#endif
    void* list[] = {const_cast<void*>(static_cast<const void*>(&args))...};
    return static_cast<int32_t>(cudaLaunchKernel(
        function, dim3(blocks), dim3(threads), list, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));
#endif
  }
};

// launch() with so many bytes of it.
template <auto KERNEL, typename... P>
inline int32_t launch_shared(unsigned blocks, unsigned threads, int64_t bytes, void* stream, const P&... args) {
  return SharedLaunch<KERNEL>::of(blocks, threads, bytes, stream, args...);
}
}  // namespace mp

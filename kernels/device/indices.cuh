// Indices that came with the data: looked at in debug builds and in the emulator, elsewhere by nobody, so that no kernel
// is slower.
#pragma once

#include "common.cuh"

#if defined(MP_CHECKED) && !defined(MP_EMULATOR)
#include <stdio.h>
#endif

namespace mp {

// The index, least ... end - 1. A debug build (build.py --checked) stops at another one and says which.
__device__ inline int64_t checked(int64_t index, int64_t least, int64_t end, const char* what) {
#if defined(MP_EMULATOR)
  if (index < least || index >= end) emulator::bad_index(what, index, least, end);
#elif defined(MP_CHECKED)
  if (index < least || index >= end) {
    printf("megatron_port: %s %lld is not from %lld to %lld\n", what, static_cast<long long>(index),
           static_cast<long long>(least), static_cast<long long>(end - 1));
#if defined(__HIP_DEVICE_COMPILE__)
    __builtin_trap();
#elif defined(__CUDA_ARCH__)
    __trap();
#endif
  }
#endif
  return index;
}

}  // namespace mp

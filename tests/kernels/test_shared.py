"""What the host side of a launch with much shared memory asks of CUDA's runtime: a stand-in counts the calls."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

RUNTIME = """
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#define __global__
#define __device__
#define __host__
#define __shared__
#define __launch_bounds__(...)
struct dim3 { unsigned x, y, z; explicit dim3(unsigned n) : x(n), y(1), z(1) {} };
struct float4 { float x, y, z, w; };
extern dim3 threadIdx, blockIdx, blockDim, gridDim;
template <typename T> T __shfl_xor_sync(unsigned, T value, int) { return value; }
inline void __syncthreads() {}
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin,
       cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes { size_t sharedSizeBytes; };
extern int device, told, asked;
extern size_t allowed[8][2];
cudaError_t cudaGetDevice(int*);
cudaError_t cudaDeviceGetAttribute(int*, int, int);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*);
cudaError_t cudaFuncSetAttribute(const void*, int, int);
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t);
"""

PROGRAM = """
#include "shared.cuh"
#include <cstdio>
#include <initializer_list>
dim3 threadIdx(0), blockIdx(0), blockDim(1), gridDim(1);
int device = 0, told = 0, launched = 0;
size_t allowed[8][2];
void one(int) {}
template <typename T> void two(T, const void*) {}
static int index(const void* f) { return f == reinterpret_cast<const void*>(&one) ? 0 : 1; }
cudaError_t cudaGetDevice(int* out) { *out = device; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* out, int, int) { *out = 232448; return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  out->sharedSizeBytes = 512;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* f, int, int bytes) {
  told++;
  if (bytes + 512 > 232448) return cudaErrorInvalidValue;
  allowed[device][index(f)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void**, size_t bytes, cudaStream_t) {
  launched++;
  const size_t most = allowed[device][index(f)];
  return bytes + 512 <= 49152 || bytes <= most ? cudaSuccess : cudaErrorInvalidValue;
}
int main() {
  int wrong = 0;
  for (int turn = 0; turn < 3; turn++) {
    for (device = 0; device < 4; device++) {
      for (const int64_t bytes : {1024, 49152, 200000, 65536, 231936}) {
        wrong += mp::launch_shared<one>(1, 32, bytes, nullptr, 7) != 0;
        wrong += mp::launch_shared<&two<float>>(1, 32, bytes, nullptr, 1.0f, &wrong) != 0;
      }
    }
  }
  device = 0;
  wrong += mp::launch_shared<one>(1, 32, 231937, nullptr, 7) == 0;
  printf("%d wrong, %d launched, told %d times", wrong, launched, told);
}
"""


def test_cuda_is_told_of_shared_memory_once_a_kernel_and_device(tmp_path: Path) -> None:
    (tmp_path / "cuda_runtime.h").write_text(RUNTIME)
    (tmp_path / "program.cpp").write_text(PROGRAM)
    folders = [f"-I{folder}" for folder in (tmp_path, ROOT / "kernels" / "include", ROOT / "kernels" / "device")]
    program = tmp_path / "program"
    subprocess.run(["g++", "-std=c++17", "-O1", "-w", *folders, str(tmp_path / "program.cpp"), "-o", str(program)],
                   check=True)
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert said == "0 wrong, 121 launched, told 8 times"

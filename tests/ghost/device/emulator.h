// The kernels' device sources compiled for the ghost machine: a launch goes through its CUDA runtime, which hands the
// launch's own grid, block and arguments back to the emulator.
//
// Found before ../../../kernels/emulator/emulator.h, which it includes.
#pragma once
#define MP_GHOST
#include "../../../kernels/emulator/emulator.h"

#include <dlfcn.h>

#include <fstream>
#include <string>
#include <tuple>
#include <utility>

extern "C" {
struct CUstream_st;
int cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, CUstream_st* stream);
int cudaDeviceGetAttribute(int* value, int attribute, int device);
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*);
void ghost_kernel(const void* kernel, void (*run)(const void*, unsigned, unsigned, void**), void** (*keep)(void**));
}

namespace emulator {

constexpr int kMultiprocessors = 16;  // cudaDevAttrMultiProcessorCount

inline int multiprocessors() {
  int found = 0;
  cudaDeviceGetAttribute(&found, kMultiprocessors, 0);
  return found;
}

// Tell the runtime the kernels' names. They are local symbols, which only the file LIBRARY.names has: "offset name".
inline void register_names() {
  static bool done = false;
  Dl_info here;
  if (std::exchange(done, true) || !dladdr(reinterpret_cast<const void*>(&register_names), &here)) return;
  std::ifstream names(std::string(here.dli_fname) + ".names");
  std::string name;
  for (size_t offset = 0; names >> std::hex >> offset >> name;) {
    __cudaRegisterFunction(nullptr, static_cast<const char*>(here.dli_fbase) + offset, nullptr,
                           (new std::string(name))->c_str(), 0, nullptr, nullptr, nullptr, nullptr, nullptr);
  }
}

template <typename... P, size_t... I>
void run_launched(void (*kernel)(P...), unsigned blocks, unsigned threads, void** arguments, std::index_sequence<I...>) {
  run(blocks, threads, MP_WARP, [&] { kernel(*static_cast<P*>(arguments[I])...); });
}

template <typename... P, size_t... I>
void** kept(void** arguments, std::index_sequence<I...>) {
  return new void*[sizeof...(P)]{new P(*static_cast<P*>(arguments[I]))...};
}

template <typename... P>
int launch(void (*kernel)(P...), unsigned blocks, unsigned threads, void* stream, P... arguments) {
  register_names();
  const void* address = reinterpret_cast<const void*>(kernel);
  ghost_kernel(address, [](const void* launched, unsigned grid, unsigned block, void** given) {
    run_launched(reinterpret_cast<void (*)(P...)>(const_cast<void*>(launched)), grid, block, given,
                 std::index_sequence_for<P...>{});
  }, [](void** given) { return kept<P...>(given, std::index_sequence_for<P...>{}); });
  void* list[] = {static_cast<void*>(&arguments)...};
  return cudaLaunchKernel(address, dim3{blocks, 1, 1}, dim3{threads, 1, 1}, list, 0,
                          static_cast<CUstream_st*>(stream));
}

}  // namespace emulator

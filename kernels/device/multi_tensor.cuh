// Launches over many tensors: a table of them by value in the kernel's parameters, cut into chunks of one size.
#pragma once

#include "common.cuh"

namespace mp {

constexpr int64_t kMostChunks = INT32_MAX - 65536;  // leaves room for the step of a persistent grid

// What is cut into chunks: tensor t has the chunks first[t] to first[t + 1] of the launch.
template <int MOST>
struct Table {
  int64_t size[MOST];
  int32_t first[MOST + 1];
  int32_t tensors;
};

// Adds a tensor; its index. Chunks of one launch must stay below kMostChunks.
template <int MOST>
int add(Table<MOST>& table, int64_t size, int chunk) {
  const int t = table.tensors++;
  if (t == 0) table.first[0] = 0;
  table.size[t] = size;
  table.first[t + 1] = table.first[t] + static_cast<int32_t>((size + chunk - 1) / chunk);
  return t;
}

inline bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// In place of a weight's number type: there is none.
struct NoWeight {};

template <typename W>
__device__ inline void put(void* weight, int64_t at, float master) {
  static_cast<W*>(weight)[at] = from_float<W>(master);
}
template <>
__device__ inline void put<NoWeight>(void*, int64_t, float) {}

template <typename W, int N>
__device__ inline void put_piece(void* weight, int64_t at, const Pack<float, N>& master) {
  if constexpr (sizeof(W) > 1) {
    store<N>(static_cast<W*>(weight) + at, to_pack<W>(master.at));
  }
}

}  // namespace mp

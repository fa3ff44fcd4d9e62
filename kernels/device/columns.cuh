// How kernels that sum over rows cut a tensor: a thread keeps its columns and walks down the rows.
#pragma once

#include "common.cuh"

namespace mp {

constexpr int kCutThreads = 256;
constexpr int kCutBlocksEach = 8;

// How the tensor is cut: strips of `across` pieces of N columns, `down` rows of a strip in a block, `bands` blocks a
// strip. Thread (slot = band * down + its row in the block) takes rows slot, slot + slots, ...
struct Cut {
  int64_t rows;
  int batch, cols;
  int across, down, strips, bands;
  unsigned threads;
};

// `least`: rows of a slot at least, where there are as many.
inline Cut cut_of(int64_t rows, int64_t batch, int64_t cols, int n, int least) {
  const int64_t pieces = cols / n, strips = (pieces + kCutThreads - 1) / kCutThreads;
  const int64_t across = (pieces + strips - 1) / strips, beside = kCutThreads / across;
  const int64_t wanted = rows / least < 1 ? 1 : rows / least;
  const int64_t down = beside < wanted ? beside : wanted;
  const int64_t most = persistent_blocks(INT64_MAX, kCutBlocksEach) / strips;
  const int64_t bands = wanted / down < most ? wanted / down : most;
  Cut cut{};
  cut.rows = rows;
  cut.batch = static_cast<int>(batch);
  cut.cols = static_cast<int>(cols);
  cut.across = static_cast<int>(across);
  cut.down = static_cast<int>(down);
  cut.strips = static_cast<int>(strips);
  cut.bands = static_cast<int>(bands < 1 ? 1 : bands);
  cut.threads = block_threads(across * down, kCutThreads);
  return cut;
}

// Floats of the slots of partial sums, whatever pieces a thread takes.
inline int64_t cut_floats(int64_t rows, int64_t cols, int least) {
  int64_t slots = 0;
  for (const int n : {1, 4, 8}) {
    if (cols % n != 0) continue;
    const Cut cut = cut_of(rows, 1, cols, n, least);
    const int64_t own = static_cast<int64_t>(cut.bands) * cut.down;
    slots = own > slots ? own : slots;
  }
  return slots * cols;
}

}  // namespace mp

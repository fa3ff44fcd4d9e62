// Matrices in 8 bits with a scale for the tensor or for each column; include/quantise.h says what, include/fp8.h how.
//
// A tensor's scale: blocks keep the largest magnitude of what they read (a maximum of bits, whatever the order), and
// every block of the cast takes the largest of those few. The cast goes from the end to the beginning, where the first
// pass was last: what is still in cache is read there. Values alone stream through; transposed ones go through a tile
// in shared memory, four rows of a column in a word, with words placed so that neither the writes nor the reads of a
// warp meet in a bank; both copies come from the one read. Bytes an element of bf16: tensor 2 for the scale and 2 + 1
// (+ 1 with both), columns 2 + 2 + 1, and below 1 % of partial results.
#include "quantise.cuh"

namespace mp {
namespace {

constexpr int kTileResident = 3;  // blocks of tiles that a multiprocessor shall have room for: 80 registers a thread
constexpr int kTile = 128;

// ---------------------------------------------------------------------------------------------- a tensor's scale

struct Largest {
  int64_t count;
  const void* x;
  float* partial;  // [blocks], bits of a magnitude
};

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads) largest(Largest a) {
  constexpr int kPieces = 4;
  __shared__ float scratch[kMaxWarps];
  const T* x = static_cast<const T*>(a.x);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kPieces * kThreads * kEight;
  uint32_t most = 0;
  for (int64_t start = static_cast<int64_t>(blockIdx.x) * kPieces * kThreads * kEight; start < a.count;
       start += step) {
    Eight<T> in[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
      const int64_t at = start + (p * kThreads + static_cast<int>(threadIdx.x)) * kEight;
      const int64_t left = a.count - at;
      const int live = left > kEight ? kEight : static_cast<int>(left < 0 ? 0 : left);
      in[p] = ALIGNED && live == kEight ? load_eight<true>(x + at, live) : load_eight<false>(x + at, live);
    }
#pragma unroll
    for (int p = 0; p < kPieces; p++) most = larger(most, largest_of(in[p]));
  }
  most = block_largest(most, scratch);
  if (threadIdx.x == 0) a.partial[blockIdx.x] = float_of_bits(most);
}

// Where a cast has its one scale from: known, or to be made of the blocks' largest magnitudes.
struct Source {
  const float *known, *partial;
  int slots;
  float* inverse;  // written where it was not known
};

__device__ inline float find_scale(const Source& s, const Format& f, float* scratch) {
  if (s.known != nullptr) return float_of_bits(inverse_bits(bits_of_float(*s.known)));
  uint32_t most = 0;
  for (int i = threadIdx.x; i < s.slots; i += blockDim.x) most = larger(most, bits_of_float(s.partial[i]));
  const uint32_t bits = scale_bits(block_largest(most, scratch), f);
  if (blockIdx.x == 0 && threadIdx.x == 0) *s.inverse = float_of_bits(inverse_bits(bits));
  return float_of_bits(bits);
}

struct Cast {
  int64_t count;
  const void* x;
  uint8_t* values;
  Source source;
  Format format;
};

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads) cast(Cast a) {
  constexpr int kPieces = 4;
  __shared__ float scratch[kMaxWarps];
  const float scale = find_scale(a.source, a.format, scratch);
  const T* x = static_cast<const T*>(a.x);
  constexpr int64_t kChunk = kPieces * kThreads * kEight;
  for (int64_t chunk = (a.count + kChunk - 1) / kChunk - 1 - blockIdx.x; chunk >= 0; chunk -= gridDim.x) {
    Eight<T> in[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
      const int64_t at = chunk * kChunk + (p * kThreads + static_cast<int>(threadIdx.x)) * kEight;
      const int64_t left = a.count - at;
      const int live = left > kEight ? kEight : static_cast<int>(left < 0 ? 0 : left);
      in[p] = ALIGNED && live == kEight ? load_eight<true>(x + at, live) : load_eight<false>(x + at, live);
    }
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
      const int64_t at = chunk * kChunk + (p * kThreads + static_cast<int>(threadIdx.x)) * kEight;
      const int64_t left = a.count - at;
      const int live = left > kEight ? kEight : static_cast<int>(left < 0 ? 0 : left);
      const Pack<uint32_t, 2> codes = cast_eight(in[p], scale, a.format);
      if (ALIGNED && live == kEight) {
        store_eight<true>(a.values + at, codes, live);
      } else {
        store_eight<false>(a.values + at, codes, live);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- transposed

struct Transpose {
  int64_t rows, cols;
  const void* x;
  uint8_t *values, *transposed;
  Source source;
  const float* columns;  // inverse of each column's scale, in place of `source`
  Format format;
};

// Bytes of two words by a selector as of prmt: 0 to 3 of `low`, 4 to 7 of `high`.
template <uint32_t SELECTOR>
__device__ inline uint32_t permute(uint32_t low, uint32_t high) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(low, high, SELECTOR);
#else
  uint32_t out = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t from = SELECTOR >> (4 * i) & 7u;
    out |= ((from < 4 ? low : high) >> (8 * (from % 4)) & 0xffu) << (8 * i);
  }
  return out;
#endif
}

// Words r of four rows → words c of four columns.
__device__ inline void transpose_bytes(const uint32_t (&row)[4], uint32_t (&column)[4]) {
  const uint32_t low01 = permute<0x5140>(row[0], row[1]), low23 = permute<0x5140>(row[2], row[3]);
  const uint32_t high01 = permute<0x7362>(row[0], row[1]), high23 = permute<0x7362>(row[2], row[3]);
  column[0] = permute<0x5410>(low01, low23);
  column[1] = permute<0x7632>(low01, low23);
  column[2] = permute<0x5410>(high01, high23);
  column[3] = permute<0x7632>(high01, high23);
}

// A column's words lie kColumn apart from the next one's, and each eight columns kEights from the next. Of 32 banks, a
// thread's word (column 8 l + j, group g) is then in bank 2 l + g but for a constant when it is written, and (column c,
// group 4 k + q) in c + 4 k + q when it is read: no two of a warp alike.
constexpr int kColumn = 33, kEights = kEight * kColumn + 26;
constexpr int kTileWords = kTile / kEight * kEights;

template <typename T, bool ALIGNED, bool COLUMNS>
__global__ void __launch_bounds__(kThreads, kTileResident) transpose(Transpose a) {
  __shared__ float scratch[kMaxWarps];
  __shared__ uint32_t tile[kTileWords];
  const float one = COLUMNS ? 0.0f : find_scale(a.source, a.format, scratch);
  const T* x = static_cast<const T*>(a.x);
  const int64_t across = (a.cols + kTile - 1) / kTile, tiles = across * ((a.rows + kTile - 1) / kTile);
  constexpr int kAcross = kTile / kEight, kDown = kTile / 16;  // threads of a row, and of a column's bytes
  constexpr int kStores = kTile * kDown / kThreads, kApart = kTile / kStores;
  const int eight = static_cast<int>(threadIdx.x) % kAcross, first = static_cast<int>(threadIdx.x) / kAcross;
  const int down = static_cast<int>(threadIdx.x) % kDown, column = static_cast<int>(threadIdx.x) / kDown;
  uint32_t* const write = tile + eight * kEights;
  const uint32_t* const read = tile + column / kEight * kEights + column % kEight * kColumn + 4 * down;
  for (int64_t which = tiles - 1 - blockIdx.x; which >= 0; which -= gridDim.x) {
    __syncthreads();  // the tile before has been read
    const int64_t row = which / across * kTile, col = which % across * kTile;
    const int height = at_most(a.rows - row, kTile), width = at_most(a.cols - col, kTile);
    const int live = width - eight * kEight;
    float scale[COLUMNS ? kEight : 1];
    scale[0] = one;
    if constexpr (COLUMNS) {
      const float* inverse = a.columns + col + eight * kEight;
#pragma unroll
      for (int i = 0; i < kEight; i++) {
        scale[i] = i < live ? float_of_bits(inverse_bits(bits_of_float(inverse[i]))) : 0.0f;
      }
    }
#pragma unroll 1
    for (int group = first; group < kTile / 4; group += kThreads / kAcross) {
      const int64_t at = (row + 4 * group) * a.cols + col + eight * kEight;
      Eight<T> in[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        in[i] = load_eight<ALIGNED>(x + at + i * a.cols, 4 * group + i < height ? live : 0);
      }
      uint32_t low[4], high[4], turned[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float value[kEight];
#pragma unroll
        for (int j = 0; j < kEight; j++) value[j] = in[i].value(j) * scale[COLUMNS ? j : 0];
        const Pack<uint32_t, 2> codes = encode_eight(value, a.format);
        if (!COLUMNS && a.values != nullptr) {
          store_eight<ALIGNED>(a.values + at + i * a.cols, codes, 4 * group + i < height ? live : 0);
        }
        low[i] = codes.at[0];
        high[i] = codes.at[1];
      }
      transpose_bytes(low, turned);
#pragma unroll
      for (int j = 0; j < 4; j++) write[j * kColumn + group] = turned[j];
      transpose_bytes(high, turned);
#pragma unroll
      for (int j = 0; j < 4; j++) write[(4 + j) * kColumn + group] = turned[j];
    }
    __syncthreads();
    uint8_t* to = a.transposed + (col + column) * a.rows + row + 16 * down;
#pragma unroll
    for (int q = 0; q < kStores; q++, to += kApart * a.rows) {
      if (column + q * kApart >= width || 16 * down >= height) continue;
      const uint32_t* words = read + q * (kApart / kEight * kEights);
      if constexpr (ALIGNED) {
        store<4>(reinterpret_cast<uint32_t*>(to), Pack<uint32_t, 4>{{words[0], words[1], words[2], words[3]}});
      } else {
        const int bytes = at_most(height - 16 * down, 16);
#pragma unroll 1
        for (int i = 0; i < bytes; i++) to[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- columns

constexpr int kStripThreads = 32;  // threads along a row
constexpr int kStrip = kStripThreads * kEight;
constexpr int kStripRows = kThreads / kStripThreads;

struct Columns {
  int64_t rows, cols;
  int strips, slots;
  const void* x;
  float* partial;  // [slots, cols], bits of a magnitude
};

// A block takes a strip of kStrip columns and every slots-th group of kStripRows rows.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads) largest_of_columns(Columns a) {
  __shared__ uint32_t shared[kThreads][kEight + 1];
  const int strip = blockIdx.x % a.strips, slot = blockIdx.x / a.strips;
  const int64_t col = static_cast<int64_t>(strip) * kStrip + threadIdx.x % kStripThreads * kEight;
  const int live = at_most(a.cols - col, kEight);
  const T* x = static_cast<const T*>(a.x) + col;
  uint32_t most[kEight] = {};
  const int64_t step = static_cast<int64_t>(a.slots) * kStripRows;
#pragma unroll 4
  for (int64_t row = static_cast<int64_t>(slot) * kStripRows + threadIdx.x / kStripThreads; row < a.rows;
       row += step) {
    const Eight<T> in = load_eight<ALIGNED>(x + row * a.cols, live);
#pragma unroll
    for (int i = 0; i < kEight; i++) most[i] = larger(most[i], magnitude(in.value(i)));
  }
#pragma unroll
  for (int i = 0; i < kEight; i++) shared[threadIdx.x][i] = most[i];
  __syncthreads();
  if (threadIdx.x >= kStripThreads) return;
#pragma unroll 1
  for (int r = 1; r < kStripRows; r++) {
#pragma unroll
    for (int i = 0; i < kEight; i++) most[i] = larger(most[i], shared[r * kStripThreads + threadIdx.x][i]);
  }
#pragma unroll
  for (int i = 0; i < kEight; i++) {
    if (i < live) a.partial[slot * a.cols + col + i] = float_of_bits(most[i]);
  }
}

__global__ void __launch_bounds__(kThreads) column_scales(
    const float* partial, int slots, int64_t cols, Format format, float* inverse) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= cols) return;
  uint32_t most = 0;
#pragma unroll 8
  for (int slot = 0; slot < slots; slot++) most = larger(most, bits_of_float(partial[slot * cols + c]));
  inverse[c] = float_of_bits(inverse_bits(scale_bits(most, format)));
}

// ---------------------------------------------------------------------------------------------- launches

int64_t chunks_of(int64_t count) { return (count + 4 * kThreads * kEight - 1) / (4 * kThreads * kEight); }

unsigned largest_blocks(int64_t count) { return persistent_blocks(chunks_of(count), kBlocksEach / 2); }

int column_slots(int64_t rows, int64_t cols) {
  const int64_t strips = (cols + kStrip - 1) / kStrip, groups = (rows + kStripRows - 1) / kStripRows;
  const int64_t wanted = (static_cast<int64_t>(multiprocessors()) * kBlocksEach + strips - 1) / strips;
  const int64_t most = groups < 64 ? groups : 64;
  return static_cast<int>(wanted < most ? wanted : most);
}

// Whether tiles may be read and written in pieces.
bool tiles_fit(const Transpose& a) {
  return a.rows % 16 == 0 && a.cols % 16 == 0 && on_sixteen(a.x) && on_sixteen(a.values) && on_sixteen(a.transposed);
}

int64_t tiles_of(int64_t rows, int64_t cols) { return (rows + kTile - 1) / kTile * ((cols + kTile - 1) / kTile); }

template <typename T>
int32_t run_largest(void* stream, const Largest& a, unsigned blocks) {
  if constexpr (kFast<T>) {
    if (on_sixteen(a.x)) return launch(largest<T, true>, blocks, kThreads, stream, a);
  }
  return launch(largest<T, false>, blocks, kThreads, stream, a);
}

template <typename T, bool COLUMNS>
int32_t run_tiles(void* stream, const Transpose& a) {
  const unsigned blocks = persistent_blocks(tiles_of(a.rows, a.cols), 2 * kTileResident);
  if constexpr (kFast<T>) {
    if (tiles_fit(a)) return launch(transpose<T, true, COLUMNS>, blocks, kThreads, stream, a);
  }
  return launch(transpose<T, false, COLUMNS>, blocks, kThreads, stream, a);
}

template <typename T>
int32_t run_tensor(void* stream, Transpose a, float* workspace) {
  const int64_t count = a.rows * a.cols;
  if (a.source.known == nullptr) {
    const unsigned blocks = largest_blocks(count);
    const int32_t code = run_largest<T>(stream, Largest{count, a.x, workspace}, blocks);
    if (code != MP_OK) return code;
    a.source.partial = workspace;
    a.source.slots = static_cast<int>(blocks);
  }
  if (a.transposed != nullptr) return run_tiles<T, false>(stream, a);
  const Cast b{count, a.x, a.values, a.source, a.format};
  const unsigned blocks = persistent_blocks(chunks_of(count), kBlocksEach);
  if constexpr (kFast<T>) {
    if (on_sixteen(a.x) && on_sixteen(a.values)) return launch(cast<T, true>, blocks, kThreads, stream, b);
  }
  return launch(cast<T, false>, blocks, kThreads, stream, b);
}

template <typename T>
int32_t run_columns(void* stream, Transpose a, float* inverse, float* workspace) {
  const int64_t strips = (a.cols + kStrip - 1) / kStrip;
  const int slots = column_slots(a.rows, a.cols);
  const Columns first{a.rows, a.cols, static_cast<int>(strips), slots, a.x, workspace};
  const unsigned blocks = static_cast<unsigned>(strips * slots);
  int32_t code = MP_OK;
  if (kFast<T> && a.cols % kEight == 0 && on_sixteen(a.x)) {
    code = launch(largest_of_columns<T, kFast<T>>, blocks, kThreads, stream, first);
  } else {
    code = launch(largest_of_columns<T, false>, blocks, kThreads, stream, first);
  }
  if (code != MP_OK) return code;
  code = launch(
      column_scales, static_cast<unsigned>((a.cols + kThreads - 1) / kThreads), kThreads, stream, workspace, slots,
      a.cols, a.format, inverse);
  if (code != MP_OK) return code;
  a.columns = inverse;
  return run_tiles<T, true>(stream, a);
}

}  // namespace
}  // namespace mp

extern "C" int64_t mp_fp8_tensor_workspace(int64_t rows, int64_t cols) { return mp::largest_blocks(rows * cols); }

extern "C" int64_t mp_fp8_columns_workspace(int64_t rows, int64_t cols) {
  return mp::column_slots(rows, cols) * cols;
}

extern "C" int32_t mp_fp8_tensor(
    void* stream, int32_t dtype, int32_t format, int64_t rows, int64_t cols, const void* x, const float* known,
    void* values, void* transposed, float* inverse, float* workspace) {
  if (values == nullptr && transposed == nullptr) return MP_BAD_SIZE;
  return mp::for_input(dtype, format, rows, cols, [&](auto zero, const mp::Format& f) {
    const mp::Transpose a{
        rows, cols, x, static_cast<uint8_t*>(values), static_cast<uint8_t*>(transposed),
        mp::Source{known, nullptr, 0, inverse}, nullptr, f};
    return mp::run_tensor<decltype(zero)>(stream, a, workspace);
  });
}

extern "C" int32_t mp_fp8_columns(
    void* stream, int32_t dtype, int32_t format, int64_t rows, int64_t cols, const void* x, void* transposed,
    float* inverse, float* workspace) {
  return mp::for_input(dtype, format, rows, cols, [&](auto zero, const mp::Format& f) {
    const mp::Transpose a{
        rows, cols, x, nullptr, static_cast<uint8_t*>(transposed), mp::Source{}, nullptr, f};
    return mp::run_columns<decltype(zero)>(stream, a, inverse, workspace);
  });
}

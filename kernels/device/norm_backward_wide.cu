// LayerNorm and RMSNorm backward, of rows that are too wide for the registers of norm_backward.cu, and of any others.
//
// Up to kPieces pieces a thread (28,672 columns in half precision, 14,336 in fp32) a row stays in registers, one a
// block, and so do the sums of dweight and dbias of its first kHeld pieces; the others' lie in shared memory, each thread's
// own. AMD's registers hold those of one piece less than all, or all. Bytes: as norm_backward.cu's.
//
// Where shared memory does not reach (25,600 columns of LayerNorm take 210 KB, which sm_80 has not) and where rows are
// unaligned, a row is read twice (from cache, if it fits one), and its dweight, dbias read dy and sum once more: 1.5 to
// 1.67 times the least.
#include "norm_backward.cuh"
#include "shared.cuh"

namespace mp {
namespace {

constexpr int kBlocksEach = 16;
constexpr int kPieces = 7;
// Of these the sums stay in registers: as many as leave no kernel without them.
template <bool RMS>
#ifdef MP_REGISTERS_256
constexpr int kHeld = RMS ? kPieces : kPieces - 1;
#else
constexpr int kHeld = RMS ? 2 : 0;
#endif

// A thread's sums of one kind of one piece: in registers, or its own part of shared memory.
template <int N>
struct Sums {
  float* at;  // the thread's first four in shared memory; the next ones a block's width further on
  __device__ inline void clear() const {
#pragma unroll
    for (int i = 0; i < N; i += 4) store<4>(at + i * blockDim.x, Pack<float, 4>{});
  }
  __device__ inline void add(const float (&value)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      Pack<float, 4> sum = load<4>(at + i * blockDim.x);
#pragma unroll
      for (int j = 0; j < 4; j++) sum.at[j] += value[i + j];
      store<4>(at + i * blockDim.x, sum);
    }
  }
  __device__ inline void read(float (&value)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const Pack<float, 4> sum = load<4>(at + i * blockDim.x);
#pragma unroll
      for (int j = 0; j < 4; j++) value[i + j] = sum.at[j];
    }
  }
};

// Bytes of shared memory that the sums of a block take.
template <typename T, bool RMS>
constexpr int64_t shared_bytes(int64_t threads) {
  return threads * (kPieces - kHeld<RMS>) * kVector<T> * (RMS ? 1 : 2) * static_cast<int64_t>(sizeof(float));
}

// Keeps a compiler from loading the weights of all pieces at once, for which there are no registers.
__device__ inline void in_turn() {
#ifndef MP_EMULATOR
  asm volatile("" ::: "memory");
#endif
}

// As backward_registers, a row at a time.
template <typename T, bool RMS>
__global__ void __launch_bounds__(kNormThreads) backward_shared(Backward a) {
  constexpr int N = kVector<T>, PIECES = kPieces, HELD = kHeld<RMS>;
  __shared__ float scratch[2][2 * kMaxWarps];
  int turn = 0;
  float* const held = dynamic_shared() + threadIdx.x * 4;
  const int column = threadIdx.x * N, step = blockDim.x * N;
  const float each = 1.0f / a.cols;
  const auto sums = [&](int piece, int kind) {
    return Sums<N>{held + ((piece - HELD) * (RMS ? 1 : 2) + kind) * step};
  };
  constexpr int SOME = HELD > 0 ? HELD : 1;
  float dweight[SOME][N] = {}, dbias[SOME][N] = {};
#pragma unroll
  for (int p = HELD; p < PIECES; p++) {
    sums(p, 0).clear();
    if (!RMS) sums(p, 1).clear();
  }
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    Pack<T, N> in[PIECES], dy[PIECES];
    const float mean = RMS ? 0.0f : a.mean[row], rstd = a.rstd[row];
    const int64_t place = row * a.cols;
    float total[2] = {0.0f, 0.0f};  // sum of g * n, sum of g
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = p * step + column;
      if (at >= a.cols) continue;
      in[p] = load<N>(static_cast<const T*>(a.sum) + place + at);
      dy[p] = load<N>(static_cast<const T*>(a.dy) + place + at);
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = p * step + column;
      if (at >= a.cols) continue;
      in_turn();
      const Pack<T, N> w = load<N>(static_cast<const T*>(a.weight) + at);
      float along[N], plain[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float n = (in[p].value(i) - mean) * rstd, d = dy[p].value(i), g = d * w.value(i);
        total[0] += g * n;
        total[1] += g;
        along[i] = d * n;
        plain[i] = d;
        if (p < HELD) dweight[p < HELD ? p : 0][i] += along[i];
        if (p < HELD && !RMS) dbias[p < HELD ? p : 0][i] += plain[i];
      }
      if (p >= HELD) sums(p, 0).add(along);
      if (p >= HELD && !RMS) sums(p, 1).add(plain);
    }
    block_reduce<false>(total, scratch[turn], Add(), 0.0f);
    turn ^= 1;
    const float along = total[0] * each, shift = RMS ? 0.0f : total[1] * each;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = p * step + column;
      if (at >= a.cols) continue;
      in_turn();
      const Pack<T, N> w = load<N>(static_cast<const T*>(a.weight) + at);
      Pack<T, N> skip = {};
      if (a.dsum != nullptr) skip = load<N>(static_cast<const T*>(a.dsum) + place + at);
      float dx[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float n = (in[p].value(i) - mean) * rstd, g = dy[p].value(i) * w.value(i);
        dx[i] = rstd * (g - shift - n * along) + skip.value(i);
      }
      store<N>(static_cast<T*>(a.dx) + place + at, to_pack<T>(dx));
    }
  }
  float* partial = a.partial + static_cast<int64_t>(blockIdx.x) * (a.has_bias ? 2 : 1) * a.cols;
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const int at = p * step + column;
    if (at >= a.cols) continue;
    if (p < HELD) {
      store_sums(partial + at, dweight[p < HELD ? p : 0]);
      if (a.has_bias) store_sums(partial + a.cols + at, dbias[p < HELD ? p : 0]);
      continue;
    }
    float value[N];
    sums(p, 0).read(value);
    store_sums(partial + at, value);
    if (RMS || !a.has_bias) continue;
    sums(p, 1).read(value);
    store_sums(partial + a.cols + at, value);
  }
}

// Any width, N elements at a time; N = 1: and alignment: dx row by row.
template <typename T, bool RMS, int N>
__global__ void __launch_bounds__(kNormThreads) backward_any(Backward a) {
  __shared__ float scratch[2 * kMaxWarps];
  const T* weight = static_cast<const T*>(a.weight);
  const int first = threadIdx.x * N, step = blockDim.x * N;
  const float each = 1.0f / a.cols;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const float mean = RMS ? 0.0f : a.mean[row], rstd = a.rstd[row];
    const T* in = static_cast<const T*>(a.sum) + row * a.cols;
    const T* dy = static_cast<const T*>(a.dy) + row * a.cols;
    const T* dsum = a.dsum != nullptr ? static_cast<const T*>(a.dsum) + row * a.cols : nullptr;
    float total[2] = {0.0f, 0.0f};
    for (int c = first; c < a.cols; c += step) {
      const Pack<T, N> x = load<N>(in + c), d = load<N>(dy + c), w = load<N>(weight + c);
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float g = d.value(i) * w.value(i);
        total[0] += g * (x.value(i) - mean) * rstd;
        total[1] += g;
      }
    }
    block_reduce(total, scratch, Add(), 0.0f);
    const float along = total[0] * each, shift = RMS ? 0.0f : total[1] * each;
    for (int c = first; c < a.cols; c += step) {
      const Pack<T, N> x = load<N>(in + c), d = load<N>(dy + c), w = load<N>(weight + c);
      Pack<T, N> more = {};
      if (dsum != nullptr) more = load<N>(dsum + c);
      float dx[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float n = (x.value(i) - mean) * rstd, g = d.value(i) * w.value(i);
        dx[i] = rstd * (g - shift - n * along) + more.value(i);
      }
      store<N>(static_cast<T*>(a.dx) + row * a.cols + c, to_pack<T>(dx));
    }
  }
}

// Any width: the partial sums of dweight and dbias; a thread N columns, a block a band of rows. Reads run along rows.
template <typename T, bool RMS, int N>
__global__ void __launch_bounds__(kNormThreads) backward_any_columns(Backward a, int64_t band, int strips) {
  const int64_t slot = blockIdx.x / strips;
  const int c = ((blockIdx.x % strips) * blockDim.x + threadIdx.x) * N;
  if (c >= a.cols) return;
  const int64_t end = (slot + 1) * band < a.rows ? (slot + 1) * band : a.rows;
  float dweight[N] = {}, dbias[N] = {};
#pragma unroll 2
  for (int64_t row = slot * band; row < end; row++) {
    const Pack<T, N> dy = load<N>(static_cast<const T*>(a.dy) + row * a.cols + c);
    const Pack<T, N> in = load<N>(static_cast<const T*>(a.sum) + row * a.cols + c);
    const float mean = RMS ? 0.0f : a.mean[row], rstd = a.rstd[row];
#pragma unroll
    for (int i = 0; i < N; i++) {
      dweight[i] += dy.value(i) * (in.value(i) - mean) * rstd;
      dbias[i] += dy.value(i);
    }
  }
  float* partial = a.partial + slot * (a.has_bias ? 2 : 1) * a.cols + c;
#pragma unroll
  for (int i = 0; i < N; i++) {
    partial[i] = dweight[i];
    if (a.has_bias) partial[a.cols + i] = dbias[i];
  }
}


// The rows and the sums of columns apart, N elements at a time.
template <typename T, bool RMS, int N>
int32_t backward_apart(void* stream, const Backward& a, int64_t slots) {
  const unsigned threads = block_threads((a.cols + N - 1) / N, kNormThreads);
  const int strips = static_cast<int>((a.cols / N + threads - 1) / threads);
  const int32_t code =
      launch(backward_any<T, RMS, N>, persistent_blocks(a.rows, kBlocksEach), threads, stream, a);
  if (code != MP_OK) return code;
  return launch(
      backward_any_columns<T, RMS, N>, static_cast<unsigned>(slots * strips), threads, stream, a,
      (a.rows + slots - 1) / slots, strips);
}

}  // namespace

template <typename T, bool RMS>
int32_t norm_backward_wide(void* stream, Backward a, int64_t slots, bool vectors) {
  constexpr int N = kVector<T>;
  if (!vectors) return backward_apart<T, RMS, 1>(stream, a, slots);
  const unsigned threads = block_threads((a.cols / N + kPieces - 1) / kPieces, kNormThreads);
  const int64_t bytes = shared_bytes<T, RMS>(threads), own = 4 * kMaxWarps * static_cast<int64_t>(sizeof(float));
  if (a.cols > kPieces * N * kNormThreads || bytes + own > shared_limit()) {
    return backward_apart<T, RMS, N>(stream, a, slots);
  }
  return launch_shared<backward_shared<T, RMS>>(static_cast<unsigned>(slots), threads, bytes, stream, a);
}

template int32_t norm_backward_wide<float, true>(void*, Backward, int64_t, bool);
template int32_t norm_backward_wide<float, false>(void*, Backward, int64_t, bool);
template int32_t norm_backward_wide<f16, true>(void*, Backward, int64_t, bool);
template int32_t norm_backward_wide<f16, false>(void*, Backward, int64_t, bool);
template int32_t norm_backward_wide<bf16, true>(void*, Backward, int64_t, bool);
template int32_t norm_backward_wide<bf16, false>(void*, Backward, int64_t, bool);

}  // namespace mp

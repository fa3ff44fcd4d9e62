// LayerNorm and RMSNorm with the residual add, backward; include/norm.h says what they compute, include/residual_norm.h
// what they do with the bias and dropout of a branch that was added.
//
// The threads of a block form teams of a row each. While a team works on a row, the next one is copied to shared memory
// (ahead.cuh); where a thread has one piece of a row, two blocks fit a multiprocessor besides. The sums of dweight and
// dbias over all rows of a block stay in registers and go to its slot at the end. Bytes: (dy, sum, dsum) in, dx out, and
// 8 bytes a column of a slot for each of the two, written and read. Where there are many rows, a slot has kLeastRows of
// them or more, so that in half precision this is at most 1.09 times the least (LayerNorm without dsum: 1/2 byte beside
// 6; with it beside 8: 1.07). Fewer rows get more slots than that, because the rows of a block follow one another:
// slots_of weighs that time against these bytes.
//
// Rows of more than kMaxPieces pieces a thread (16,384 columns in half precision, 8,192 in fp32), and unaligned ones, are
// norm_backward_wide.cu's.
#include "ahead.cuh"
#include "common.cuh"
#include "dropout.h"
#include "mask.cuh"
#include "norm.h"
#include "norm_backward.cuh"
#include "residual_norm.h"
#include "slots.cuh"

namespace mp {
namespace {

constexpr int kMaxPieces = 4;
constexpr int kMaxBranchPieces = 2;  // with the bias and the mask of a branch, whose sums take registers too
constexpr int kThreads = kNormThreads;
// Of a block of teams with one piece a thread: of NVIDIA's registers two such blocks have 72 a thread, which LayerNorm
// with a branch needs.
constexpr int kTeamThreads = 448;
constexpr int kSlotsEach = 2;  // no more than are resident at once
constexpr int kLeastRows = 32;
// Two blocks a multiprocessor of an MI210, which has the fewest, 104: up to kLeastRows rows in each of these slots the sums
// do not depend on the GPU.
constexpr int64_t kSlotsAnywhere = 208;
// What memory moves while the blocks of a GPU work on a row each: 2 us (1.7 to 2.5, counted; an H200 took 2.5 before
// rows were copied ahead) at the 3 TB/s of an H100.
constexpr int64_t kTurnBytes = 6000000;

// Tensors whose rows are loaded early: sum, dy, and dsum while registers are left for it.
template <int PIECES>
constexpr int kKinds = PIECES <= 2 ? 3 : 2;

// With the branch that was added to the residual stream.
struct BranchBackward : Backward {
  void* dx_branch;
  bool has_branch_bias;
  RowMask mask;
};
template <bool BRANCH>
struct ArgumentsOf {
  using type = Backward;
};
template <>
struct ArgumentsOf<true> {
  using type = BranchBackward;
};

// The sum over half a warp, in all of its lanes.
__device__ inline float half_sum(float value) {
  if constexpr (MP_WARP == 64) value += exchange<16>(value);
  value += exchange<8>(value);
  value += exchange<4>(value);
  value += exchange<2>(value);
  return value + exchange<1>(value);
}

// Two sums over a team of `warps` warps, at most half a warp's lanes of them, from warp `first` on: half a warp works on
// each. All teams of a block call both functions together; where a team has several warps, the block passes a barrier in
// the first; one warp alone has done its reads. `scratch`: shared, 2 * kMaxWarps; not that of the call before, of which others may still be reading.
__device__ inline float warp_sums(const float (&total)[2], float* scratch, int warps) {
  constexpr int HALF = MP_WARP / 2;
  const int lane = threadIdx.x % MP_WARP;
  const bool upper = lane >= HALF;
  const float sum = half_sum((upper ? total[1] : total[0]) + exchange<HALF>(upper ? total[0] : total[1]));
  if (warps > 1) {
    if (lane % HALF == 0) scratch[lane / HALF * kMaxWarps + threadIdx.x / MP_WARP] = sum;
    __syncthreads();
  } else {
    reads_done();
  }
  return sum;
}

// Every thread gets both.
__device__ inline void team_sums(float sum, float (&total)[2], const float* scratch, int first, int warps) {
  constexpr int HALF = MP_WARP / 2;
  const int lane = threadIdx.x % MP_WARP;
  if (warps > 1) sum = half_sum(lane % HALF < warps ? scratch[lane / HALF * kMaxWarps + first + lane % HALF] : 0.0f);
  const float other = exchange<HALF>(sum);
  total[0] = lane < HALF ? sum : other;
  total[1] = lane < HALF ? other : sum;
}

// The sums of all teams in those of the first; `buffer`: shared, N floats a thread of the block.
template <int N>
__device__ inline void sum_teams(float (&value)[N], float* buffer, int team) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++) buffer[i * blockDim.x + threadIdx.x] = value[i];
  __syncthreads();
  if (threadIdx.x >= static_cast<unsigned>(team)) return;
  for (unsigned other = threadIdx.x + team; other < blockDim.x; other += team) {
#pragma unroll
    for (int i = 0; i < N; i++) value[i] += buffer[i * blockDim.x + other];
  }
}

// A piece of the branch's gradient from that of the sum, rounded; adds it to `total` before it is rounded again.
template <typename T, int N>
__device__ inline void branch_gradient(
    const BranchBackward& a, int64_t row, int column, const Pack<T, N>& given, float (&total)[N]) {
  float value[N];
#pragma unroll
  for (int i = 0; i < N; i++) value[i] = given.value(i);
  if (a.mask.keep.threshold != 0) {
    float factor[N];
    row_factors<N>(a.mask, row, a.cols, column, factor);
#pragma unroll
    for (int i = 0; i < N; i++) value[i] *= factor[i];
    store<N>(static_cast<T*>(a.dx_branch) + row * a.cols + column, to_pack<T>(value));
  }
#pragma unroll
  for (int i = 0; i < N; i++) total[i] += value[i];
}

// With g = dy * weight and n the normalised row: dx = rstd * (g - mean(g) - n * mean(g * n)); RMS has no mean(g).
template <typename T, bool RMS, int PIECES, bool BRANCH>
__global__ void __launch_bounds__(PIECES == 1 ? kTeamThreads : kThreads, PIECES == 1 ? 2 : 1) backward_registers(
    typename ArgumentsOf<BRANCH>::type a) {
  constexpr int N = kVector<T>;
  constexpr bool EARLY = kKinds<PIECES> == 3;
  __shared__ float scratch[2][2 * kMaxWarps];
  const Ahead<T, N, kKinds<PIECES>, PIECES> ahead;
  // Several pieces a thread: one team, whose constants need no registers.
  const int size = PIECES == 1 ? a.team : blockDim.x, warps = size / MP_WARP;
  const int team = PIECES == 1 ? threadIdx.x / size : 0, teams = PIECES == 1 ? blockDim.x / size : 1;
  const int column = (threadIdx.x - team * size) * N, step = size * N;
  float dweight[PIECES][N] = {}, dbias[PIECES][N] = {}, dbranch[BRANCH ? PIECES : 1][N] = {};
  const float each = 1.0f / a.cols;
  const int64_t rows_at_once = static_cast<int64_t>(gridDim.x) * teams;
  const int64_t advance = rows_at_once * a.cols;
  const auto start = [&](int64_t place, bool live) {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      if (p * step + column >= a.cols) continue;
      ahead.start(0, p, static_cast<const T*>(a.sum) + place + p * step, live);
      ahead.start(1, p, static_cast<const T*>(a.dy) + place + p * step, live);
      if (EARLY && a.dsum != nullptr) ahead.start(2, p, static_cast<const T*>(a.dsum) + place + p * step, live);
    }
  };
  const auto statistic = [&](const float* of, int64_t row) { return row < a.rows ? of[row] : 0.0f; };
  int64_t first = static_cast<int64_t>(blockIdx.x) * teams;
  int64_t place = (first + team) * a.cols + column;  // of the thread's first piece
  if (first < a.rows) start(place, PIECES > 1 || first + team < a.rows);
  float mean = RMS ? 0.0f : statistic(a.mean, first + team), rstd = statistic(a.rstd, first + team);
  for (int turn = 0; first < a.rows; turn ^= 1) {
    const int64_t row = first + team;
    const bool live = PIECES > 1 || row < a.rows;  // beyond the last row everything is 0
    Pack<T, N> in[PIECES], dy[PIECES], more[EARLY ? PIECES : 1] = {};
    float total[2] = {};  // sum of g * n, sum of g
    copies_arrived();
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      if (p * step + column >= a.cols) continue;
      in[p] = ahead.take(0, p, static_cast<const T*>(a.sum) + place + p * step, live);
      dy[p] = ahead.take(1, p, static_cast<const T*>(a.dy) + place + p * step, live);
      if (EARLY && a.dsum != nullptr) more[p] = ahead.take(2, p, static_cast<const T*>(a.dsum) + place + p * step, live);
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = p * step + column;
      if (at >= a.cols) continue;
      const Pack<T, N> w = load<N>(static_cast<const T*>(a.weight) + at);
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float n = (in[p].value(i) - mean) * rstd, d = dy[p].value(i);
        const float g = rounded_product(d, w.value(i));
        total[0] = multiply_add(g, n, total[0]);
        total[1] += g;
        dweight[p][i] = multiply_add(d, n, dweight[p][i]);
        if (!RMS) dbias[p][i] += d;
      }
    }
    if constexpr (PIECES == 1) {
      forget_floats(in[0]);
      forget_floats(dy[0]);
    }
    if constexpr (RMS) total[1] = 0.0f;
    const float sum = warp_sums(total, scratch[turn], warps);
    first += rows_at_once;
    if (first < a.rows) start(place + advance, PIECES > 1 || first + team < a.rows);
    const float next_mean = RMS ? 0.0f : statistic(a.mean, first + team), next_rstd = statistic(a.rstd, first + team);
    team_sums(sum, total, scratch[turn], team * warps, warps);
    total[0] *= each;
    total[1] *= each;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int at = p * step + column;
      if (!live || at >= a.cols) continue;
#if defined(__CUDA_ARCH__)
      if constexpr (PIECES != 2) asm volatile("" ::: "memory");  // else ptxas loads all pieces at once, and spills
#endif
      const Pack<T, N> w = load<N>(static_cast<const T*>(a.weight) + at);
      Pack<T, N>& skip = more[EARLY ? p : 0];
      if (!EARLY && a.dsum != nullptr) skip = load<N>(static_cast<const T*>(a.dsum) + place + p * step);
      float dx[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float n = (in[p].value(i) - mean) * rstd;
        const float g = rounded_product(dy[p].value(i), w.value(i));
        const float shifted = RMS ? g : g - total[1];
        dx[i] = multiply_add(rstd, multiply_add(-n, total[0], shifted), skip.value(i));
      }
      store<N>(static_cast<T*>(a.dx) + place + p * step, to_pack<T>(dx));
      if constexpr (BRANCH) branch_gradient<T, N>(a, row, at, to_pack<T>(dx), dbranch[p]);
    }
    mean = next_mean, rstd = next_rstd;
    place += advance;
  }
  if constexpr (PIECES == 1) {
    if (teams > 1) {
      float* const buffer = dynamic_shared();
      sum_teams(dweight[0], buffer, a.team);
      if (!RMS) sum_teams(dbias[0], buffer, a.team);
      if (BRANCH) sum_teams(dbranch[0], buffer, a.team);
    }
  }
  if (team != 0) return;
  int parts = a.has_bias ? 2 : 1;
  if constexpr (BRANCH) parts += a.has_branch_bias ? 1 : 0;
  float* partial = a.partial + static_cast<int64_t>(blockIdx.x) * parts * a.cols;
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const int at = p * step + column;
    if (at >= a.cols) continue;
    store_sums(partial + at, dweight[p]);
    if (a.has_bias) store_sums(partial + a.cols + at, dbias[p]);
    if constexpr (BRANCH) {
      if (a.has_branch_bias) store_sums(partial + (parts - 1) * a.cols + at, dbranch[p]);
    }
  }
}

// Slots of partial sums, a block each. Modelled time, in bytes: rows in half precision, of which four tensors move while
// the blocks take their turns, whichever lasts longer; then two sums of each slot, written and read.
int64_t slots_of(int64_t rows, int64_t cols) {
  const int64_t full = rows / kLeastRows, many = persistent_blocks(full, kSlotsEach);
  if (full >= kSlotsAnywhere) return many > kSlotsAnywhere ? many : kSlotsAnywhere;
  const int64_t fewest = full < 1 ? 1 : full;
  const int64_t teams = kTeamThreads / block_threads(cols / kVector<bf16>, kTeamThreads);
  const int64_t moved = 4 * 2 * rows * cols, slot = 2 * 8 * cols;
  int64_t least = INT64_MAX, chosen = fewest, slots = rows;
  for (int64_t turns = 1; slots > fewest; turns++) {
    const int64_t enough = (rows + turns * teams - 1) / (turns * teams);
    slots = enough < fewest ? fewest : enough;
    const int64_t time = (moved > turns * kTurnBytes ? moved : turns * kTurnBytes) + slots * slot;
    if (slots > kSlotsAnywhere || time >= least) continue;
    least = time;
    chosen = slots;
  }
  return chosen;
}

template <typename T>
bool fits(const Backward& a, const void* dx_branch = nullptr) {
  return vectors_fit<T>(a.cols, a.dy, a.dsum, a.sum, a.weight, a.dx, dx_branch, a.partial);
}

// Pieces of a row that a thread holds; more than kMaxPieces: they do not fit.
template <typename T>
int pieces_of(const Backward& a, const void* dx_branch = nullptr) {
  if (!fits<T>(a, dx_branch)) return kMaxPieces + 1;
  const int packs = a.cols / kVector<T>, pieces = (packs + kThreads - 1) / kThreads;
  return pieces == 1 && packs > kTeamThreads ? 2 : pieces;
}

template <typename T, bool RMS, int PIECES, bool BRANCH>
int32_t backward_of(void* stream, unsigned blocks, unsigned threads, const typename ArgumentsOf<BRANCH>::type& a) {
  constexpr int N = kVector<T>;
  const int64_t copies = threads * Ahead<T, N, kKinds<PIECES>, PIECES>::kBytes;
  const int64_t teams = PIECES == 1 ? static_cast<int64_t>(threads) * N * sizeof(float) : 0;  // sum_teams
  return launch_shared<backward_registers<T, RMS, PIECES, BRANCH>>(
      blocks, threads, copies > teams ? copies : teams, stream, a);
}

// BRANCH: at most kMaxBranchPieces pieces; the caller looks first.
template <typename T, bool RMS, bool BRANCH>
int32_t backward(
    void* stream, typename ArgumentsOf<BRANCH>::type a, void* dweight, void* dbias, void* dx_bias, int64_t* kept) {
  constexpr int N = kVector<T>;
  const int64_t slots = slots_of(a.rows, a.cols);
  const unsigned blocks = static_cast<unsigned>(slots);
  const int pieces = pieces_of<T>(a);
  a.team = static_cast<int>(block_threads((a.cols / N + pieces - 1) / pieces, kThreads));
  int32_t code = MP_BAD_SIZE;
  if (pieces == 1) {
    code = backward_of<T, RMS, 1, BRANCH>(stream, blocks, kTeamThreads / a.team * a.team, a);
  } else if (pieces == 2) {
    code = backward_of<T, RMS, 2, BRANCH>(stream, blocks, a.team, a);
  } else if constexpr (!BRANCH) {
    switch (pieces) {
      case 3: code = backward_of<T, RMS, 3, false>(stream, blocks, a.team, a); break;
      case 4: code = backward_of<T, RMS, 4, false>(stream, blocks, a.team, a); break;
      default: code = norm_backward_wide<T, RMS>(stream, a, slots, fits<T>(a));
    }
  }
  if (code != MP_OK) return code;
  void* second = dbias != nullptr ? dbias : dx_bias;
  return finish_slots<T>(stream, a.partial, slots, a.cols, kept, dweight, second, dbias != nullptr ? dx_bias : nullptr);
}

}  // namespace
}  // namespace mp

extern "C" int64_t mp_norm_workspace(int64_t rows, int64_t cols) { return mp::slots_of(rows, cols) * 2 * cols; }

extern "C" int32_t mp_norm_backward(
    void* stream, int32_t dtype, int32_t rms, int64_t rows, int64_t cols, const void* dy, const void* dsum,
    const void* sum, const void* weight, const float* mean, const float* rstd, void* dx, void* dweight, void* dbias,
    float* workspace, int64_t* kept) {
  if (rows < 1 || cols < 1 || cols > (1 << 24)) return MP_BAD_SIZE;
  const mp::Backward a{rows, static_cast<int>(cols), dy, dsum, sum, weight, mean, rstd, dx, workspace, 0,
                       dbias != nullptr};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return rms ? mp::backward<T, true, false>(stream, a, dweight, dbias, nullptr, kept)
               : mp::backward<T, false, false>(stream, a, dweight, dbias, nullptr, kept);
  });
}

extern "C" int64_t mp_residual_norm_workspace(int64_t rows, int64_t cols) {
  const int64_t together = mp::slots_of(rows, cols) * 3 * cols, apart = mp_dropout_workspace(rows, cols);
  return together > apart ? together : apart;
}

extern "C" int32_t mp_residual_norm_backward(
    void* stream, int32_t dtype, int32_t rms, int64_t seq, int64_t batch, int64_t cols, const void* dy,
    const void* dsum, const void* sum, const void* weight, const float* mean, const float* rstd, const int64_t* keys,
    int64_t op_key, int32_t threshold, int64_t seq_offset, void* dsum_total, void* dx, void* dweight, void* dbias,
    void* dx_bias, float* workspace, int64_t* kept) {
  const int64_t rows = seq * batch;
  if (rows < 1 || rows >= (int64_t{1} << 31) || cols < 1 || cols > (1 << 24)) return MP_BAD_SIZE;
  const mp::RowMask mask{keys, mp::keep_of(op_key, threshold), seq_offset, static_cast<int>(batch)};
  const mp::BranchBackward a{
      {rows, static_cast<int>(cols), dy, dsum, sum, weight, mean, rstd, dsum_total, workspace, 0, dbias != nullptr},
      dx, dx_bias != nullptr, mask};
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (mp::pieces_of<T>(a, dx) <= mp::kMaxBranchPieces) {
      return rms ? mp::backward<T, true, true>(stream, a, dweight, dbias, dx_bias, kept)
                 : mp::backward<T, false, true>(stream, a, dweight, dbias, dx_bias, kept);
    }
    const int32_t code = mp_norm_backward(
        stream, dtype, rms, rows, cols, dy, dsum, sum, weight, mean, rstd, dsum_total, dweight, dbias, workspace,
        nullptr);  // both kernels' slots do not fit the workspace
    if (code != MP_OK) return code;
    return mp_dropout_backward(
        stream, dtype, seq, batch, cols, dsum_total, keys, op_key, threshold, seq_offset, cols, 0, dx, dx_bias,
        workspace, nullptr);
  });
}

// Products of tiles of 16 x 16 by a warp's matrix instructions: operands of halves, sums in fp32.
//
//   sum[r][c] += left[r][0..15] . right[c][0..15]
//
// Both operands have the depth of the product in their rows, so a product with rows as they lie is `right` of a stored
// tile, and one with the columns of a stored tile is `right_turned`. Sums of one product, rounded, are the left operand
// of the next (`as_left`), without leaving the registers. One source for two instructions:
//
//   32 lanes: mma.sync.m16n8k16, twice. Lane 4 g + t has rows g and g + 8, and of each the columns 2 t, 2 t + 1, 8 + 2 t
//             and 9 + 2 t (PTX ISA, "Matrix Fragments for mma.m16n8k16").
//   64 lanes: v_mfma_f32_16x16x16, with the operands swapped. Lane 16 q + r has row r, and of it the columns 4 q to
//             4 q + 3 (AMD's MI200 ISA guide, matrix instructions). CDNA2 and later; CDNA1 has no such instruction for
//             bf16, RDNA other ones.
//
// Where tiles of `right` are stored by `place`, mma's columns are turned into four neighbours, `column(c)`, as MFMA has
// them: neighbours share a random number of a dropout mask. The next product's depth is then in the same order, as long
// as its stored tile is, too.
#pragma once

#include "common.cuh"
#ifdef MP_EMULATOR
#include "matrix.h"
#endif

#if defined(__HIP_PLATFORM_AMD__) && MP_WARP == 32
#define MP_NO_MATRIX  // RDNA
#endif

namespace mp {
namespace matrix {

constexpr int kTile = 16;
constexpr int kLines = MP_WARP == 32 ? 2 : 1;  // rows of a tile of which a lane has sums, 4 of each
constexpr int kOperand = MP_WARP == 32 ? 4 : 2;
// Halves after each row of a stored tile: rows that are read together then lie in different banks. ldmatrix: 8 rows of
// 16 bytes, an odd number of 16 bytes apart. MFMA: 16 rows of 8 bytes, 8 bytes apart but for whole turns of the banks;
// read turned, four rows of 32 bytes, four rows apart.
constexpr int kPad = MP_WARP == 32 ? 8 : 4;

struct Sums {
  float at[kLines][4];
};
template <typename T>
struct Operand {
  uint32_t at[kOperand];
};

__device__ inline int lane() { return static_cast<int>(threadIdx.x % MP_WARP); }

// Row and columns of a lane's sums at[line][c]. `plain_column`: of products with `right_turned` tiles.
__device__ inline int row(int line) { return MP_WARP == 32 ? lane() / 4 + 8 * line : lane() % 16; }
__device__ inline int quad() { return MP_WARP == 32 ? lane() % 4 : lane() / 16; }
__device__ inline int column(int c) { return 4 * quad() + c; }
__device__ inline int plain_column(int c) { return MP_WARP == 32 ? 2 * quad() + c % 2 + 8 * (c / 2) : column(c); }

// Where a row of a tile is stored for `column` to be so: columns 4 t + 2 h + e of mma's sums are 8 h + 2 t + e.
__device__ inline int place(int row) {
  if (MP_WARP == 64) return row;
  return (row & ~15) | (row & 2) << 2 | (row & 12) >> 1 | (row & 1);
}

// ------------------------------------------------------------------------------------------------ loads

#if MP_WARP == 32

// Four matrices of 8 x 8; lane l gives row l % 8 of matrix l / 8.
template <bool TURNED>
__device__ inline void load_matrices(uint32_t (&out)[4], const void* row) {
#if defined(MP_EMULATOR)
  emulator::ldmatrix_x4(out, row, TURNED);
#elif defined(__CUDA_ARCH__)
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (TURNED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at) : "memory");
  }
#endif
}

#else

// Four neighbours of the lane's row.
template <typename T>
__device__ inline Operand<T> load_neighbours(const T* tile, int stride) {
  const auto four = load<2>(reinterpret_cast<const uint32_t*>(tile + lane() % 16 * stride + 4 * (lane() / 16)));
  return {four.at[0], four.at[1]};
}

#endif

// Rows 0 to 15 of a stored tile, elements 0 to 15 of each. stride: elements from row to row, pad included.
template <typename T>
__device__ inline Operand<T> left(const T* tile, int stride) {
#if MP_WARP == 32
  Operand<T> out;
  load_matrices<false>(out.at, tile + lane() % 16 * stride + lane() / 16 * 8);
  return out;
#else
  return load_neighbours(tile, stride);
#endif
}

template <typename T>
__device__ inline Operand<T> right(const T* tile, int stride) {
#if MP_WARP == 32
  Operand<T> out;
  load_matrices<false>(out.at, tile + (lane() % 8 + lane() / 16 * 8) * stride + lane() / 8 % 2 * 8);
  return out;
#else
  return load_neighbours(tile, stride);
#endif
}

// The columns of a stored tile as the operand's rows.
template <typename T>
__device__ inline Operand<T> right_turned(const T* tile, int stride) {
#if MP_WARP == 32
  Operand<T> out;
  load_matrices<true>(out.at, tile + lane() % 16 * stride + lane() / 16 * 8);
  return out;
#else
  const T* const from = tile + lane() / 16 * 4 * stride + lane() % 16;
  const uint32_t bits[] = {from[0].bits, from[stride].bits, from[2 * stride].bits, from[3 * stride].bits};
  return {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
#endif
}

// ------------------------------------------------------------------------------------------------ products

#if MP_WARP == 32

// One instruction: the columns 8 half to 8 half + 7.
template <typename T>
__device__ inline void multiply_half(Sums& sums, const Operand<T>& a, const Operand<T>& b, int half) {
  float &d0 = sums.at[0][2 * half], &d1 = sums.at[0][2 * half + 1];
  float &d2 = sums.at[1][2 * half], &d3 = sums.at[1][2 * half + 1];
#if defined(MP_EMULATOR)
  const uint32_t two[2] = {b.at[2 * half], b.at[2 * half + 1]};
  emulator::mma_m16n8k16({&d0, &d1, &d2, &d3}, a.at, two, is_bf16<T>);
#elif defined(__CUDA_ARCH__)
  if constexpr (is_bf16<T>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[2 * half]), "r"(b.at[2 * half + 1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[2 * half]), "r"(b.at[2 * half + 1]));
  }
#endif
}

#endif

template <typename T>
__device__ inline void multiply(Sums& sums, const Operand<T>& left, const Operand<T>& right) {
#if MP_WARP == 32
  multiply_half(sums, left, right, 0);
  multiply_half(sums, left, right, 1);
#elif defined(MP_EMULATOR)
  emulator::mfma_16x16x16(sums.at[0], right.at, left.at, is_bf16<T>);
#elif defined(__HIP_DEVICE_COMPILE__)
  // Vectors of one size are cast bit by bit.
  typedef float Four __attribute__((ext_vector_type(4)));
  typedef uint32_t Two __attribute__((ext_vector_type(2)));
  const Two a = {right.at[0], right.at[1]}, b = {left.at[0], left.at[1]};
  Four d = {sums.at[0][0], sums.at[0][1], sums.at[0][2], sums.at[0][3]};
  if constexpr (is_bf16<T>) {
    typedef short Halves __attribute__((ext_vector_type(4)));
    d = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k((Halves)a, (Halves)b, d, 0, 0, 0);
  } else {
    typedef _Float16 Halves __attribute__((ext_vector_type(4)));
    d = __builtin_amdgcn_mfma_f32_16x16x16f16((Halves)a, (Halves)b, d, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) sums.at[0][i] = d[i];
#endif
}

// Two floats as halves in a register. bf16 without an instruction of its own: a NaN that came from halves, or from the
// arithmetic itself, has zeros in its lower half, so rounding cannot carry into its exponent and needs no condition.
template <typename T>
__device__ inline uint32_t rounded_pair(float a, float b) {
  if constexpr (MP_WARP == 64 && is_bf16<T>) {
    uint32_t low = bits_of_float(a), high = bits_of_float(b);
    low += 0x7fffu + (low >> 16 & 1u);
    high += 0x7fffu + (high >> 16 & 1u);
    return (high & 0xffff0000u) | low >> 16;
  } else {
    const float two[2] = {a, b};
    const Pack<T, 2> pair = to_pack<T>(two);
    uint32_t out;
    memcpy(&out, &pair, sizeof(out));
    return out;
  }
}

// Sums, rounded to T, as the left operand of a product over their columns.
template <typename T>
__device__ inline Operand<T> as_left(const Sums& sums) {
  const auto pair = [&](int line, int c) { return rounded_pair<T>(sums.at[line][c], sums.at[line][c + 1]); };
#if MP_WARP == 32
  return {pair(0, 0), pair(1, 0), pair(0, 2), pair(1, 2)};
#else
  return {pair(0, 0), pair(0, 2)};
#endif
}

// Over the lanes that have parts of one row; all of them get the result.
template <typename Op>
__device__ inline float row_reduce(float value, Op op) {
  if constexpr (MP_WARP == 32) {
    value = op(value, shuffle_xor(value, 1));
    return op(value, shuffle_xor(value, 2));
  } else {
    value = op(value, exchange<16>(value));
    return op(value, exchange<32>(value));
  }
}

}  // namespace matrix
}  // namespace mp

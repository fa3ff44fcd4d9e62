// Matrix instructions of a warp on a CPU, written from the vendors' tables and sharing no formula with device/matrix.cuh,
// so that a wrong place of an element there shows as a wrong product here.
//
// 32 lanes: mma.m16n8k16 and ldmatrix (NVIDIA, PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and
// "ldmatrix"). 64 lanes: v_mfma_f32_16x16x16 (AMD, "Instinct MI200 Instruction Set Architecture", matrix arithmetic
// instructions; ROCm's amd_matrix_instruction_calculator prints the same). A register holds two halves, the lower one
// first. Products are exact in fp32 and added one by one; the order in which hardware adds is not published.
#pragma once

#include "emulator.h"

namespace emulator {

inline float half_value(uint32_t bits, bool bf16) {
  if (bf16) {
    const uint32_t wide = bits << 16;
    float out;
    memcpy(&out, &wide, sizeof(out));
    return out;
  }
  const uint16_t narrow = static_cast<uint16_t>(bits);
  _Float16 out;
  memcpy(&out, &narrow, sizeof(out));
  return static_cast<float>(out);
}

inline uint32_t half_of(const uint32_t* registers, int element) {
  return registers[element / 2] >> (16 * (element % 2)) & 0xffffu;
}

inline int lane_here() { return state().current % state().lanes; }

// D [16, 8] = A [16, 16] B [16, 8] + D. a: 4 registers, b: 2, d: 4 floats.
inline void mma_m16n8k16(float* const (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16) {
  const uint32_t mine[] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const auto all = exchange_registers(mine);
  const auto left = [&](int row, int k) {  // quarters of A lie in registers 0 (upper left), 1 (lower left), 2, 3
    return half_value(half_of(all[4 * (row % 8) + k % 8 / 2] + row / 8 + 2 * (k / 8), k % 2), bf16);
  };
  const auto right = [&](int k, int col) {
    return half_value(half_of(all[4 * col + k % 8 / 2] + 4 + k / 8, k % 2), bf16);
  };
  const int lane = lane_here();
  for (int row = 0; row < 16; row++) {
    for (int col = 0; col < 8; col++) {
      if (4 * (row % 8) + col / 2 != lane) continue;
      float& sum = *d[2 * (row / 8) + col % 2];
      for (int k = 0; k < 16; k++) sum += left(row, k) * right(k, col);
    }
  }
}

// Four matrices of 8 x 8 halves: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes.
inline void ldmatrix_x4(uint32_t (&out)[4], const void* row, bool turned) {
  check_aligned(row, 16);
  uint32_t mine[2];
  memcpy(mine, &row, sizeof(row));
  const auto all = exchange_registers(mine);
  const int lane = lane_here();
  for (int matrix = 0; matrix < 4; matrix++) {
    uint16_t pair[2];
    for (int i = 0; i < 2; i++) {
      const int r = turned ? 2 * (lane % 4) + i : lane / 4, c = turned ? lane / 4 : 2 * (lane % 4) + i;
      const uint16_t* from;
      memcpy(&from, all[8 * matrix + r], sizeof(from));
      pair[i] = from[c];
    }
    memcpy(&out[matrix], pair, sizeof(pair));
  }
}

// D [16, 16] = A [16, 16] B [16, 16] + D. a and b: 2 registers, d: 4 floats.
inline void mfma_16x16x16(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[2], bool bf16) {
  const uint32_t mine[] = {a[0], a[1], b[0], b[1]};
  const auto all = exchange_registers(mine);
  const int lane = lane_here(), col = lane % 16;
  for (int i = 0; i < 4; i++) {
    const int row = lane / 16 * 4 + i;
    for (int k = 0; k < 16; k++) {
      const float left = half_value(half_of(all[k / 4 * 16 + row], k % 4), bf16);
      d[i] += left * half_value(half_of(all[k / 4 * 16 + col] + 2, k % 4), bf16);
    }
  }
}

}  // namespace emulator

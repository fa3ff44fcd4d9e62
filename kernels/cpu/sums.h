// Sums that are as exact with narrow vectors as with wide ones, at any length.
//
// In one accumulator per lane of a vector the error of a sum grows with its length over the lanes: 30,000 numbers are
// 1,875 additions in a row with AVX-512, 3,750 with AVX2, 7,500 with SSE. Here 32 are the most.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mp {

// Numbers whose sum is a float's; the sums of blocks are added in double.
#if defined(__AVX512F__)
constexpr int64_t kSumBlock = 32 * 16;
#elif defined(__AVX__)
constexpr int64_t kSumBlock = 32 * 8;
#else
constexpr int64_t kSumBlock = 32 * 4;
#endif

// The sum of term(i), a float, over 0 <= i < n. Terms may store what they compute; those of a block may come in any
// order.
template <typename F>
inline double sum_in_blocks(int64_t n, F term) {
  double total = 0.0;
  int64_t at = 0;
  for (; at + kSumBlock <= n; at += kSumBlock) {
    float part = 0.0f;
#pragma omp simd reduction(+ : part)
    for (int64_t i = 0; i < kSumBlock; i++) part += term(at + i);
    total += part;
  }
  float part = 0.0f;
#pragma omp simd reduction(+ : part)
  for (int64_t i = at; i < n; i++) part += term(i);
  return total + part;
}

struct TwoSums {
  double first, second;
};

struct TwoTerms {
  float first, second;
};

// The same of two terms at once, of TwoTerms.
template <typename F>
inline TwoSums two_sums_in_blocks(int64_t n, F terms) {
  TwoSums total{0.0, 0.0};
  int64_t at = 0;
  for (; at + kSumBlock <= n; at += kSumBlock) {
    float first = 0.0f, second = 0.0f;
#pragma omp simd reduction(+ : first, second)
    for (int64_t i = 0; i < kSumBlock; i++) {
      const TwoTerms t = terms(at + i);
      first += t.first;
      second += t.second;
    }
    total.first += first;
    total.second += second;
  }
  float first = 0.0f, second = 0.0f;
#pragma omp simd reduction(+ : first, second)
  for (int64_t i = at; i < n; i++) {
    const TwoTerms t = terms(i);
    first += t.first;
    second += t.second;
  }
  return {total.first + first, total.second + second};
}

// Sums over rows, column by column, into `total` [cols]: each run of rows for itself, then the runs.
class RowSums {
 public:
  RowSums(float* total, int64_t cols) : total(total), cols(cols) { std::fill(total, total + cols, 0.0f); }

  // Where the next row is to be added.
  float* next() {
    if (rows > 0 && rows % kRun == 0) {
      finish();
      run.assign(cols, 0.0f);
    }
    return rows++ < kRun ? total : run.data();
  }

  // Ends the sums.
  void finish() {
    const float* part = run.data();
    if (run.empty()) return;
#pragma omp simd
    for (int64_t c = 0; c < cols; c++) total[c] += part[c];
  }

 private:
  static constexpr int64_t kRun = 64;
  float* total;
  int64_t cols, rows = 0;
  std::vector<float> run;
};

}  // namespace mp

// Gradients of looked-up rows added to a table's; include/table_rows.h says what is computed.
//
// A thread takes ids, whole: the bits do not depend on the number of threads.
#include "table_rows.h"

#include <algorithm>

#include "common.h"

namespace mp {
namespace {

// sum += the rows of the list's places [begin, end).
template <typename T>
void add_run(
    int64_t begin, int64_t end, int64_t cols, const T* rows, const int64_t* order, float* buffer, float* sum) {
  for (int64_t i = begin; i < end; i++) {
    const float* row = row_as_floats(rows + order[i] * cols, buffer, cols);
#pragma omp simd
    for (int64_t c = 0; c < cols; c++) sum[c] += row[c];
  }
}

template <typename T>
int32_t add(
    int64_t n, int64_t cols, const T* rows, const int64_t* order, const int64_t* ids, float* total) {
  std::vector<int64_t> begins;
  for (int64_t i = 0; i < n; i++) {
    if (i == 0 || ids[i] != ids[i - 1]) begins.push_back(i);
  }
  const int64_t count = static_cast<int64_t>(begins.size());
  begins.push_back(n);
#pragma omp parallel if (n * cols > kParallelFrom)
  {
    std::vector<float> buffer(cols), part(cols);
    std::vector<double> sum(cols);
#pragma omp for schedule(static)
    for (int64_t one = 0; one < count; one++) {
      const int64_t begin = begins[one], end = begins[one + 1];
      float* row = total + ids[begin] * cols;
      bool several = false;
      for (int64_t at = begin; at < end;) {
        const int64_t next = std::min(end, (at / MP_RUN + 1) * MP_RUN);
        if (several) {
          for (int64_t c = 0; c < cols; c++) sum[c] += part[c];
        } else if (at != begin) {
          sum.assign(part.begin(), part.end());
          several = true;
        }
        std::fill(part.begin(), part.end(), 0.0f);
        add_run(at, next, cols, rows, order, buffer.data(), part.data());
        at = next;
      }
      if (several) {
        for (int64_t c = 0; c < cols; c++) row[c] += static_cast<float>(sum[c] + part[c]);
      } else {
        for (int64_t c = 0; c < cols; c++) row[c] += part[c];
      }
    }
  }
  return MP_OK;
}

}  // namespace
}  // namespace mp

extern "C" int64_t mp_add_rows_workspace(int64_t, int64_t) { return 0; }

extern "C" int32_t mp_add_rows(
    void*, int32_t dtype, int64_t n, int64_t cols, const void* rows, const int64_t* order, const int64_t* ids,
    float* total, float*, int64_t) {
  if (n < 0 || cols < 1) return MP_BAD_SIZE;
  return mp::for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return mp::add<T>(n, cols, static_cast<const T*>(rows), order, ids, total);
  });
}

// Matrix products as cuBLAS defines them: columns after one another, D = alpha op(A) op(B) + beta C (+ bias).
#pragma once
#include <cstddef>

#include "numbers.h"

struct Operand {
  const void* at;
  Number type;
  bool transposed;
  long leading, stride;  // elements between columns, and between matrices of a batch

  size_t index(long row, long column, long matrix) const {
    return static_cast<size_t>(matrix * stride + (transposed ? column + row * leading : row + column * leading));
  }
};

struct Product {
  long m, n, k, matrices;
  double alpha, beta;
  Operand a, b, added;
  void* out;
  Number out_type;
  long out_leading, out_stride;
  const void* bias;  // [m], added to every column; nullptr: none
  Number bias_type;
};

// Sums in fp32, of fp64 numbers in fp64.
void multiply(const Product& product);

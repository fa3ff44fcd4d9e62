// A matrix product, one thread: each column of the result as a sum of A's columns, so that the compiler has vectors.
#include "products.h"

#include <vector>

namespace {

template <typename T>
void multiply_as(const Product& p) {
  std::vector<T> a(p.m * p.k), column(p.m);
  for (long matrix = 0; matrix < p.matrices; matrix++) {
    for (long l = 0; l < p.k; l++)
      for (long i = 0; i < p.m; i++) a[l * p.m + i] = number_at<T>(p.a.at, p.a.type, p.a.index(i, l, matrix));
    for (long j = 0; j < p.n; j++) {
      column.assign(p.m, T(0));
      for (long l = 0; l < p.k; l++) {
        const T b = number_at<T>(p.b.at, p.b.type, p.b.index(l, j, matrix));
        const T* from = &a[l * p.m];
        for (long i = 0; i < p.m; i++) column[i] += from[i] * b;
      }
      for (long i = 0; i < p.m; i++) {
        T value = static_cast<T>(p.alpha) * column[i];
        if (p.beta != 0)
          value += static_cast<T>(p.beta) * number_at<T>(p.added.at, p.added.type, p.added.index(i, j, matrix));
        if (p.bias) value += number_at<T>(p.bias, p.bias_type, i);
        put_number(p.out, p.out_type, static_cast<size_t>(matrix * p.out_stride + i + j * p.out_leading), value);
      }
    }
  }
}

}  // namespace

void multiply(const Product& product) {
  if (product.a.type == Number::f64) multiply_as<double>(product);
  else multiply_as<float>(product);
}

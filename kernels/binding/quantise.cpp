// megatron_port::fp8_tensor, fp8_rows, fp8_columns: matrices in 8 bits with scales that are powers of two.
#include "quantise.h"

#include <tuple>

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_fp8_tensor)> whole{"mp_fp8_tensor"};
const Function<decltype(mp_fp8_tensor_workspace)> whole_workspace{"mp_fp8_tensor_workspace"};
const Function<decltype(mp_fp8_rows)> by_rows{"mp_fp8_rows"};
const Function<decltype(mp_fp8_columns)> by_columns{"mp_fp8_columns"};
const Function<decltype(mp_fp8_columns_workspace)> columns_workspace{"mp_fp8_columns_workspace"};

struct Input {
  int32_t dtype, format;
  int64_t rows, cols;
};

Input input_of(const char* op, const Tensor& x, ScalarType to) {
  check(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16, op,
        "takes float32 and bfloat16 tensors only");
  check_alike(op, {&x});
  check(x.dim() == 2 && x.numel() > 0, op, "x must be [rows, columns], with elements");
  Input in{dtype_of(x, op), 0, x.size(0), x.size(1)};
  switch (to) {
    case ScalarType::Float8_e4m3fn: in.format = MP_E4M3FN; break;
    case ScalarType::Float8_e5m2: in.format = MP_E5M2; break;
    case ScalarType::Float8_e4m3fnuz: in.format = MP_E4M3FNUZ; break;
    case ScalarType::Float8_e5m2fnuz: in.format = MP_E5M2FNUZ; break;
    default: check(false, op, "dtype must be an 8-bit float with 4 or 5 exponent bits");
  }
  return in;
}

Tensor codes(const Tensor& like, int64_t rows, int64_t cols, ScalarType dtype) {
  const int64_t shape[] = {rows, cols};
  return torch::stable::new_empty(like, {shape, rows > 0 ? size_t{2} : size_t{1}}, dtype);
}

// values (empty without), transposed (empty without), inverse (empty where it is known)
std::tuple<Tensor, Tensor, Tensor> fp8_tensor(
    const Tensor& x, const std::optional<Tensor>& known, ScalarType dtype, bool values, bool transposed) {
  const char* op = "fp8_tensor";
  const Input in = input_of(op, x, dtype);
  check(values || transposed, op, "neither the values nor their transpose are asked for");
  if (known.has_value()) check_tensor(op, "known", *known, x, ScalarType::Float, 1);
  const Where where(x);
  Tensor out = values ? codes(x, in.rows, in.cols, dtype) : codes(x, 0, 0, dtype);
  Tensor turned = transposed ? codes(x, in.cols, in.rows, dtype) : codes(x, 0, 0, dtype);
  Tensor inverse = known.has_value() ? floats(x, {0}) : floats(x, {1, 1});
  Tensor space = floats(x, {known.has_value() ? 0 : whole_workspace.on(x)(in.rows, in.cols)});
  check_code(
      whole.on(x)(
          where.stream(), in.dtype, in.format, in.rows, in.cols, x.data_ptr(),
          static_cast<const float*>(pointer(known)), values ? out.data_ptr() : nullptr,
          transposed ? turned.data_ptr() : nullptr, static_cast<float*>(inverse.data_ptr()),
          static_cast<float*>(space.data_ptr())),
      x, op);
  return {out, turned, inverse};
}

// values [rows, columns], inverse [rows, 1]
std::tuple<Tensor, Tensor> fp8_rows(const Tensor& x, ScalarType dtype) {
  const char* op = "fp8_rows";
  const Input in = input_of(op, x, dtype);
  const Where where(x);
  Tensor out = codes(x, in.rows, in.cols, dtype);
  Tensor inverse = floats(x, {in.rows, 1});
  check_code(
      by_rows.on(x)(
          where.stream(), in.dtype, in.format, in.rows, in.cols, x.data_ptr(), out.data_ptr(),
          static_cast<float*>(inverse.data_ptr())),
      x, op);
  return {out, inverse};
}

// transposed [columns, rows], inverse [columns, 1]
std::tuple<Tensor, Tensor> fp8_columns(const Tensor& x, ScalarType dtype) {
  const char* op = "fp8_columns";
  const Input in = input_of(op, x, dtype);
  const Where where(x);
  Tensor out = codes(x, in.cols, in.rows, dtype);
  Tensor inverse = floats(x, {in.cols, 1});
  Tensor space = floats(x, {columns_workspace.on(x)(in.rows, in.cols)});
  check_code(
      by_columns.on(x)(
          where.stream(), in.dtype, in.format, in.rows, in.cols, x.data_ptr(), out.data_ptr(),
          static_cast<float*>(inverse.data_ptr()), static_cast<float*>(space.data_ptr())),
      x, op);
  return {out, inverse};
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def(
      "fp8_tensor(Tensor x, Tensor? known, ScalarType dtype, bool values, bool transposed) "
      "-> (Tensor values, Tensor transposed, Tensor inverse)");
  m.def("fp8_rows(Tensor x, ScalarType dtype) -> (Tensor values, Tensor inverse)");
  m.def("fp8_columns(Tensor x, ScalarType dtype) -> (Tensor transposed, Tensor inverse)");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) {
  m.impl("fp8_tensor", TORCH_BOX(&mp::fp8_tensor));
  m.impl("fp8_rows", TORCH_BOX(&mp::fp8_rows));
  m.impl("fp8_columns", TORCH_BOX(&mp::fp8_columns));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) {
  m.impl("fp8_tensor", TORCH_BOX(&mp::fp8_tensor));
  m.impl("fp8_rows", TORCH_BOX(&mp::fp8_rows));
  m.impl("fp8_columns", TORCH_BOX(&mp::fp8_columns));
}

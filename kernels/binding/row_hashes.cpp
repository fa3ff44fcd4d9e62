// megatron_port::row_hashes_: hashes of memory by rows.
#include "row_hashes.h"

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_row_hashes)> hash{"mp_row_hashes"};

int32_t size_of(const Tensor& words, const char* op) {
  switch (words.scalar_type()) {
    case ScalarType::Int: return 4;
    case ScalarType::Short: return 2;
    case ScalarType::Char: return 1;
    default: check(false, op, "words must be int32, int16 or int8");
  }
  return 0;
}

void row_hashes_(const Tensor& out, const Tensor& words, const Tensor& factors) {
  const char* op = "row_hashes_";
  const int32_t size = size_of(words, op);
  check_alike(op, {&words});
  const int64_t count = words.numel();
  check_tensor(op, "factors", factors, words, ScalarType::Long, MP_HASH_ROW);
  check_tensor(op, "out", out, words, ScalarType::Long, (count + MP_HASH_ROW - 1) / MP_HASH_ROW);
  if (count == 0) return;
  const Where where(words);
  check_code(
      hash.on(words)(
          where.stream(), size, count, words.data_ptr(), static_cast<const int64_t*>(factors.data_ptr()),
          static_cast<int64_t*>(out.data_ptr())),
      words, op);
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def("row_hashes_(Tensor(a!) out, Tensor words, Tensor factors) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) { m.impl("row_hashes_", TORCH_BOX(&mp::row_hashes_)); }

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) { m.impl("row_hashes_", TORCH_BOX(&mp::row_hashes_)); }

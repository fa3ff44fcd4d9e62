// megatron_port::add_rows_: gradients of looked-up rows added to a table's.
#include "table_rows.h"

#include "core.h"

namespace mp {
namespace {

const Function<decltype(mp_add_rows)> add{"mp_add_rows"};
const Function<decltype(mp_add_rows_workspace)> workspace{"mp_add_rows_workspace"};

// Fails unless ids ascend within the table and order names rows. Looks at tensors of a CPU alone.
void check_list(const char* op, const Tensor& order, const Tensor& ids, int64_t table_rows) {
  if (!ids.is_cpu()) return;
  const int64_t *id = static_cast<const int64_t*>(ids.data_ptr()), *at = static_cast<const int64_t*>(order.data_ptr());
  const int64_t n = ids.numel();
  for (int64_t i = 0; i < n; i++) {
    if (id[i] < 0 || id[i] >= table_rows) {
      fail(std::string("megatron_port::") + op + ": ids has " + std::to_string(id[i]) + ", which is no row of the table of " +
           std::to_string(table_rows) + "; the data has another vocabulary than model.vocab_size: prepare it again");
    }
    check(i == 0 || id[i - 1] <= id[i], op, "ids must ascend");
    check(at[i] >= 0 && at[i] < n, op, "order has one that is no row");
  }
}

void add_rows_(const Tensor& total, const Tensor& rows, const Tensor& order, const Tensor& ids) {
  const char* op = "add_rows_";
  const int32_t dtype = dtype_of(rows, op);
  check_alike(op, {&rows});
  check(rows.dim() == 2 && total.dim() == 2 && rows.size(1) >= 1 && rows.size(1) == total.size(1), op,
        "total must be [table rows, h] for rows [n, h]");
  const int64_t n = rows.size(0), cols = rows.size(1);
  check_tensor(op, "total", total, rows, ScalarType::Float, total.numel());
  check_tensor(op, "order", order, rows, ScalarType::Long, n);
  check_tensor(op, "ids", ids, rows, ScalarType::Long, n);
  check_list(op, order, ids, total.size(0));
  const Where where(rows);
  Tensor space = floats(rows, {workspace.on(rows)(n, cols)});
  check_code(
      add.on(rows)(
          where.stream(), dtype, n, cols, rows.data_ptr(), static_cast<const int64_t*>(order.data_ptr()),
          static_cast<const int64_t*>(ids.data_ptr()), static_cast<float*>(total.data_ptr()),
          static_cast<float*>(space.data_ptr()), total.size(0)),
      rows, op);
}

}  // namespace
}  // namespace mp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_port, m) {
  m.def("add_rows_(Tensor(a!) total, Tensor rows, Tensor order, Tensor ids) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CPU, m) { m.impl("add_rows_", TORCH_BOX(&mp::add_rows_)); }

STABLE_TORCH_LIBRARY_IMPL(megatron_port, CUDA, m) { m.impl("add_rows_", TORCH_BOX(&mp::add_rows_)); }

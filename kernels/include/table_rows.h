/* Gradients of looked-up rows added to a table's, in float and in one order. */
#ifndef MP_TABLE_ROWS_H
#define MP_TABLE_ROWS_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* total[ids[i]] += the sum of rows[order[j]] over all j with ids[j] = ids[i], for n rows of `cols` elements of dtype;
 * total: float. ids ascend, so that equal ones are neighbours. The rows of an id are added up in float, in the order of
 * j, within runs of MP_RUN neighbours of the list; then the runs' sums (on a CPU in double), then that to total. Of the
 * table only the rows that are named are read and written. No atomics. workspace: mp_add_rows_workspace floats. total has table_rows rows: a debug
 * build stops at an id that is none of them. */
int32_t mp_add_rows(
    void* stream, int32_t dtype, int64_t n, int64_t cols, const void* rows, const int64_t* order, const int64_t* ids,
    float* total, float* workspace, int64_t table_rows);

/* Floats of workspace of mp_add_rows. */
int64_t mp_add_rows_workspace(int64_t n, int64_t cols);

#define MP_RUN 32

#ifdef __cplusplus
}
#endif
#endif

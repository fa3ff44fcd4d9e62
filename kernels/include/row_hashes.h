/* Hashes of memory by rows of MP_HASH_ROW words. */
#ifndef MP_ROW_HASHES_H
#define MP_ROW_HASHES_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

#define MP_HASH_ROW 4096

/* out[r] = the sum of words[i] * factors[i % MP_HASH_ROW] modulo 2^64 over the words i of row r, of which the last may be
 * shorter; words are signed integers of `size` bytes: 1, 2 or 4. factors [MP_HASH_ROW]. out: a number for each row. */
int32_t mp_row_hashes(
    void* stream, int32_t size, int64_t words, const void* data, const int64_t* factors, int64_t* out);

#ifdef __cplusplus
}
#endif
#endif

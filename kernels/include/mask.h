/* Dropout of attention probabilities [batch, heads, queries, keys] with a mask made of counters.
 *
 * Element (b, a, i, j) stands at position ((head_offset + a) * keys + i + keys - queries) * keys + j of its sample: the
 * queries are the last ones of the sequence. The mask of a position is that of dropout.h.
 */
#ifndef MP_MASK_H
#define MP_MASK_H
#include "mp.h"

struct mp_probability_mask {
  const int64_t* keys; /* [batch], on the device: of the samples */
  int64_t op_key;
  int32_t threshold; /* 1 to 65535 */
  int64_t heads, head_offset;
};

#endif

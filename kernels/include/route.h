/* The router of a mixture of experts: scores of a token's experts, the k that it goes to, and their weights.
 *
 * Scores are the softmax or the sigmoid of float logits [tokens, experts]. A token takes the k experts of the largest
 * score + bias, and where `groups` is above 1 only from its top_groups best of so many equal, neighbouring groups; of
 * equals the first is taken, NaN counts as infinity and -infinity as the lowest finite number, so that k experts are
 * found whatever the logits are. A group's value is its largest score + bias, or the sum of its two largest.
 * Weights are the scores of the chosen, without bias, divided by their sum (plus 1e-20, for sums that are 0) where
 * normalise is not 0, times scale.
 */
#ifndef MP_ROUTE_H
#define MP_ROUTE_H
#include "mp.h"
#ifdef __cplusplus
extern "C" {
#endif

enum mp_score { MP_SOFTMAX = 0, MP_SIGMOID = 1 };
#define MP_MOST_EXPERTS 512
#define MP_MOST_ROUTED 32 /* k, and groups */

struct mp_routing {
  int64_t tokens;
  int32_t experts, k, groups, top_groups;
  int32_t score;      /* mp_score */
  int32_t two;        /* 0: a group's value is its largest, else the sum of its two largest */
  int32_t normalise;
  float scale;
};

/* chosen [tokens, k], ascending; weights [tokens, k]; scores [tokens, experts]; margin [tokens], the last score + bias
 * that was chosen less the best one of the allowed groups that was not: 0 where none is left and where it is not finite.
 * bias [experts] or NULL. given [tokens, k] or NULL: experts in place of a choice, which chosen gets; margin is then 0. */
int32_t mp_route(
    void* stream, const struct mp_routing* routing, const float* logits, const float* bias, const int64_t* given,
    int64_t* chosen, float* weights, float* scores, float* margin);

/* dlogits [tokens, experts] from the gradients of the weights [tokens, k] and of the scores [tokens, experts]; either
 * may be NULL. Nothing flows through the choice. */
int32_t mp_route_backward(
    void* stream, const struct mp_routing* routing, const float* scores, const int64_t* chosen, const float* dweights,
    const float* dscores, float* dlogits);

#ifdef __cplusplus
}

/* Whether the sizes can be served. */
inline bool mp_routing_fits(const mp_routing& r) {
  if (r.tokens < 0 || r.experts < 1 || r.experts > MP_MOST_EXPERTS) return false;
  if (r.groups < 1 || r.groups > MP_MOST_ROUTED || r.experts % r.groups != 0) return false;
  const int32_t size = r.experts / r.groups;
  return r.top_groups >= 1 && r.top_groups <= r.groups && (r.two == 0 || r.groups == 1 || size >= 2) && r.k >= 1 &&
         r.k <= MP_MOST_ROUTED && r.k <= r.top_groups * size;
}
#endif
#endif

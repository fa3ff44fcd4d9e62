"""What ranks exchange for a layer: keys and values of shared sequences, rows of experts."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from megatron_port.core.model.spec import LayerSpec, MixerSpec
from megatron_port.ext.experts.spec import MoESpec
from megatron_port.ext.mixers.recurrent_spec import RecurrentSpec
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.rates import Cost, Links, Rates, Span, span


# Context parallelism: what ranks that share a sequence exchange in each layer's attention, and in how many seconds.
#
# A rank holds s / cp positions. Its queries need the keys and values of the positions before them
# (``layout.cp_method``):
#
# * ``gather``: keys and values of the whole sequence, an all-gather; their gradients, a reduce-scatter;
# * ``heads``: queries, keys and values change from s / cp positions of all the rank's heads to all positions of some of
#   them in one all-to-all, results back in another; as many backward;
# * ``ring``: keys and values travel from rank to rank in cp − 1 hops, each beside the attention of one block; backward
#   with their gradients, in full width, which make one hop more to come home.
#
# How evenly the ranks work is ``plan.exchanges``.
@dataclass(frozen=True)
class HeadBytes:
    """Bytes of a layer's queries (as of its results), and of its keys and values together, of the positions that a rank
    holds in a micro-batch."""

    queries: float
    keys_values: float
    sent: float
    """Keys and values sent where they are exchanged by heads, with copies where there are fewer heads than ranks."""


def head_bytes(case: Case, layer: LayerSpec) -> HeadBytes:
    """Return the bytes of a rank's own heads."""
    attention = layer.mixer.attention
    assert attention is not None, "other mixers exchange no keys"
    groups = attention.groups
    each = case.model.seq_length / case.cp * case.micro_batch * groups.head_size * case.width
    held = groups.held(case.tp) / case.tp
    return HeadBytes(each * groups.heads / case.tp, 2 * each * held, 2 * each * max(held, case.cp))


def context_group(case: Case, links: Links) -> Span:
    """Return the span of the ranks that share a sequence: each next tensor-parallel group."""
    return span(links.machine, case.cp, case.tp)


def passed_bytes(case: Case, mixer: MixerSpec, *, kept: bool = False) -> float:
    """Return the bytes of all ranks' rows and states that each of them gathers for a mixer with a state; with those
    that it keeps beside them."""
    narrow, wide, beside = mixer.passed
    if isinstance(mixer, RecurrentSpec):  # every tensor-parallel rank has all rows that units share
        narrow += (case.tp - 1) * (mixer.kernel - 1) * mixer.shared_convolved
    runs = 1 if case.cp_order == "contiguous" else 2
    if case.cp_order == "balanced" and case.document:  # at most, where no two blocks are neighbours
        from megatron_port.ext.context.balance import block_size  # with numpy

        runs = case.model.seq_length // case.cp // block_size(case.model.seq_length, case.cp)
    return case.cp * runs * case.micro_batch / case.tp * (narrow * case.width + (wide + beside * kept) * case.wide)


def context_bytes(case: Case, layer: LayerSpec) -> dict[str, float]:
    """Return the bytes of the buffers that a layer hands to the collectives of its mixer in the forward and the
    backward pass of a micro-batch, by kind."""
    if len(layer.mixer.parts) > 1:
        found = [context_bytes(case, replace(layer, mixer=part)) for part in layer.mixer.parts]
        kinds = dict.fromkeys(kind for one in found for kind in one)
        return {kind: sum(one.get(kind, 0.0) for one in found) for kind in kinds}
    if layer.mixer.attention is None:
        every = passed_bytes(case, layer.mixer)
        return {"all-gather": (1 + (case.recompute == "full")) * every, "reduce-scatter": every}
    own, again = head_bytes(case, layer), case.recompute != "none"
    if case.cp_method == "gather":
        return {"all-gather": (1 + again) * case.cp * own.keys_values, "reduce-scatter": case.cp * own.keys_values}
    if case.cp_method == "heads":
        return {"all-to-all": (2 + again) * (2 * own.queries + own.sent)}
    gradients = own.keys_values / case.width * case.wide
    hops = case.cp - 1
    return {"send": (2 + again) * hops * own.keys_values + (hops + 1) * gradients}


def context_cost(
    case: Case, layer: LayerSpec, rates: Rates, links: Links, core: tuple[float, float], *, again: bool
) -> Cost:
    """Seconds of the exchange of one layer that its attention does not hide, and of what arranges its tensors.

    ``core``: of the attention itself, forward and backward. ``again``: recompute repeats the forward's exchange.
    """
    if case.cp == 1:
        return Cost()
    if layer.mixer.attention is None:  # what a run does to a state takes as long as its result
        each = links.collective(passed_bytes(case, layer.mixer), context_group(case, links), kind="half")
        once = Cost(*core, forward_context=each, backward_context=each)
        return once + forward_again(once) if case.recompute == "full" else once
    method = {"gather": _gathered, "heads": _by_heads, "ring": _in_ring}[case.cp_method]
    found = method(case, head_bytes(case, layer), rates, links, core, again)
    return found + forward_again(found) if again else found


def forward_again(cost: Cost) -> Cost:
    """Return what the forward part of an exchange costs a backward pass that repeats it."""
    return Cost(backward=cost.forward, backward_context=cost.forward_context)


def _gathered(case: Case, own: HeadBytes, rates: Rates, links: Links, core: tuple[float, float], again: bool) -> Cost:
    """The whole keys and values are put in the order of their positions, and so are their gradients."""
    if (blocks := case.engine.block_attention(case, own, rates, links, core)) is not None:
        return blocks
    whole = case.cp * own.keys_values
    each = links.collective(whole, context_group(case, links), kind="half")
    order = rates.stream(2 * whole, 2)
    return Cost(order, order, forward_context=each, backward_context=each)


def _by_heads(case: Case, own: HeadBytes, rates: Rates, links: Links, core: tuple[float, float], again: bool) -> Cost:
    """Queries, keys and values go together, results come back; both are packed before they are sent and put in order
    when they have come."""
    group, sizes = context_group(case, links), (own.queries + own.sent, own.queries)
    each = sum(links.all_to_all(size, group) for size in sizes)
    packed = rates.stream(4 * sum(sizes), 2 * len(sizes))
    return Cost(packed, packed, forward_context=each, backward_context=each)


def _in_ring(case: Case, own: HeadBytes, rates: Rates, links: Links, core: tuple[float, float], again: bool) -> Cost:
    """Each hop runs beside the attention of the block that is there; partial results are merged in fp32."""
    hops, group = case.cp - 1, context_group(case, links)
    gradients = own.keys_values / case.width * case.wide
    forward = hops * max(links.hop(own.keys_values, group) - core[0] / case.cp, 0.0)
    backward = hops * max(links.hop(own.keys_values + gradients, group) - core[1] / case.cp, 0.0)
    merged = rates.stream(hops * own.queries / case.width * 3 * case.wide, hops)
    summed = rates.stream(hops * 3 * gradients, hops)
    return Cost(
        merged, summed, forward_context=forward, backward_context=backward + links.hop(gradients, group),
    )


# How evenly ranks that share a sequence divide its attention: the work of the busiest, by the mean.
#
# The query at position i of its document sees min(i + 1, window) keys, so late positions are work and early ones are
# not. ``contiguous`` gives the last rank 2 − 1/cp times the mean; ``zigzag`` pairs chunk i of 2·cp with the i-th from
# the end, which is even as long as nothing but the causal mask limits what a query sees; ``balanced`` is the same
# without documents, and with them deals out blocks by their work, which is taken as even. For the others the mean
# over drawn samples is taken then, with lengths from an exponential distribution. All ranks wait for the busiest in
# each layer and micro-batch.

ORDERS = ("contiguous", "zigzag", "balanced")
DRAWS = 32
"""Micro-batches over which the mean is taken where there are documents."""


@lru_cache(maxsize=4096)
def work_imbalance(order: str, cp: int, seq: int, window: int = 0, document: float = 0.0, samples: int = 1) -> float:
    """Return the attention work of the busiest of ``cp`` ranks over the mean.

    ``window``: keys that a query sees at most; 0: all before it. ``document``: mean length of the document that a token
    is in; 0: the sample is one. ``samples``: of a micro-batch, which share an order.

    Raises:
        ValueError: no such order.
    """
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; one of {', '.join(ORDERS)}")
    alone = not document or document >= seq
    if cp == 1 or (order == "balanced" and not alone):
        return 1.0
    if alone:
        return _busiest(order, cp, seq, [_work(seq, window, [0])])
    draw = random.Random(0)
    found = []
    for _ in range(DRAWS):
        # The document that a token is in is twice as long, in the mean over tokens, as one that is drawn.
        starts = [_starts(seq, document / 2, draw) for _ in range(samples)]
        found.append(_busiest(order, cp, seq, [_work(seq, window, one) for one in starts]))
    return sum(found) / DRAWS


Work = Callable[[float], float]
"""Position → work of all positions before it."""


def _starts(seq: int, mean: float, draw: random.Random) -> list[int]:
    """First positions of a sample's documents. The first of them began before the sample."""
    out, at = [0], draw.expovariate(1 / mean)
    while at < seq:
        out.append(int(at))
        at += max(draw.expovariate(1 / mean), 1.0)
    return out


def _work(seq: int, window: int, starts: list[int]) -> Work:
    """Work before a position of a sample with documents from ``starts`` on."""
    def within(length: float) -> float:
        if not window or length <= window:
            return length * length / 2
        return window * (length - window / 2)

    before = [0.0]
    for start, stop in pairwise([*starts, seq]):
        before.append(before[-1] + within(stop - start))

    def until(position: float) -> float:
        i = bisect_right(starts, position) - 1
        return before[i] + within(position - starts[i])

    return until


def _busiest(order: str, cp: int, seq: int, works: list[Work]) -> float:
    count = cp if order == "contiguous" else 2 * cp
    ends = [seq * i / count for i in range(count + 1)]
    each = [sum(work(b) - work(a) for work in works) for a, b in pairwise(ends)]
    loads = each if order == "contiguous" else [each[i] + each[-1 - i] for i in range(cp)]
    return max(loads) * cp / sum(loads)


# Layers of experts on a rank: the rows that its experts take, the bytes that it sends, and their seconds.
#
# Each tensor-parallel rank sends its own share of a micro-batch's tokens, k rows each, to the ranks that hold the
# experts (``experts.experts``); results come back the same way. So a forward pass exchanges 2·k·h·w bytes per token, a
# backward pass as many. Ranks wait for the one that has most rows: ``Case.imbalance`` times the mean.

HOST_WAIT = 20e-6
"""Seconds for which a device is idle while the host learns how many rows come and starts the next kernels: an
estimate."""
ROUTER_PASSES = 4
"""Passes over the scores of all experts in fp32: softmax, choice, and the balance loss."""


@dataclass(frozen=True)
class Routed:
    """Sizes of a layer of experts for one micro-batch on one rank."""

    tokens: float
    """Tokens of its own share, which it routes."""
    sent: float
    """Rows that it sends to experts: of each token one for each of its experts, those dropped left out."""
    rows: float
    """Rows that the experts of the busiest rank take."""
    experts: float
    """Experts on a rank."""

    @property
    def each(self) -> float:
        """Rows of an expert, on average."""
        return self.rows / self.experts


def routed(case: Case, moe: MoESpec, *, balanced: bool = False) -> Routed:
    """Return the sizes of a layer; ``balanced``: as if all ranks had as many rows."""
    model = case.model
    own = model.seq_length / case.cp * case.micro_batch / case.tp
    capacity = model.moe.capacity_factor
    sent = own * moe.top_k * (min(1.0, capacity) if capacity else 1.0)
    uneven = 1.0 if balanced or case.ep == 1 else case.imbalance
    if capacity:
        uneven = min(uneven, max(capacity, 1.0))
    return Routed(own, sent, sent * case.etp * uneven, moe.num_experts / case.ep)


def group_of(case: Case, links: Links) -> Span:
    """Return the span of the ranks among which the experts of a layer are divided."""
    return span(links.machine, case.ep, case.etp)


def exchange_seconds(case: Case, moe: MoESpec, links: Links) -> float:
    """Seconds of one all-to-all of rows, and under ``etp`` of gathering them for the ranks that divide an expert."""
    sizes, group = routed(case, moe), group_of(case, links)
    row = case.model.hidden_size * case.width
    busiest = sizes.rows / case.etp * row  # into the rank that has most, or out of it on their way back
    outside = case.engine.sent_outside(case, moe, group, busiest)
    gathered = links.collective(sizes.rows * row, span(links.machine, case.etp, 1), kind="half")
    return links.all_to_all(busiest, group, outside) + gathered


def expert_cost(case: Case, moe: MoESpec, rates: Rates, links: Links) -> Cost:
    """Router, exchange, permutation and products of a layer's experts; what every token passes beside them is not here.
    Nothing of the exchange is hidden, but by weight passes that fill it (``plan.step``)."""
    sizes, w = routed(case, moe), case.width
    both = (moe.experts.up.product(case.etp), moe.experts.down.product(case.etp))
    pw = 1 if case.dtype == "fp8" else w
    products = inputs = weights = 0.0
    for columns, inner in both:
        products += rates.product(sizes.each, columns, inner, width=pw, batch=sizes.experts)
        inputs += rates.product(sizes.each, inner, columns, width=pw, batch=sizes.experts, exact=True)
        weights += rates.product(inner, columns, sizes.each, width=pw, batch=sizes.experts, exact=True)
    held = sizes.experts * sum(columns * inner for columns, inner in both)
    if case.dtype == "fp8":  # as the products of the other layers (plan.layer)
        cast = 4.0 if case.fp8 != "none" else case.engine.cast_bytes
        products += rates.stream(cast * (sizes.rows * (both[0][1] + both[1][1]) + held / case.micro_batches), 4)
        inputs += rates.stream(cast * sizes.rows * (both[0][0] + both[1][0]), 2)
    accumulate = rates.stream(held * case.engine.accumulate_traffic, 2)
    if case.fine_tuning.enabled:  # frozen matrices have no gradient
        weights = accumulate = 0.0
    route, route_back = _router_seconds(case, moe, rates, sizes.tokens)
    light, light_back = _movement(case, moe, rates, sizes)
    each = exchange_seconds(case, moe, links)
    wait = links.all_to_all(8.0 * moe.num_experts, group_of(case, links)) + HOST_WAIT
    return Cost(
        forward=products + route + light, backward=inputs + weights + accumulate + route_back + light_back,
        forward_exchange=2 * each + wait, backward_exchange=2 * each, fillable=2 * each,
    )


def _router_seconds(case: Case, moe: MoESpec, rates: Rates, tokens: float) -> tuple[float, float]:
    """The product with the router in fp32, of the rank's own tokens, and the choice from its scores."""
    h, e, w = case.model.hidden_size, moe.num_experts, case.width
    wide = max(case.wide, 4)
    cast = tokens * h * (w + wide)
    scores = tokens * e * wide * ROUTER_PASSES
    forward = rates.product(tokens, e, h, width=wide) + rates.stream(cast + scores, 4)
    backward = rates.product(tokens, h, e, width=wide)
    if not case.fine_tuning.enabled:
        backward += rates.product(h, e, tokens, width=wide)
    return forward, backward + rates.stream(cast + scores, 4)


def _movement(case: Case, moe: MoESpec, rates: Rates, sizes: Routed) -> tuple[float, float]:
    """Passes over rows: sorted by expert before they leave and after they came, the activation, the way back, the sum
    of a token's results; backward the same, and the weights' gradients."""
    w, h = case.width, case.model.hidden_size
    row, gates = h * w, moe.experts.up.packed
    ffn = moe.experts.down.inputs / case.etp * w
    sort = 2 * sizes.rows * row if case.ep > 1 and sizes.experts > 1 else 0.0
    leave = (sizes.tokens + sizes.sent) * row
    forward = 2 * leave + 2 * sort + sizes.rows * ffn * (gates + 1)
    backward = 2 * leave + sizes.sent * row + 2 * sort + sizes.rows * ffn * (2 * gates + 1)
    kernels = 3 + (2 if sort else 0)
    return rates.stream(forward, kernels), rates.stream(backward, kernels + 1)

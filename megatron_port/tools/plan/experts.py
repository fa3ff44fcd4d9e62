"""Layers of experts on a rank: the rows that its experts take, the bytes that it sends, and their seconds.

Each tensor-parallel rank sends its own share of a micro-batch's tokens, k rows each, to the ranks that hold the experts
(``layers.experts``); results come back the same way. So a forward pass exchanges 2·k·h·w bytes per token, a backward
pass as many. Ranks wait for the one that has most rows: ``Case.imbalance`` times the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.core.model.moe_spec import MoESpec
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.cost import Cost
from megatron_port.tools.plan.links import Links, Span, span
from megatron_port.tools.plan.rates import Rates

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
    Nothing of the exchange is hidden, but by weight passes that fill it (``plan.timeline``)."""
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

"""Context parallelism: what ranks that share a sequence exchange in each layer's attention, and in how many seconds.

A rank holds s / cp positions. Its queries need the keys and values of the positions before them (``layout.cp_method``):

* ``gather``: keys and values of the whole sequence, an all-gather; their gradients, a reduce-scatter;
* ``heads``: queries, keys and values change from s / cp positions of all the rank's heads to all positions of some of
  them in one all-to-all, results back in another; as many backward;
* ``ring``: keys and values travel from rank to rank in cp − 1 hops, each beside the attention of one block; backward
  with their gradients, in full width, which make one hop more to come home.

How evenly the ranks work is ``plan.context_balance``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.core.model.spec import LayerSpec
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.cost import Cost
from megatron_port.tools.plan.links import Links, Span, span
from megatron_port.tools.plan.rates import Rates


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
    assert attention is not None, "config.mixer refuses context parallelism of other mixers"
    groups = attention.groups
    each = case.model.seq_length / case.cp * case.micro_batch * groups.head_size * case.width
    held = groups.held(case.tp) / case.tp
    return HeadBytes(each * groups.heads / case.tp, 2 * each * held, 2 * each * max(held, case.cp))


def context_group(case: Case, links: Links) -> Span:
    """Return the span of the ranks that share a sequence: each next tensor-parallel group."""
    return span(links.machine, case.cp, case.tp)


def context_bytes(case: Case, layer: LayerSpec) -> dict[str, float]:
    """Return the bytes of the buffers that a layer hands to the collectives of its attention in the forward and the
    backward pass of a micro-batch, by kind."""
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

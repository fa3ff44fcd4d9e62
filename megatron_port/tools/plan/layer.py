"""Seconds of one transformer layer, of the embedding and of the head, for one micro-batch on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_port.core.model.ops import Site
from megatron_port.core.model.spec import LayerSpec, LinearSpec, MLPSpec, PredictionSpec
from megatron_port.ext.experts.spec import moe_of
from megatron_port.ext.memory.sites import REPLICATED, choice
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.chunk import site_bytes, stream_of
from megatron_port.tools.plan.elements import stage_kinds
from megatron_port.tools.plan.exchanges import (
    context_cost,
    exchange_seconds,
    expert_cost,
    forward_again,
    work_imbalance,
)
from megatron_port.tools.plan.meter import uses_tables
from megatron_port.tools.plan.operations import adapter_seconds
from megatron_port.tools.plan.rates import Cost, Links, Rates, Span

# What this program's 8-bit products (precision.fp8) add to a plan: passes over memory, and copies of the weights.
#
# torch's casts are its ops, one after the other: an operand is read for its largest element (2 bytes per element),
# multiplied (2 + 2) and rounded (2 + 1); for a product that sums over its other dimension it is transposed in 8 bits
# (1 + 1). Own casts read it for its largest element (2), and once more for the values and, in the same pass, their
# transpose (2 + 1 + 1); rows stay in registers in between (2 + 1).

@dataclass(frozen=True)
class Casts:
    """A provider's casts of a bf16 operand, each (bytes per element, kernels launched)."""

    tensor: tuple[float, int]
    """With one scale."""
    both: tuple[float, int]
    """With one scale, and transposed."""
    again: tuple[float, int]
    """Transposed alone, its scale known."""
    rows: tuple[float, int]
    """With a scale for each row."""
    columns: tuple[float, int]
    """Transposed, with a scale for each column."""


TORCH = Casts(tensor=(9.0, 7), both=(11.0, 8), again=(9.0, 4), rows=(9.0, 8), columns=(11.0, 9))
OWN = Casts(tensor=(5.0, 2), both=(6.0, 2), again=(3.0, 1), rows=(3.0, 1), columns=(5.0, 3))
WIDE_SUM = 16.0
"""Bytes an element of a weight gradient: an fp32 product is written, read and added to the sum in a pass of its own."""

MatmulShapes = Sequence[tuple[float, float, float]]
"""[rows, columns, inner] of each linear's forward product."""


def cast_seconds(case: Case, rates: Rates, products: MatmulShapes) -> tuple[float, float]:
    """Seconds of a layer's casts in a forward and in a backward of one micro-batch.

    The weights', made once per step, are shared among its micro-batches. Without the sum of ``WIDE_SUM``.
    """
    casts = OWN if case.quantise == "own" else TORCH
    count, share = len(products), 1 / case.micro_batches
    inputs, gradients = sum(r * k for r, _, k in products), sum(r * c for r, c, _ in products)
    weights = sum(c * k for _, c, k in products)

    def seconds(*made: tuple[tuple[float, int], float, float]) -> float:
        """Return the seconds of casts, each (cast, elements, share of them that a micro-batch pays for)."""
        return sum(part * rates.stream(cast[0] * elements, cast[1] * count) for cast, elements, part in made)

    if case.fp8 == "rowwise":
        return (
            seconds((casts.rows, inputs, 1.0), (casts.rows, weights, share)),
            seconds((casts.rows, gradients, 1.0), (casts.columns, weights, share)),
        )
    return (
        seconds((casts.tensor, inputs, 1.0), (casts.both, weights, share)),
        seconds((casts.both, gradients, 1.0), (casts.again, inputs, 1.0)),
    )


def copy_bytes(case: Case, stage: int) -> float:
    """Return the bytes of the 8-bit copies of a stage's linear weights, plain and transposed, held during a step."""
    if case.fp8 == "none":
        return 0.0
    held = 0.0
    for layer, count in stage_kinds(case, stage):
        products = (linear.product(case.tp) for linear in layer.linears)
        held += count * sum(outputs * inputs for outputs, inputs in products)
    return 2.0 * held


CAUSAL = 0.5
"""Share of attention's operations that a fused causal kernel executes."""
ROUTER_CALLS = 8
"""Operations of the host for a router: its product, softmax, choice, balance loss (as ``experts.router`` has them)."""
MOVE_CALLS = 10
"""Operations of the host for rows sorted by expert, two exchanges with their counts, and a token's sum."""
LANE_INSTRUCTIONS = 64 * 1.7e9
"""Vector instructions of single lanes that a compute unit carries out in a second: all that a CU of CDNA2 can, half of
what an NVIDIA multiprocessor can (unverified)."""
HEAD_SIZES = (32, 64, 96, 128, 192, 256)
"""Head sizes that FlashAttention-2 has kernels for; others are padded to the next (the Composable Kernel build has
32, 64, 128 and 256: its OPT_DIM)."""


def attention_seconds(case: Case, layer: LayerSpec, rates: Rates) -> tuple[float, float]:
    """Forward and backward of the attention core (scores, softmax, product with v), nothing recomputed."""
    m, t, w = case.model, case.tp, case.width
    attention, parts = layer.mixer.attention, layer.mixer.parts
    if len(parts) > 1:
        found = [attention_seconds(case, replace(layer, mixer=part), rates) for part in parts]
        return sum(forward for forward, _ in found), sum(backward for _, backward in found)
    if attention is None:
        operations = layer.mixer.flops(m.seq_length, case.document) / m.seq_length * stream_of(case)[0] / t
        forward, backward = rates.core(operations, w)
        return forward, backward + forward * layer.mixer.recomputes
    groups = attention.groups
    heads = groups.heads / t * case.micro_batch
    queries, keys, d = m.seq_length / case.cp, float(m.seq_length), groups.head_size
    here = rates.attention_here(case.pass_dtype, keys, d) if case.cp == 1 else None
    if here is not None:
        seen = attention.scores_seen(m.seq_length, case.document) / m.seq_length**2
        flops = 2 * heads * queries * keys * (d + attention.value_size) * CAUSAL * seen
        return flops / here[0], 2.5 * flops / here[1]
    if case.flash and rates.attention_forward:
        padded = next((size for size in HEAD_SIZES if size >= d), d)
        seen = attention.scores_seen(m.seq_length, case.document) / m.seq_length**2
        value = attention.value_size
        if case.engine.attention == "flash2" or value == d:  # one size for all three
            values = padded
        else:
            values = next((size for size in HEAD_SIZES if size >= value), value)
        probabilities = heads * queries * keys * CAUSAL * seen * _imbalance(case, layer)
        flops = 2 * probabilities * (padded + values)
        length = queries if case.cp > 1 and case.cp_method == "ring" else keys  # of one kernel's queries
        document = min(case.document or length, length)
        forward, backward = rates.attention(case.engine.attention, document, padded)
        seconds = flops / forward + rates.launch, 2.5 * flops / backward + 2 * rates.launch
        return _drops_inside(probabilities, padded, rates, seconds) if case.drops_inside else seconds
    if case.cp > 1 and case.cp_method == "ring":  # in full width, and without the blocks that no query sees
        w, keys = case.wide, keys * (1.0 if case.cp_order == "contiguous" else 0.5 + 0.25 / case.cp)
    scores = heads * queries * keys
    product = rates.product(queries, keys, d, width=w, batch=heads) + rates.product(
        queries, d, keys, width=w, batch=heads
    )
    dropout = 1 if m.attention_dropout > 0 else 0
    # Softmax with scale and mask in one kernel: read, write; dropout: read, write, a byte of mask.
    forward = rates.stream(scores * 2 * w) + dropout * rates.dropout(scores, 2 * w + 1)
    backward = rates.stream(scores * (3 * w + dropout * (2 * w + 1)), 1 + dropout)
    return product + forward, 2 * product + backward


def _drops_inside(
    probabilities: float, head: int, rates: Rates, fused: tuple[float, float]
) -> tuple[float, float]:
    """Forward and backward of the own attention with dropout: no faster than others', and than its instructions.

    Instructions of a probability as ``kernels/budgets`` counts them on sm_90, without what only edges of a mask take
    (attention.cu; attention_backward.cu makes the mask twice). Never measured.
    """
    if not rates.units:
        return fused
    rate = rates.units * LANE_INSTRUCTIONS
    forward, backward = (24 + head / 8) * probabilities / rate, (60 + head / 3) * probabilities / rate
    return max(fused[0], forward), max(fused[1], backward) + rates.launch


def _imbalance(case: Case, layer: LayerSpec) -> float:
    """Attention work of the busiest of the ranks that share a sequence, by the mean."""
    if case.cp == 1 or case.cp_method == "heads":  # each has as many heads of all positions
        return 1.0
    m, mixer = case.model, layer.mixer
    chunk = mixer.attention.chunk if mixer.attention else 0  # as documents of that length
    document = min(case.document or m.seq_length, chunk) if chunk else case.document
    return work_imbalance(case.cp_order, case.cp, m.seq_length, mixer.window, document, case.micro_batch)


def _elementwise(case: Case, layer: LayerSpec, rates: Rates) -> tuple[float, float]:
    """Norms, biases, activation, dropout and residuals: bytes by what a fused kernel reads and writes."""
    m, t, w = case.model, case.tp, case.width
    mask = 1 if m.hidden_dropout > 0 else 0
    tokens, stream = stream_of(case)
    split = tokens / t
    dense = _dense_block(layer)
    gates, ffn = (dense.up.packed, dense.down.inputs) if dense is not None else (0, 0)
    heads = layer.mixer.packed_features(t)
    norm, add = stream * 2 * w, stream * (3 * w + mask)  # norm: read, write; add: two reads, write, mask
    hidden = split * ffn * w * (gates + 1)
    rotate = split * heads * 2 * w  # q, k, v split and rotated or copied
    attention = layer.mixer.attention
    if attention and case.cp == 1 and rates.attention_here(case.pass_dtype, m.seq_length, attention.groups.head_size):
        rotate = 0.0  # measured with the core
    forward = {
        "norm-forward": len(layer.norms) * norm, "add-forward": 2 * add, "activation-forward": hidden,
        "rotate": 0.0 if _splits_by_views(case, layer) else rotate,
    }
    # norm: gradient and input read, gradient written, once more for the weights' gradient; the others read one more.
    backward = {
        "norm-backward": len(layer.norms) * norm * 2, "add-backward": 2 * stream * (2 * w + mask),
        "activation-backward": split * ffn * w * (2 * gates + 1), "rotate": rotate,
    }
    if case.kernels != "own":  # the own norm's backward adds the branch's gradient
        backward["branches"] = len(layer.norms) * stream * 3 * w
    case.engine.add_passes(case, layer, forward, backward)
    kernels, kernels_back = 6, 9
    normalized = layer.mixer.normalized_features(t)
    if normalized:  # norms of query and key heads, and the fused projection put together again
        forward["heads"] = split * (normalized + heads) * 2 * w
        backward["heads"] = split * (normalized * 2 + heads) * 2 * w
        kernels, kernels_back = kernels + 3, kernels_back + 3
    return rates.passes(forward, kernels, case.pass_dtype), rates.passes(backward, kernels_back, case.pass_dtype)


def _splits_by_views(case: Case, layer: LayerSpec) -> bool:
    """Whether queries, keys and values are views of the projection, as the own kernels' are without rotation."""
    attention = layer.mixer.attention
    if attention is None:
        return True
    groups = attention.groups
    return case.kernels == "own" and not uses_tables(case.model, attention) and groups.heads == groups.groups


def _dense_block(layer: LayerSpec) -> MLPSpec | None:
    """The feed-forward block that every token passes, which tensor-parallel ranks divide."""
    return layer.mlp.dense_block


def _last_rank(layer: LayerSpec) -> int:
    """Rank of the factors of a layer's last product; 0: it is one matrix."""
    return layer.dense.down.rank if layer.mlp.linears else layer.mixer.output.rank


def layer_products(case: Case, layer: LayerSpec) -> list[tuple[float, float, float]]:
    """(rows, columns, inner) of a layer's products, those of routed tokens left out."""
    tokens = stream_of(case)[0]
    own = tokens / case.tp if case.sequence_parallel else tokens
    moe = moe_of(layer)
    linears = [linear for linear in layer.linears if moe is None or linear is not moe.router]
    return [(own if linear.parallel == "none" else tokens, *linear.product(case.tp)) for linear in linears]


def layer_cost(case: Case, layer: LayerSpec, rates: Rates, links: Links, group: Span) -> Cost:
    """One layer. Backward: two products for each of the forward's, the sum into the main gradient, recompute."""
    w, tokens = case.width, stream_of(case)[0]
    shapes = layer_products(case, layer)
    pw = 1 if case.dtype == "fp8" else w
    pieces = case.tp if case.in_pairs else case.tensor_chunks
    products = pieces * sum(rates.product(r / pieces, c, k, width=pw) for r, c, k in shapes)
    inputs = sum(rates.product(r, k, c, width=pw, exact=True, op="product-input") for r, c, k in shapes)
    narrow = pw if case.fp8 != "rowwise" else w  # rowwise leaves the weights' gradients in the compute dtype
    weights = sum(rates.product(k, c, r, width=narrow, exact=True, op="product-weight") for r, c, k in shapes)
    elements = sum(c * k for _, c, k in shapes)
    traffic = WIDE_SUM if case.fp8 == "tensorwise" else case.engine.accumulate_traffic
    accumulate = 0.0 if rates.adds_gradient(narrow) else rates.stream(elements * traffic, len(shapes))
    if case.fp8 != "none":
        casts_forward, casts_backward = cast_seconds(case, rates, shapes)
        products, inputs = products + casts_forward, inputs + casts_backward
    elif case.dtype == "fp8":
        casts_forward, casts_backward = case.engine.casts(case, rates, shapes)
        products, inputs = products + casts_forward, inputs + casts_backward
    if case.fine_tuning.enabled:  # frozen matrices have no gradient
        weights = accumulate = 0.0
        added, added_back = adapter_seconds(case, layer, rates, tokens)
        products, inputs = products + added, inputs + added_back
    core, core_back = attention_seconds(case, layer, rates)
    light, light_back = _elementwise(case, layer, rates)
    moe = moe_of(layer)
    expert = Cost() if moe is None else expert_cost(case, moe, rates, links)
    forward = products + core + light + expert.forward
    backward = inputs + weights + accumulate + core_back + light_back + expert.backward
    again, tensor_again, exchange_again = 0.0, 0.0, 0.0
    each = _tensor_collective(case, links, group)
    regions = _regions(case, layer)
    waits = _waits(case, links, group)
    once = each if waits is None else waits[0]
    # Without sequence parallelism the routed tokens are gathered at the end, and their gradients at the beginning.
    shares = each / 2 if moe_of(layer) is not None and not case.sequence_parallel else 0.0
    means = _head_means(case, layer, links, group)
    if case.recompute == "full":
        # The last collective of a layer is repeated only where something behind it was kept for the backward pass.
        skipped = 0.5 * once if case.sequence_parallel else once
        skipped = skipped if ends_at_product(case) and moe_of(layer) is None and not _last_rank(layer) else 0.0
        again, tensor_again = forward, regions[0] * once + shares + means - skipped
        exchange_again = case.engine.exchange_again(expert.forward_exchange, expert.backward_exchange)
    elif case.recompute == "selective" and not case.flash:
        again = core
    elif case.recompute == "experts" and moe is not None:
        exchange_again = case.engine.exchange_again(expert.forward_exchange, expert.backward_exchange)
        again = expert.forward
    again += case.engine.again(case, layer, rates)
    forward_each = _tensor_collective(case, links, group, case.tensor_chunks)
    hidden_forward, hidden_backward = _hidden(case, links, regions, each, forward_each, products, weights)
    shown = regions[0] * forward_each - hidden_forward, regions[1] * each - hidden_backward
    if waits is not None:
        shown = regions[0] * waits[0], regions[1] * waits[1]
    beside = _beside_exchange(case, layer, rates, links, forward, backward + again)
    starts = start_seconds(case, layer, rates)
    shared = _context(case, layer, rates, links, again=case.recompute in ("selective", "full"))
    return shared + Cost(
        forward=forward, backward=backward + again,
        forward_tensor=shown[0] + means + shares, backward_tensor=shown[1] + tensor_again + means + shares,
        forward_exchange=max(expert.forward_exchange - beside[0], 0.0),
        backward_exchange=max(expert.backward_exchange + exchange_again - beside[1], 0.0),
        fillable=max(expert.fillable - beside[0], 0.0), forward_starts=starts[0],
        backward_starts=starts[1] + ((rates.host_recompute or starts[0]) if case.recompute == "full" else 0.0),
    )


def _context(case: Case, layer: LayerSpec, rates: Rates, links: Links, *, again: bool) -> Cost:
    """Cost of what context-parallel ranks exchange for each part of the layer's mixer."""
    out = Cost()
    for part in layer.mixer.parts if case.cp > 1 else ():
        one = replace(layer, mixer=part)
        out += context_cost(case, one, rates, links, attention_seconds(case, one, rates), again=again)
    return out


def start_seconds(case: Case, layer: LayerSpec, rates: Rates) -> tuple[float, float]:
    """Seconds of the host to start a layer's forward and backward: its operations as the engine runs them, one by one.

    Counted as in the formulas above: linear layers, the attention core, norms and element-wise passes, collectives;
    the backward pass has two products for each of the forward's.
    """
    if case.engine.graphed or not rates.host:
        return 0.0, 0.0
    linears, core = case.engine.calls(len(layer_products(case, layer))), 1
    if not case.flash:
        core += 3 + 2 * (case.model.attention_dropout > 0)
    light, light_back = (9, 12) if layer.mixer.normalized_features(case.tp) else (6, 9)
    exchanges = 0
    if case.tp > 1:
        exchanges = (2 if case.sequence_parallel else 1) * (1 + (_dense_block(layer) is not None))
    forward = case.tensor_chunks * (linears + exchanges) + core + light
    backward = 2 * linears + core + 1 + light_back + exchanges
    moe = moe_of(layer)
    if moe is not None:
        grouped = case.engine.calls(1, moe.num_experts / case.ep)
        forward += ROUTER_CALLS + MOVE_CALLS + 2 * grouped
        backward += ROUTER_CALLS + MOVE_CALLS + 4 * grouped
    return forward * rates.host, backward * rates.host


def _beside_exchange(
    case: Case, layer: LayerSpec, rates: Rates, links: Links, forward: float, backward: float
) -> tuple[float, float]:
    """Seconds of a layer's compute that run beside its all-to-all, forward and backward."""
    overlap, moe = case.engine.expert_overlap, moe_of(layer)
    if moe is None or overlap == "none":
        return 0.0, 0.0
    if overlap == "passes":
        return forward, backward
    if overlap == "shared":
        tokens, linears = stream_of(case)[0], moe.shared.linears if moe.shared is not None else ()
        seconds = sum(rates.product(tokens, *linear.product(case.tp), width=case.width) for linear in linears)
        once = exchange_seconds(case, moe, links)
        hidden = min(once, seconds)
        return hidden, min(once, 2 * seconds) + (hidden if case.recompute == "full" else 0.0)
    raise ValueError(f"unknown expert_overlap {overlap!r}")


def partition_costs(case: Case, layer: LayerSpec, rates: Rates, links: Links, group: Span) -> dict[str, Cost]:
    """Return what partitioning each site over tensor-parallel ranks adds to its passes: its part copied, the whole
    gathered."""
    sizes = site_bytes(case, layer)
    out = {}
    for site in REPLICATED if case.tp > 1 else ():
        gathered = links.collective(sizes[site], group, kind="half") if sizes[site] else 0.0
        cost = Cost(forward=rates.stream(2 * sizes[site] / case.tp, 1), backward_tensor=gathered)
        out[choice(site, "partition")] = Cost() if case.sequence_parallel else cost
    return out


def site_costs(case: Case, layer: LayerSpec, rates: Rates, links: Links, group: Span) -> dict[Site, Cost]:
    """Return what recomputing each site of a layer adds to its backward pass: its operation's forward."""
    w, t = case.width, case.tp
    tokens, stream = stream_of(case)
    split, mask = tokens / t, 1 if case.model.hidden_dropout > 0 else 0
    fp8 = case.dtype == "fp8"

    def product(linear: LinearSpec) -> float:
        outputs, inputs = linear.product(t)
        casts = cast_seconds(case, rates, [(tokens, outputs, inputs)])[0] if case.fp8 != "none" else 0.0
        return rates.product(tokens, outputs, inputs, width=1 if fp8 else w) + casts

    norm = Cost(backward=rates.stream(stream * 2 * w, 1))
    # An entry gathers the sequence and an exit scatters it under sequence parallelism; else the exit sums it.
    each = _tensor_collective(case, links, group)
    entry, exit_ = (each / 2, each / 2) if case.sequence_parallel else (0.0, each)
    dense = layer.dense if layer.mlp.linears else None
    heads, ffn, gates = layer.mixer.packed_features(t), 0, 0
    if dense is not None:
        ffn, gates = dense.down.inputs, dense.up.packed
    normed = layer.mixer.normalized_features(t)
    moved = (0.0 if _splits_by_views(case, layer) else heads) + (normed + heads if normed else 0)
    rotated = rates.stream(split * moved * 2 * w, 1)
    output = [linear for part in layer.mixer.parts for linear in part.output.factors]
    up = () if dense is None else dense.up.factors
    projections = sum(product(linear) for linear in layer.mixer.projections)
    core = attention_seconds(case, layer, rates)
    keys = forward_again(_context(case, layer, rates, links, again=False))
    return {
        "norm1": norm, "norm2": norm,
        "qkv": Cost(
            backward=projections + rotated, backward_tensor=entry + _head_means(case, layer, links, group)
        ),
        "core": keys + Cost(backward=core[0]),
        "residual": Cost(
            backward=sum(map(product, output)) + rates.stream(stream * (3 * w + mask), 1), backward_tensor=exit_
        ),
        "hidden": Cost(backward=sum(map(product, up)), backward_tensor=entry),
        "activation": Cost(backward=rates.stream(split * ffn * w * (gates + 1), 1)),
    }


def ends_at_product(case: Case) -> bool:
    """Recompute of a layer stops at its last product: torch's checkpoint ends where nothing more was saved, and without
    dropout torch's ops save nothing of the residual add (the own kernel saves its keys)."""
    return case.kernels == "torch" and case.model.hidden_dropout == 0


def _regions(case: Case, layer: LayerSpec) -> tuple[float, float]:
    """Regions at whose ends tensor-parallel ranks exchange activations, by the width of the residual stream: in the
    forward pass those that leave (with sequence parallelism also those that enter), in the backward pass the others."""
    widths, hidden = layer.region_widths(case.model.hidden_size), case.model.hidden_size
    entries, exits = sum(a for a, _ in widths) / hidden, sum(b for _, b in widths) / hidden
    both = (entries + exits) / 2
    return (both, both) if case.sequence_parallel else (exits, entries)


def _tensor_collective(case: Case, links: Links, group: Span, chunks: int = 1) -> float:
    """One all-reduce of an activation, or with sequence parallelism the pair that stands for it, in so many parts."""
    size = stream_of(case)[0] * case.model.hidden_size * case.width / chunks
    if case.sequence_parallel:
        return chunks * 2 * links.collective(size, group, kind="half")
    return chunks * links.collective(size, group)


def _waits(case: Case, links: Links, group: Span) -> tuple[float, float] | None:
    """Seconds that a region's exchanges add to a forward and a backward pass where that was measured; None: it was not,
    or the program overlaps them in another way than this one."""
    if case.tensor_chunks > 1 or case.engine.tensor_overlap != "backward":
        return None
    size = stream_of(case)[0] * case.model.hidden_size * case.width
    forward, backward = (
        links.region(size, group, sequence=case.sequence_parallel, backward=way, dtype=case.pass_dtype)
        for way in (False, True)
    )
    return None if forward is None or backward is None else (forward, backward)


def _head_means(case: Case, layer: LayerSpec, links: Links, group: Span) -> float:
    """Seconds of the sums over ranks, one number per token each, of norms over the heads of all of them."""
    return layer.mixer.norms_over_ranks * links.collective(stream_of(case)[0] * 4, group) if case.tp > 1 else 0.0


def _hidden(
    case: Case, links: Links, regions: tuple[float, float], each: float, forward_each: float, products: float,
    weights: float,
) -> tuple[float, float]:
    """Tensor-parallel seconds that run beside products, in a layer's forward and backward (:func:`_regions`).

    With ``case.tensor_chunks`` k the forward's run beside the products of the k - 1 other parts.

    ``backward``: an all-reduce (or reduce-scatter) of the input's gradient beside the product for the weight's.
    ``tiled``: the product is cut into tp pieces, whose transfers hide behind the next piece's arithmetic: 1/tp stays.
    """
    overlap = case.engine.tensor_overlap
    if case.tp == 1 or overlap == "none":
        return 0.0, 0.0
    if overlap == "backward":
        beside, share = 1 - 1 / case.tensor_chunks, links.machine.calibration.overlap_share
        hidden = share * min(regions[0] * forward_each, products) * beside
        back = share * min(regions[1] * each / (2 if case.sequence_parallel else 1), weights)
        # Under sequence parallelism also the second gathering of the input, which `each` leaves out.
        again = regions[1] * each / 2 if case.sequence_parallel else 0.0
        return hidden, back - (1 - share) * again
    if overlap == "tiled":
        once, share = each * (1 - 1 / case.tp), links.machine.calibration.overlap_share
        return share * min(regions[0] * once, products), share * min(regions[1] * once, 2 * weights)
    raise ValueError(f"unknown tensor_overlap {overlap!r}")


def head_cost(case: Case, rates: Rates, links: Links, group: Span) -> Cost:
    """Logits and loss: a product with the table, and passes over logits in the compute dtype and fp32; in chunks
    (``memory.chunked_head``) a weight's gradient is added to its sum for each."""
    m, w = case.model, case.width
    tokens, columns = m.seq_length / case.cp * case.micro_batch, case.padded_vocab / case.tp
    rows = min(case.head_chunk or tokens, tokens)
    parts, frozen = tokens / rows, case.fine_tuning.enabled
    product = parts * rates.product(rows, columns, m.hidden_size, width=w)
    back = parts * rates.product(rows, m.hidden_size, columns, width=w, op="product-input")
    back += 0.0 if frozen else parts * rates.product(m.hidden_size, columns, rows, width=w, op="product-weight")
    back += product if case.head_chunk else 0.0  # the logits are made again
    loss, loss_back = _loss(case, rates, tokens * columns)
    each = _tensor_collective(case, links, group)
    small = 3 * links.collective(tokens * 4, group)
    return Cost(
        forward=product + loss,
        backward=back + loss_back + (
            0.0 if frozen or rates.adds_gradient(w)
            else parts * rates.stream(m.hidden_size * columns * case.engine.accumulate_traffic)
        ),
        forward_tensor=small + (each / 2 if case.sequence_parallel else 0.0),
        backward_tensor=each,
        forward_starts=rates.host_micro_batch / 4, backward_starts=rates.host_micro_batch / 4,
    )


def _loss(case: Case, rates: Rates, logits: float) -> tuple[float, float]:
    """Forward and backward of the loss. The own kernel reads the logits once, and once more to write their gradients
    over them; torch's passes: cast to fp32 (2 + 4 bytes), maximum (4), shifted exponential (4 + 4) and sum (4);
    backward: scaled, cast (14). A table's rates are of the latter's bytes, whoever was measured."""
    w = case.width
    if case.kernels == "own" and not rates.measured("loss-forward", case.pass_dtype):
        return rates.stream(logits * w), rates.stream(logits * 2 * w)
    return (
        rates.passes({"loss-forward": logits * 22}, 5, case.pass_dtype),
        rates.passes({"loss-backward": logits * 14}, 3, case.pass_dtype),
    )


def embedding_cost(case: Case, rates: Rates, links: Links, group: Span) -> Cost:
    """Rows gathered, summed over tensor-parallel ranks, and their gradient scattered."""
    m, w = case.model, case.width
    tokens = m.seq_length / case.cp * case.micro_batch
    size = tokens * m.hidden_size * w
    each = _tensor_collective(case, links, group)
    half = each / 2 if case.sequence_parallel else 0.0  # scattered forward, gathered backward
    return Cost(
        forward=rates.stream(4 * size, 4), backward=rates.stream(4 * size, 3), forward_tensor=each - half,
        backward_tensor=half, forward_starts=rates.host_micro_batch / 4, backward_starts=rates.host_micro_batch / 4,
    )


def prediction_cost(case: Case, part: PredictionSpec, rates: Rates, links: Links, group: Span) -> Cost:
    """Seconds of a module that predicts further tokens: its rows, the projection, its layer, its logits. Norms and the
    concatenation are passes over the residual stream that are left out."""
    m, w = case.model, case.width
    tokens = m.seq_length / case.cp * case.micro_batch / (case.tp if case.sequence_parallel else 1)
    outputs, inputs = part.projection.outputs, part.projection.inputs
    projection = Cost(
        rates.product(tokens, outputs, inputs, width=w),
        rates.product(tokens, inputs, outputs, width=w) + rates.product(outputs, inputs, tokens, width=w)
        + rates.stream(outputs * inputs * case.engine.accumulate_traffic),
    )
    parts = (
        embedding_cost(case, rates, links, group), layer_cost(case, part.layer, rates, links, group),
        head_cost(case, rates, links, group),
    )
    return sum(parts, projection)

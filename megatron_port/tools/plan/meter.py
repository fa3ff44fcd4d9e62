"""Memory of a layer's passes, from its operations (``model.ops``): what each allocates, keeps and needs, by its kind.

The meter runs the list that the modules run, on values that are blocks of memory (``plan.operations``), and lets go of
them where the forward pass does. ``tests/unit/test_plan_ranks.py`` compares it with the allocations of real ranks, to 2
% of a rank's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.model.ops import INPUT, Op, Site, last_uses
from megatron_port.core.model.spec import AttentionSpec, GroupedAttentionSpec, LayerSpec, MixerSpec, MLPSpec
from megatron_port.ext.experts.spec import MoESpec
from megatron_port.ext.memory.sites import SITES
from megatron_port.ext.mixers.latent_spec import LatentAttentionSpec, LatentSpec
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.exchanges import Routed, passed_bytes, routed
from megatron_port.tools.plan.operations import (
    Block,
    Meter,
    Sizes,
    Tape,
    Value,
    drop,
    enter,
    gated,
    gelu,
    leave_by,
    linear,
    normalize,
    product,
    saved_input,
    tuned_linear,
)

# Memory of attention between its projections: one fused kernel, or scores written out (programs of
# ``plan.operations``), and what context-parallel ranks that divide the positions do around it, by method.
# Memory of attention between its projections: one fused kernel, or scores written out (programs of
# ``plan.operations``), and what context-parallel ranks that divide the positions do around it, by method.

@dataclass(frozen=True)
class Heads:
    """Bytes of a rank's queries, keys, scores."""

    q: float
    k: float
    """Keys of the positions that the rank holds."""
    all_k: float
    """Keys that its attention sees: the whole sequence where context-parallel ranks gather them."""
    scores: float
    square: float
    """Pairs of its queries' and its keys' positions: a mask has so many bytes."""
    grouped: bool
    """Several query heads read one key head."""
    masked: bool
    capped: bool
    """Scores are soft-capped."""
    rows: bool
    """Queries are some positions of the sequence, and some may see no key."""


def heads_of(s: Sizes, spec: AttentionSpec) -> Heads:
    groups, tp, w = spec.groups, s.case.tp, s.case.width
    tokens = s.tokens / tp
    k, cp, seq = tokens * groups.held(tp) * groups.head_size * w, s.case.cp, s.case.model.seq_length
    method = s.case.cp_method if cp > 1 else ""
    return Heads(
        q=tokens * groups.heads * groups.head_size * w, k=k, all_k=k * cp if method == "gather" else k,
        scores=groups.heads / tp * seq * s.tokens * w, square=seq * seq / (cp if method != "heads" else 1),
        grouped=groups.heads > groups.held(tp), masked=spec.is_masked(seq) or method == "gather",
        capped=spec.softcap > 0, rows=method == "gather",
    )


def fused_core(t: Tape, s: Sizes, h: Heads, q: Value, k: Value, v: Value, *, rotated: bool = True) -> Value:
    """One kernel that stores no scores: the output and the log-sum-exp of each row stay. The own kernel keeps
    two values of a row, makes a third, and writes gradients into the packed one if queries and keys are not
    ``rotated``."""
    row = h.q / s.case.width / s.case.model.head_size * 4
    own = s.case.drops_inside
    rows = t.block(2 * row if own else row)
    out = t.block(h.q)
    packed = h.q + 2 * h.k

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        along = t.block(row if own else 0.0)
        parts = t.block(0.0 if own and not rotated else packed)
        whole = t.block(packed)
        del parts, along
        return [whole]

    def apart(grad: Block, saved: list[Block]) -> list[Block | None]:
        along = t.block(row if own else 0.0)
        grads: list[Block | None] = [t.block(h.q), t.block(h.all_k), t.block(h.all_k)]
        del along
        return grads

    if h.rows:
        return t.note(out, [q, k, v], apart, [q.block, k.block, v.block, out, rows])
    return t.note(out, [q], backward, [q.block, out, rows])


def scores_core(t: Tape, s: Sizes, h: Heads, q: Value, k: Value, v: Value) -> Value:
    """``backend.attention.math_attention_with``: products, softmax in full precision, dropout."""
    q_size = h.q
    grouped = t.note(t.block(q_size), [q], lambda grad, saved: [t.block(q_size)])
    if h.grouped:
        grouped = t.note(t.block(q_size), [grouped], lambda grad, saved: [grad])
    scores = t.note(
        product(t, s, h.q, h.all_k, h.scores), [grouped, k],
        lambda grad, saved: [product(t, s, h.scores, h.all_k, h.q), product(t, s, h.scores, h.q, h.all_k)],
        [grouped.block, k.block],
    )
    probs = _softmax(t, s, h, scores)
    if s.case.model.attention_dropout > 0:
        probs = drop(t, s, probs) if h.masked else _drop_probabilities(t, s, probs)

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        return [product(t, s, h.q, h.all_k, h.scores), product(t, s, h.scores, h.q, h.all_k)]

    out = t.note(product(t, s, h.scores, h.all_k, h.q), [probs, v], backward, [probs.block, v.block])
    return t.note(t.block(q_size), [out], lambda grad, saved: [grad])


def _softmax(t: Tape, s: Sizes, h: Heads, scores: Value) -> Value:
    size, wide = h.scores, h.scores * s.ratio
    if h.masked:
        return _masked_softmax(t, s, h, scores)
    if not s.torch:
        return t.note(t.block(size), [scores], lambda grad, saved: [t.block(size)], [scores.block])
    later = t.block(h.square)
    masked = t.note(t.block(size), [scores], lambda grad, saved: [t.block(size)], [later])
    if s.ratio > 1:
        t.meter.need(wide, wide)
    block = t.block(wide)
    probs = t.note(block, [masked], lambda grad, saved: [t.block(wide)], [block])
    if s.ratio == 1:
        return probs
    return t.note(t.block(size), [probs], lambda grad, saved: [t.block(wide)])


def _masked_softmax(t: Tape, s: Sizes, h: Heads, scores: Value) -> Value:
    """``layers.attention.visible_softmax``, in fp32."""
    size, wide = h.scores, h.scores * s.ratio
    values = scores
    if s.ratio > 1:
        values = t.note(t.block(wide), [values], lambda grad, saved: [t.block(size)])
    if h.capped:
        values = t.note(t.block(wide), [values], lambda grad, saved: [t.block(wide)])
        bent = t.block(wide)
        values = t.note(bent, [values], lambda grad, saved: [t.block(wide)], [bent])
        del bent
        values = t.note(t.block(wide), [values], lambda grad, saved: [t.block(wide)])
    hidden = t.block(h.square)
    values = t.note(t.block(wide), [values], lambda grad, saved: [t.block(wide)], [hidden])
    del hidden
    block = t.block(wide)
    probs = t.note(block, [values], lambda grad, saved: [t.block(wide)], [block])
    del block
    if s.ratio > 1:
        probs = t.note(t.block(size), [probs], lambda grad, saved: [t.block(wide)])
    if not h.rows:
        return probs
    return t.note(t.block(size), [probs], lambda grad, saved: [t.block(size)])


def _drop_probabilities(t: Tape, s: Sizes, probs: Value) -> Value:
    if s.torch:
        return drop(t, s, probs)
    size = probs.size
    masks = [t.block(size / s.case.width * s.mask)] if s.mask else []
    return t.note(t.block(size), [probs], lambda grad, saved: [t.block(size)], masks)


def context_core(t: Tape, s: Sizes, h: Heads, heads: tuple[Value, ...]) -> Value:
    """Attention of a rank's queries to what it may see of the whole sequence."""
    program = {"gather": _with_gathered_keys, "heads": _with_all_positions, "ring": _in_ring}[s.case.cp_method]
    if s.case.recompute == "selective":
        return t.checkpoint(lambda tape, *heads: program(tape, s, h, *heads), *heads)
    return program(t, s, h, *heads)


def _with_gathered_keys(t: Tape, s: Sizes, h: Heads, q: Value, k: Value, v: Value) -> Value:
    """``context.attention.GatherKeys``."""
    program = fused_core if s.case.flash else scores_core
    return program(t, s, h, q, _gathered(t, s, h, k), _gathered(t, s, h, v))


def _gathered(t: Tape, s: Sizes, h: Heads, x: Value) -> Value:
    """Keys or values of all positions: the ranks' own, one after another, are put in the sequence's order."""
    return _moved(t, s, x, h.k, h.all_k)


def _moved(t: Tape, s: Sizes, x: Value, before: float, after: float, *, to_order: bool = True) -> Value:
    """What a collective makes of ``before`` bytes, put in the sequence's order behind it, or taken from that order
    before it; backward the other way round."""
    moved = s.case.cp_order != "contiguous"

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        return [_collective(t, after, before, first=moved and to_order, last=moved and not to_order)]

    out = _collective(t, before, after, first=moved and not to_order, last=moved and to_order)
    return t.note(out, [x], backward)


def _collective(t: Tape, before: float, after: float, *, first: bool, last: bool) -> Block:
    """The result of a collective; rows are rearranged ``first``, or those of its result ``last``."""
    arranged = t.block(before) if first else None
    out = t.block(after)
    del arranged
    return t.block(after) if last else out


def _with_all_positions(t: Tape, s: Sizes, h: Heads, q: Value, k: Value, v: Value) -> Value:
    """``context.attention.ExchangeHeads``: all positions of some heads, in tensors as large as the rank's own."""
    each = max(h.k, h.k * s.case.cp / s.held_keys)  # copies, where there are fewer heads of keys than ranks
    whole = h.q + 2 * each
    packed = t.note(
        t.block(whole), [q, k, v], lambda grad, saved: [t.block(h.q), t.block(h.k), t.block(h.k)]
    )
    packed = _moved(t, s, packed, whole, whole)
    q, k, v = t.split(packed, lambda grad, saved: [t.block(whole)], 3)
    h = replace(h, k=each, all_k=each)
    out = (fused_core if s.case.flash else scores_core)(t, s, h, q, k, v)
    out = _moved(t, s, out, h.q, h.q, to_order=False)
    return t.note(t.block(h.q), [out], lambda grad, saved: [t.block(h.q)])


def _in_ring(t: Tape, s: Sizes, h: Heads, q: Value, k: Value, v: Value) -> Value:
    """``context.attention.RingKeys``: two windows of keys and values, partial results in full width."""
    wide, rows = s.ratio, h.q / s.case.width / s.case.model.head_size * s.case.wide
    runs = 1 if s.case.cp_order == "contiguous" else 2
    block = 0.0 if s.case.flash else h.scores / s.case.cp / runs * wide
    operands = (h.q / runs + 2 * h.k) * wide
    forth, back = [3 * block, operands, h.q / runs * wide], [5 * block, 2 * operands]
    if s.case.flash and not s.case.on_cpu:
        # torch's flash attention: a part's result and its share of the whole; gradients, those of keys also for each
        # query's head, and the kernel's wide sum.
        each = h.q / runs
        forth, back = [each, each * wide], [each * (1 + wide), 2 * h.k, 2 * h.q * h.grouped]

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        windows = t.block(4 * h.k), t.block(2 * 2 * h.k * wide)
        gradient = t.block(h.q * wide)
        t.meter.need(*back)
        del windows, gradient
        return [t.block(h.q), t.block(h.k), t.block(h.k)]

    merged = t.block(h.q * wide), t.block(2 * rows)
    windows = t.block(4 * h.k)
    t.meter.need(*forth)
    del windows
    out = t.block(h.q) if wide > 1 else merged[0]
    return t.note(out, [q, k, v], backward, [q.block, k.block, v.block, out, merged[1]])


# Memory of queries, keys and values, from the projection on, and of attention itself (rules of ``plan.meter``).

def heads(t: Tape, s: Sizes, op: Op, x: Value) -> tuple[Value, ...]:
    """``SelfAttention.core_arguments``: queries, keys and values; one value where a kernel takes them packed."""
    of_kind: dict[str, Callable[..., Value]] = {"latent heads": _latent_project, "gated heads": _without_gates}
    project = of_kind.get(op.kind, _project)
    return _split_or_packed(t, s, op.part, project(t, s, op.part, x))


def _split_or_packed(t: Tape, s: Sizes, spec: AttentionSpec, y: Value) -> tuple[Value, ...]:
    h, rotary = heads_of(s, spec), uses_tables(s.case.model, spec)
    if s.case.cp > 1 or (s.torch and not s.case.flash):
        return _split(t, s, h, y, rotary=rotary)
    return (t.note(t.block(y.size), [y], lambda grad, saved: [t.block(h.q + 2 * h.k)]) if rotary else y,)


def attend(t: Tape, s: Sizes, op: Op, *heads: Value) -> Value:
    """``SelfAttention.attend_to``, which may be run again in the backward pass; values are padded where they are
    smaller than keys."""
    spec: AttentionSpec = op.part
    h, whole = heads_of(s, spec), 3 // len(heads)

    def core(t: Tape, *heads: Value) -> Value:
        return scores_core(t, s, h, *(heads * whole))

    if s.case.cp > 1:
        out = context_core(t, s, h, heads)
    elif s.case.flash:
        out = fused_core(t, s, h, *(heads * whole), rotated=uses_tables(s.case.model, spec))
    elif s.case.recompute == "selective":
        out = t.checkpoint(core, *heads)
    else:
        out = core(t, *heads)
    if op.kind != "padded scores":
        return out
    size = out.size
    values = size * spec.value_size / spec.groups.head_size
    return t.note(t.block(values), [out], lambda grad, saved: [t.block(size)])


def _project(t: Tape, s: Sizes, spec: GroupedAttentionSpec, x: Value) -> Value:
    """The packed projection, with normed heads where the model has them."""
    y = enter(t, s, x, spec.qkv)
    features = spec.normalized_features(s.case.tp)
    if not features:
        return y
    size, normed = y.size, s.tokens / s.case.tp * features * s.case.width
    heads = t.note(t.block(normed), [y], lambda grad, saved: [t.block(size)])
    norm = spec.normed_heads
    assert norm is not None
    heads = normalize(t, s, heads, norm)[0]
    return t.note(t.block(size), [heads, y], lambda grad, saved: [t.block(normed), grad])


def _without_gates(t: Tape, s: Sizes, spec: GroupedAttentionSpec, y: Value) -> Value:
    """``GatedAttention.project``: queries from among their gates, keys and values, put together."""
    size, each = y.size, s.tokens / s.case.tp * s.case.width * spec.groups.head_size
    queries, keys = each * spec.groups.heads, each * spec.groups.held(s.case.tp)
    q, k, v = t.split(y, lambda grad, saved: [t.block(size)], 3)
    norms = spec.query_norm, spec.key_norm
    q = t.note(q.block if norms[0] is None else t.block(queries), [q], lambda grad, saved: [t.block(2 * queries)])
    if norms[0] is not None and norms[1] is not None:
        q = normalize(t, s, q, norms[0])[0]
        k = normalize(t, s, t.note(t.block(keys), [k], lambda grad, saved: [grad]), norms[1])[0]
    return t.note(t.block(queries + 2 * keys), [q, k, v], lambda grad, saved: [grad, grad, grad])


def _latent_project(t: Tape, s: Sizes, spec: LatentAttentionSpec, x: Value) -> Value:
    """``LatentAttention.project``: latents, their norms, heads from them, all put together."""
    latent = spec.latent
    low, multiply = x, tuned_linear if s.case.fine_tuning.enabled else linear
    if latent.query_down is not None and latent.query_norm is not None:
        low = normalize(t, s, multiply(t, s, x, latent.query_down), latent.query_norm)[0]
    query = multiply(t, s, low, latent.query_up)
    own, shared = _apart(t, s, multiply(t, s, x, latent.kv_down), latent)
    whole = multiply(t, s, normalize(t, s, own, latent.kv_norm)[0], latent.kv_up)
    if s.case.sequence_parallel:
        size = shared.size
        shared = t.note(t.block(size * s.case.tp), [shared], lambda grad, saved: [t.block(size)])
    head = s.tokens / s.case.tp * spec.groups.heads * spec.groups.head_size * s.case.width
    of_shared, of_whole = shared.size, whole.size
    key = t.note(t.block(head), [shared, whole], lambda grad, saved: [t.block(of_shared), t.block(of_whole)])
    value = t.note(t.block(head), [whole], lambda grad, saved: [t.block(of_whole)])
    return t.note(t.block(3 * head), [query, key, value], lambda grad, saved: [t.block(head) for _ in range(3)])


def _apart(t: Tape, s: Sizes, y: Value, latent: LatentSpec) -> tuple[Value, Value]:
    """The latent and what all heads share, each a tensor of its own."""
    size, share = y.size, latent.rotary_size / latent.kv_down.outputs
    first, second = t.split(y, lambda grad, saved: [t.block(size)], 2)
    return (
        t.note(t.block(size * (1 - share)), [first], lambda grad, saved: [grad]),
        t.note(t.block(size * share), [second], lambda grad, saved: [grad]),
    )


def uses_tables(model: ModelConfig, spec: AttentionSpec) -> bool:
    """Return whether queries and keys are rotated, or multiplied by tables that hold attention_scale alone."""
    return spec.rotation != "none" or model.attention_scale > 0


def _split(t: Tape, s: Sizes, h: Heads, y: Value, *, rotary: bool) -> tuple[Value, Value, Value]:
    """torch's split of the packed projection: views, but for queries of several heads a group."""
    size = y.size

    q, k, v = t.split(y, lambda grad, saved: [t.block(size)], 3)
    if h.grouped:
        q = t.note(t.block(h.q), [q], lambda grad, saved: [grad])
    return (_rotate(t, s, q, h.q), _rotate(t, s, k, h.k), v) if rotary else (q, k, v)


def _rotate(t: Tape, s: Sizes, x: Value, size: float) -> Value:
    """``layers.fused.apply_rotary``: x · cos + turned x · sin; the tables are made for each call and kept. Other
    programs have one kernel for it, and one table for all layers."""
    model = s.case.model
    if s.case.kernels == "fused":
        return t.note(t.block(size), [x], lambda grad, saved: [t.block(size)])
    table = model.seq_length / s.case.cp * model.head_size * s.case.width
    cos, sin = t.block(table), t.block(table)
    first, second = t.split(x, lambda grad, saved: [t.block(size)], 2)
    straight = t.note(t.block(size), [x], lambda grad, saved: [t.block(size)], [cos])
    minus = t.note(t.block(size / 2), [second], lambda grad, saved: [t.block(size / 2)])
    turned = t.note(t.block(size), [minus, first], lambda grad, saved: [grad, grad])
    del minus
    other = t.note(t.block(size), [turned], lambda grad, saved: [t.block(size)], [sin])
    del turned
    return t.note(t.block(size), [straight, other], lambda grad, saved: [grad, grad])


# Memory of a layer of experts: router, rows on their way to the experts and back, products (rules of
# ``plan.meter``).

INDEX = 8
"""Bytes of an index (int64)."""


def share(t: Tape, s: Sizes, op: Op, x: Value) -> Value:
    """The rank's own tokens, as a view."""
    whole = x.size
    return t.note(x.block, [x], lambda grad, saved: [t.block(whole)]) if _divides(s) else x


def _divides(s: Sizes) -> bool:
    """Whether tensor-parallel ranks hold all tokens and take a share each."""
    return s.case.tp > 1 and not s.case.sequence_parallel


def _own(s: Sizes, spec: MoESpec) -> float:
    """Bytes of a rank's share of the tokens."""
    return routed(s.case, spec).tokens * s.case.model.hidden_size * s.case.width


def _need(t: Tape, s: Sizes, *sizes: float) -> None:
    """Count what torch's ops allocate in passing, and one kernel does not."""
    if s.torch:
        t.meter.need(*sizes)


def route(t: Tape, s: Sizes, op: Op, x: Value) -> Value:
    """``experts.router.Router``: the weights of the chosen experts, from scores of all in full precision."""
    spec: MoESpec = op.part
    case, sizes, own = s.case, routed(s.case, spec), _own(s, spec)
    scores, chosen = sizes.tokens * spec.num_experts * case.wide, sizes.tokens * spec.top_k
    widened = own * s.ratio if s.ratio > 1 else 0.0

    def of_logits(grad: Block, saved: list[Block]) -> list[Block | None]:
        t.meter.need(widened)
        return [t.block(own)]

    t.meter.need(widened, scores)
    frozen = case.fine_tuning.enabled
    logits = t.note(t.block(scores), [x], of_logits, [] if frozen else [x.block])
    kept = t.block(scores)
    probabilities = t.note(kept, [logits], lambda grad, saved: [t.block(scores)], [kept])
    _need(t, s, scores, scores * INDEX / case.wide)  # sorted
    experts = t.block(chosen * INDEX)
    if case.model.moe.score == "sigmoid" and case.model.moe.balance_loss != "none":
        share = t.block(scores)  # of each score in their sum, for the balance loss
        probabilities = t.note(kept, [probabilities], lambda grad, saved: [t.block(scores)], [share])
    weights = t.block(chosen * case.wide)
    return t.note(
        weights, [probabilities], lambda grad, saved: [t.block(scores)], [experts, weights, t.block(chosen * case.wide)]
    )


def dispatch(t: Tape, s: Sizes, op: Op, x: Value, route: Value) -> tuple[Value, Value]:
    """``experts.torch_ops.copies``: a row for each of a token's experts, sorted by expert; and where each row is."""
    sizes, own = routed(s.case, op.part), _own(s, op.part)
    place = Value(t.block(sizes.tokens * op.part.top_k * INDEX), constant=True)
    sent = sizes.sent * s.case.model.hidden_size * s.case.width

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        _need(t, s, own * s.ratio, own, own * s.ratio if s.ratio > 1 else 0.0)
        return [t.block(own)]

    return t.note(t.block(sent), [x], backward, [place.block]), place


def arrive(t: Tape, s: Sizes, op: Op, leaving: Value) -> tuple[Value, Value]:
    """Rows for this rank's experts, sorted by expert; and the exchange, which is on the host."""
    sizes, exchange = routed(s.case, op.part), Value(t.block(0.0), constant=True)
    if s.case.ep == 1:
        return leaving, exchange
    return _reordered(t, sizes, _exchanged(t, leaving, sizes.rows / sizes.sent)), exchange


def beside(t: Tape, s: Sizes, op: Op, shared: Value, x: Value) -> Value:
    """Bias and gate of the block beside the experts, which are left out."""
    return shared


def send_home(t: Tape, s: Sizes, op: Op, results: Value, exchange: Value) -> Value:
    """Results on the ranks of their tokens."""
    sizes = routed(s.case, op.part)
    return results if s.case.ep == 1 else _exchanged(t, _reordered(t, sizes, results), sizes.sent / sizes.rows)


def join_shares(t: Tape, s: Sizes, op: Op, out: Value, x: Value, *beside: Value) -> Value:
    """The tokens of all ranks, with what they pass ``beside`` the experts."""
    if _divides(s):
        size = out.size
        out = t.note(t.block(s.whole), [out], lambda grad, saved: [t.block(size)])
    if not beside:
        return out
    return t.note(t.block(out.size), [out, *beside], lambda grad, saved: [grad, grad])


def _exchanged(t: Tape, x: Value, change: float) -> Value:
    """Rows that arrive for those that leave."""
    before = x.size
    return t.note(t.block(before * change), [x], lambda grad, saved: [t.block(before)])


def _reordered(t: Tape, sizes: Routed, x: Value) -> Value:
    """Rows sorted by expert, or as they came."""
    size = x.size
    return t.note(t.block(size), [x], lambda grad, saved: [t.block(size)], [t.block(sizes.rows * INDEX)])


def combine(t: Tape, s: Sizes, op: Op, y: Value, weights: Value, place: Value) -> Value:
    """``experts.torch_ops.combined``: each token's sum of its experts' results."""
    own = _own(s, op.part)
    size, of_weights, wide = y.size, weights.size, own * s.ratio
    weighed = s.case.engine.weighs_activation
    narrow = own if s.ratio > 1 else 0.0

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        rows, factors = t.block(size), t.block(of_weights)
        _need(t, s, wide, wide, narrow)
        return [rows, factors]

    _need(t, s, wide, wide, wide, narrow)
    kept = [] if weighed else [y.block]
    return t.note(t.block(own), [y, weights], backward, [*kept, place.block, weights.block])


def activate(t: Tape, s: Sizes, op: Op, x: Value) -> Value:
    """``Experts.activate``; biases of experts are added by their products."""
    mlp: MLPSpec = op.part.experts
    return gated(t, s, x, mlp) if mlp.gated else gelu(t, s, x, mlp.activation, bias=False)


def grouped(t: Tape, s: Sizes, op: Op, x: Value, exchange: Value) -> Value:
    """Products of each expert with its rows."""
    mlp: MLPSpec = op.part.experts
    w, sizes, first = s.case.width, routed(s.case, op.part), op.kind == "experts up"
    outputs, inputs = (mlp.up if first else mlp.down).product(s.case.etp)
    size_in, size_out = x.size, x.size / inputs * outputs
    wide = s.widening / sizes.experts  # one expert after the other

    frozen = s.case.fine_tuning.enabled

    again = not first and s.case.engine.drops("moe_act")  # the activation's result is dropped and made again

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        if again:
            t.meter.need(size_in)
        dx = product(t, s, 0.0, 0.0, size_in)
        if frozen:
            return [dx]
        if t.defers:
            t.defer(grad, saved[0])
        else:
            t.meter.need(wide * size_out, wide * size_in, s.widening * w * inputs * outputs)
        return [dx]

    kept = t.block(0.0) if again else saved_input(t, s, x.block, made_again=False)
    return t.note(product(t, s, 0.0, 0.0, size_out), [x], backward, [] if frozen else [kept])


Rule = Callable[..., "Value | tuple[Value, ...]"]
"""(tape, sizes, operation, *values that it reads) → what it writes: one value, or several."""


def layer(t: Tape, s: Sizes, spec: LayerSpec, x: Value) -> Value:
    """``model.layers.TransformerLayer``, under the case's recompute policy."""
    if s.case.recompute == "full":
        return t.checkpoint(lambda tape, x: run(tape, s, spec.ops, x), x)
    return run(t, s, spec.ops, x)


def run(t: Tape, s: Sizes, ops: Sequence[Op], x: Value) -> Value:
    """Run operations on the input x; return what the last one writes."""
    values: dict[str, Value | tuple[Value, ...]] = {INPUT: x}
    for op, dead in zip(ops, last_uses(ops)):
        t.site = op.site
        _note(values, op, RULES.get(op.kind, _stated)(t, s, op, *_arguments(values, op)))
        for name in dead:
            del values[name]
    (out,) = values.values()
    assert isinstance(out, Value)
    return out


def metered_bytes(case: Case, spec: LayerSpec) -> dict[Site, float]:
    """Return the bytes that each site of a layer keeps of one micro-batch, its input among them: of the blocks that the
    backward pass reads, each under the site whose operation made it."""
    s, tape = Sizes(case), Tape(Meter())
    x = Value(tape.block(s.stream))
    run(tape, s, spec.ops, x)
    out: dict[Site, float] = dict.fromkeys(SITES, 0.0)
    for block in tape.kept_blocks():
        out[block.site] += block.size
    return out


def _stated(t: Tape, s: Sizes, op: Op, *inputs: Value) -> Value:
    """An operation without a rule: the memory that it states of itself (``Op.features``, ``keeps``, ``beside``,
    ``scratch``)."""
    each, sizes = s.tokens / s.case.tp * s.case.width, [x.size for x in inputs]
    rows = min(op.scratch_rows * s.case.micro_batch or s.tokens, s.tokens) / s.case.tp
    passing = [elements * rows * max(s.case.wide, 4) for elements in op.scratch]
    if rows < s.tokens / s.case.tp:  # the gradient of other rows waits
        passing[1] += sum(sizes) * rows / (s.tokens / s.case.tp)
    t.meter.need(passing[0])
    passed = passed_bytes(s.case, op.part, kept=True) if isinstance(op.part, MixerSpec) and s.case.cp > 1 else 0.0
    beside = t.block(op.beside * each + passed)
    out = t.block(op.features * each)
    blocks = {**{name: x.block for name, x in zip(op.reads, inputs)}, op.writes[0]: out}
    saved = [blocks[name] for name in op.keeps]
    if beside.size:
        saved.append(beside)

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        found: list[Block | None] = [t.block(size) for size in sizes]
        t.meter.need(passing[1])
        return found

    return t.note(out, inputs, backward, saved)


def _arguments(values: dict[str, Value | tuple[Value, ...]], op: Op) -> list[Value]:
    found = (values[name] for name in op.reads)
    return [part for value in found for part in (value if isinstance(value, tuple) else (value,))]


def _note(values: dict[str, Value | tuple[Value, ...]], op: Op, out: Value | tuple[Value, ...]) -> None:
    if len(op.writes) == 1:
        values[op.writes[0]] = out
    else:
        assert isinstance(out, tuple)
        values.update(zip(op.writes, out, strict=True))


def _add(t: Tape, s: Sizes, op: Op, x: Value, residual: Value) -> Value:
    """``ResidualStream.bias_dropout_add``."""
    p, size, bias = s.case.model.hidden_dropout, x.size, op.kind == "biased add"
    if s.torch or (p == 0 and not bias):
        if bias:
            x = t.note(t.block(size), [x], lambda grad, saved: [grad])
        if p > 0:
            x = drop(t, s, x)
        return t.note(t.block(size), [residual, x], lambda grad, saved: [grad, grad])
    masks = [t.block(size / s.case.width * s.mask)] if p > 0 and s.mask else []
    return t.note(
        t.block(size), [residual, x], lambda grad, saved: [grad, t.block(size) if p > 0 else grad], masks
    )


def _sum(t: Tape, s: Sizes, op: Op, x: Value, other: Value) -> Value:
    """``AttentionBesideRecurrent.summed``."""
    scaled = s.case.model.recurrent.attention_multiplier != 1.0
    return t.note(t.block(x.size), [x, other], lambda grad, saved: [t.block(x.size) if scaled else grad, grad])


def _norm(t: Tape, s: Sizes, op: Op, x: Value) -> tuple[Value, Value]:
    return normalize(t, s, x, op.part)


def _branch_norm(t: Tape, s: Sizes, op: Op, out: Value) -> Value:
    return normalize(t, s, out, op.part)[0]


def _bias(t: Tape, s: Sizes, op: Op, out: Value) -> Value:
    return t.note(t.block(out.size), [out], lambda grad, saved: [grad])


def _activation(t: Tape, s: Sizes, op: Op, x: Value) -> Value:
    return gated(t, s, x, op.part) if op.part.gated else gelu(t, s, x, op.part.activation, bias=op.part.up.bias)


def _experts(t: Tape, s: Sizes, op: Op, x: Value) -> Value:
    """``model.moe.MoE``. Programs that make its result again keep its input alone."""
    inner = op.part.inner_ops
    if s.case.recompute != "experts":  # other programs alone
        return run(t, s, inner, x)
    normed = s.case.engine.drops("layernorm") and op.reads[0].startswith("norm")  # made again, so it isn't kept either
    return t.checkpoint(lambda tape, x: run(tape, s, inner, x), x, made_again=normed)


RULES: dict[str, Rule] = {
    "norm": _norm, "branch norm": _branch_norm, "bias": _bias, "add": _add, "biased add": _add, "sum": _sum,
    "column": lambda t, s, op, x: enter(t, s, x, op.part), "row": lambda t, s, op, x: leave_by(t, s, x, op.part),
    "activation": _activation, "heads": heads, "latent heads": heads, "gated heads": heads,
    "scores": attend, "padded scores": attend, "experts": _experts,
    "share": share, "route": route, "dispatch": dispatch,
    "beside": beside, "arrive": arrive, "experts up": grouped,
    "experts activation": activate, "experts down": grouped,
    "send home": send_home, "combine": combine, "join shares": join_shares,
}
"""By kind; of others, an operation states its memory itself."""

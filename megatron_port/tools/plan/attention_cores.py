"""Memory of attention between its projections: one fused kernel, or scores written out (programs of ``plan.tape``),
and what context-parallel ranks that divide the positions do around it, by method."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_port.core.model.spec import AttentionSpec
from megatron_port.tools.plan.operations import Sizes, drop, product
from megatron_port.tools.plan.tape import Block, Tape, Value


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
    """``layers.context.GatherKeys``."""
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
    """``layers.context.ExchangeHeads``: all positions of some heads, in tensors as large as the rank's own."""
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
    """``layers.context.RingKeys``: two windows of keys and values, partial results in full width."""
    wide, rows = s.ratio, h.q / s.case.width / s.case.model.head_size * s.case.wide
    runs = 1 if s.case.cp_order == "contiguous" else 2
    block = 0.0 if s.case.flash else h.scores / s.case.cp / runs * wide
    operands = (h.q / runs + 2 * h.k) * wide

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        windows = t.block(4 * h.k), t.block(2 * 2 * h.k * wide)
        gradient = t.block(h.q * wide)
        t.meter.need(5 * block, 2 * operands)
        del windows, gradient
        return [t.block(h.q), t.block(h.k), t.block(h.k)]

    merged = t.block(h.q * wide), t.block(2 * rows)
    windows = t.block(4 * h.k)
    t.meter.need(3 * block, operands, h.q / runs * wide)
    del windows
    out = t.block(h.q) if wide > 1 else merged[0]
    return t.note(out, [q, k, v], backward, [q.block, k.block, v.block, out, merged[1]])

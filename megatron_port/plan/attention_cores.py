"""Memory of attention between its projections: one fused kernel, or scores written out (programs of ``plan.tape``)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.model.spec import LayerSpec
from megatron_port.plan.operations import Sizes, drop, product
from megatron_port.plan.tape import Block, Tape, Value


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


def heads_of(s: Sizes, spec: LayerSpec) -> Heads:
    groups, tp, w = spec.attention.groups, s.case.tp, s.case.width
    tokens = s.tokens / tp
    k, cp, seq = tokens * groups.held(tp) * groups.head_size * w, s.case.cp, s.case.model.seq_length
    method = s.case.cp_method if cp > 1 else ""
    return Heads(
        q=tokens * groups.heads * groups.head_size * w, k=k, all_k=k * cp if method == "gather" else k,
        scores=groups.heads / tp * seq * s.tokens * w, square=seq * seq / (cp if method != "heads" else 1),
        grouped=groups.heads > groups.held(tp), masked=spec.attention.is_masked(seq) or method == "gather",
        capped=spec.attention.softcap > 0, rows=method == "gather",
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
    """``backend.mask.visible_softmax``, in fp32."""
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

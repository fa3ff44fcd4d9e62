"""Memory of self-attention: projection, rotary positions, scores or a fused kernel (programs of ``plan.tape``)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.model.spec import LayerSpec
from megatron_port.plan.operations import Sizes, drop, leave, linear, normalize, product
from megatron_port.plan.tape import Block, Tape, Value


def attention(t: Tape, s: Sizes, spec: LayerSpec, x: Value) -> Value:
    out = _core(t, s, spec, _project(t, s, spec, x))
    y = linear(t, s, out, spec.attention.output)
    return leave(t, s, y)


def _project(t: Tape, s: Sizes, spec: LayerSpec, x: Value) -> Value:
    """The packed projection, with normed heads where the model has them."""
    y = linear(t, s, x, spec.attention.qkv)
    features = spec.attention.normalized_features(s.case.tp)
    if not features:
        return y
    size, normed = y.size, s.tokens / s.case.tp * features * s.case.width
    heads = t.note(t.block(normed), [y], lambda grad, saved: [t.block(size)])
    norm = spec.attention.query_norm or spec.attention.key_norm
    assert norm is not None
    heads = normalize(t, s, heads, norm)[0]
    return t.note(t.block(size), [heads, y], lambda grad, saved: [t.block(normed), grad])


@dataclass(frozen=True)
class _Heads:
    """Bytes of a rank's queries, keys, scores."""

    q: float
    k: float
    scores: float
    grouped: bool
    """Several query heads read one key head."""


def _heads(s: Sizes, spec: LayerSpec) -> _Heads:
    groups, tp, w = spec.attention.groups, s.case.tp, s.case.width
    tokens = s.tokens / tp
    return _Heads(
        q=tokens * groups.heads * groups.head_size * w, k=tokens * groups.held(tp) * groups.head_size * w,
        scores=groups.heads / tp * s.case.model.seq_length * s.tokens / s.case.cp * w,
        grouped=groups.heads > groups.held(tp),
    )


def _core(t: Tape, s: Sizes, spec: LayerSpec, y: Value) -> Value:
    """Attention of the packed projection; queries, keys and values are split from it, and rotated."""
    h, again = _heads(s, spec), s.case.recompute == "selective"
    rotary = s.case.model.position_embedding == "rope"
    if s.case.flash or not s.torch:
        if rotary:
            y = t.note(t.block(y.size), [y], lambda grad, saved: [t.block(h.q + 2 * h.k)])
        program = _fused_core if s.case.flash else _scores_core
        if again and not s.case.flash:
            return t.checkpoint(lambda tape, y: program(tape, s, h, y, y, y), y)
        return program(t, s, h, y, y, y)
    q, k, v = _split(t, s, h, y, rotary=rotary)
    if again:
        return t.checkpoint(lambda tape, q, k, v: _scores_core(tape, s, h, q, k, v), q, k, v)
    return _scores_core(t, s, h, q, k, v)


def _split(t: Tape, s: Sizes, h: _Heads, y: Value, *, rotary: bool) -> tuple[Value, Value, Value]:
    """torch's split of the packed projection: views, but for queries of several heads a group."""
    size = y.size

    q, k, v = t.split(y, lambda grad, saved: [t.block(size)], 3)
    if h.grouped:
        q = t.note(t.block(h.q), [q], lambda grad, saved: [grad])
    return (_rotate(t, s, q, h.q), _rotate(t, s, k, h.k), v) if rotary else (q, k, v)


def _rotate(t: Tape, s: Sizes, x: Value, size: float) -> Value:
    """``backend.fused.apply_rotary``: x · cos + turned x · sin; the tables are made for each call and kept."""
    model = s.case.model
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


def _fused_core(t: Tape, s: Sizes, h: _Heads, q: Value, k: Value, v: Value) -> Value:
    """One kernel that stores no scores: the output and the log-sum-exp of each row stay."""
    rows = t.block(h.q / s.case.width / s.case.model.head_size * 4)
    out = t.block(h.q)
    packed = h.q + 2 * h.k

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        parts = t.block(packed)
        whole = t.block(packed)
        del parts
        return [whole]

    return t.note(out, [q], backward, [q.block, out, rows])


def _scores_core(t: Tape, s: Sizes, h: _Heads, q: Value, k: Value, v: Value) -> Value:
    """``backend.attention.math_attention_with``: products, softmax in full precision, dropout."""
    q_size = h.q
    grouped = t.note(t.block(q_size), [q], lambda grad, saved: [t.block(q_size)])
    if h.grouped:
        grouped = t.note(t.block(q_size), [grouped], lambda grad, saved: [grad])
    scores = t.note(
        product(t, s, h.q, h.k, h.scores), [grouped, k],
        lambda grad, saved: [product(t, s, h.scores, h.k, h.q), product(t, s, h.scores, h.q, h.k)],
        [grouped.block, k.block],
    )
    probs = _softmax(t, s, h, scores)
    if s.case.model.attention_dropout > 0:
        probs = _drop_probabilities(t, s, probs)

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        return [product(t, s, h.q, h.k, h.scores), product(t, s, h.scores, h.q, h.k)]

    out = t.note(product(t, s, h.scores, h.k, h.q), [probs, v], backward, [probs.block, v.block])
    return t.note(t.block(q_size), [out], lambda grad, saved: [grad])


def _softmax(t: Tape, s: Sizes, h: _Heads, scores: Value) -> Value:
    size, wide = h.scores, h.scores * s.ratio
    if not s.torch:
        return t.note(t.block(size), [scores], lambda grad, saved: [t.block(size)], [scores.block])
    square = s.case.model.seq_length / s.case.cp * s.case.model.seq_length
    later = t.block(square)
    masked = t.note(t.block(size), [scores], lambda grad, saved: [t.block(size)], [later])
    if s.ratio > 1:
        t.meter.need(wide, wide)
    block = t.block(wide)
    probs = t.note(block, [masked], lambda grad, saved: [t.block(wide)], [block])
    if s.ratio == 1:
        return probs
    return t.note(t.block(size), [probs], lambda grad, saved: [t.block(wide)])


def _drop_probabilities(t: Tape, s: Sizes, probs: Value) -> Value:
    if s.torch:
        return drop(t, s, probs)
    size = probs.size
    masks = [t.block(size / s.case.width * s.mask)] if s.mask else []
    return t.note(t.block(size), [probs], lambda grad, saved: [t.block(size)], masks)

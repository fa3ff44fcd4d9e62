"""Memory of self-attention: projection, rotary positions, scores or a fused kernel (programs of ``plan.tape``)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.config.schema import ModelConfig
from megatron_port.model.spec import AttentionSpec, LatentSpec, LayerSpec
from megatron_port.plan.adapters import tuned_linear
from megatron_port.plan.operations import Sizes, drop, leave, linear, normalize, product
from megatron_port.plan.tape import Block, Tape, Value


def attention(t: Tape, s: Sizes, spec: LayerSpec, x: Value) -> Value:
    if spec.attention.latent is None:
        out = _core(t, s, spec, _project(t, s, spec, x))
    else:
        padded = _core(t, s, spec, _latent_project(t, s, spec.attention, spec.attention.latent, x))
        size = padded.size
        values = size * spec.attention.value_size / spec.attention.groups.head_size
        out = t.note(t.block(values), [padded], lambda grad, saved: [t.block(size)])
    y = (tuned_linear if s.case.fine_tuning.enabled else linear)(t, s, out, spec.attention.output)
    return leave(t, s, y)


def _project(t: Tape, s: Sizes, spec: LayerSpec, x: Value) -> Value:
    """The packed projection, with normed heads where the model has them."""
    assert spec.attention.qkv is not None
    y = (tuned_linear if s.case.fine_tuning.enabled else linear)(t, s, x, spec.attention.qkv)
    features = spec.attention.normalized_features(s.case.tp)
    if not features:
        return y
    size, normed = y.size, s.tokens / s.case.tp * features * s.case.width
    heads = t.note(t.block(normed), [y], lambda grad, saved: [t.block(size)])
    norm = spec.attention.query_norm or spec.attention.key_norm
    assert norm is not None
    heads = normalize(t, s, heads, norm)[0]
    return t.note(t.block(size), [heads, y], lambda grad, saved: [t.block(normed), grad])


def _latent_project(t: Tape, s: Sizes, spec: AttentionSpec, latent: LatentSpec, x: Value) -> Value:
    """``LatentAttention.project``: latents, their norms, heads from them, all put together."""
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


@dataclass(frozen=True)
class _Heads:
    """Bytes of a rank's queries, keys, scores."""

    q: float
    k: float
    """Of the positions that the rank holds."""
    all_k: float
    """Of those that its attention sees: of the whole sequence where context-parallel ranks gather them."""
    scores: float
    grouped: bool
    """Several query heads read one key head."""
    masked: bool
    capped: bool
    """Scores are soft-capped."""


def _heads(s: Sizes, spec: LayerSpec) -> _Heads:
    groups, tp, w = spec.attention.groups, s.case.tp, s.case.width
    tokens = s.tokens / tp
    k = tokens * groups.held(tp) * groups.head_size * w
    return _Heads(
        q=tokens * groups.heads * groups.head_size * w, k=k, all_k=k * s.case.cp,
        scores=groups.heads / tp * s.case.model.seq_length * s.tokens * w,
        grouped=groups.heads > groups.held(tp),
        masked=spec.attention.is_masked(s.case.model.seq_length) or s.case.cp > 1,
        capped=spec.attention.softcap > 0,
    )


def _core(t: Tape, s: Sizes, spec: LayerSpec, y: Value) -> Value:
    """Attention of the packed projection; queries, keys and values are split from it, and rotated."""
    h, again = _heads(s, spec), s.case.recompute == "selective"
    rotary = uses_tables(s.case.model, spec.attention)
    if s.case.cp > 1:
        return _context_core(t, s, h, _split(t, s, h, y, rotary=rotary))
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


def _context_core(t: Tape, s: Sizes, h: _Heads, heads: tuple[Value, Value, Value]) -> Value:
    """``parallel.context_attention``: keys and values of all positions are gathered for the queries of this rank."""
    def attend(t: Tape, q: Value, k: Value, v: Value) -> Value:
        program = _fused_core if s.case.flash else _scores_core
        return program(t, s, h, q, _gathered(t, s, h, k), _gathered(t, s, h, v))

    if s.case.recompute == "selective":
        return t.checkpoint(attend, *heads)
    return attend(t, *heads)


def _gathered(t: Tape, s: Sizes, h: _Heads, x: Value) -> Value:
    """Keys or values of all positions: the ranks' own, one after another, are put in the sequence's order."""
    size, whole, moved = h.k, h.all_k, s.case.cp_order != "contiguous"

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        arranged = t.block(whole) if moved else grad
        own = t.block(size)
        del arranged
        return [own]

    block = t.block(whole)
    if moved:
        block, arrived = t.block(whole), block
        del arrived
    return t.note(block, [x], backward)


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

    def apart(grad: Block, saved: list[Block]) -> list[Block | None]:
        return [t.block(h.q), t.block(h.all_k), t.block(h.all_k)]

    if s.case.cp > 1:
        return t.note(out, [q, k, v], apart, [q.block, k.block, v.block, out, rows])
    return t.note(out, [q], backward, [q.block, out, rows])


def _scores_core(t: Tape, s: Sizes, h: _Heads, q: Value, k: Value, v: Value) -> Value:
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


def _softmax(t: Tape, s: Sizes, h: _Heads, scores: Value) -> Value:
    size, wide = h.scores, h.scores * s.ratio
    if h.masked:
        return _masked_softmax(t, s, h, scores)
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


def _masked_softmax(t: Tape, s: Sizes, h: _Heads, scores: Value) -> Value:
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
    hidden = t.block(s.case.model.seq_length / s.case.cp * s.case.model.seq_length)
    values = t.note(t.block(wide), [values], lambda grad, saved: [t.block(wide)], [hidden])
    del hidden
    block = t.block(wide)
    probs = t.note(block, [values], lambda grad, saved: [t.block(wide)], [block])
    del block
    if s.ratio > 1:
        probs = t.note(t.block(size), [probs], lambda grad, saved: [t.block(wide)])
    if s.case.cp == 1:
        return probs
    return t.note(t.block(size), [probs], lambda grad, saved: [t.block(size)])  # rows that see no key


def _drop_probabilities(t: Tape, s: Sizes, probs: Value) -> Value:
    if s.torch:
        return drop(t, s, probs)
    size = probs.size
    masks = [t.block(size / s.case.width * s.mask)] if s.mask else []
    return t.note(t.block(size), [probs], lambda grad, saved: [t.block(size)], masks)

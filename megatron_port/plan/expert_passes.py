"""Memory of a layer of experts: router, rows on their way to the experts and back, products, what all tokens pass."""

from __future__ import annotations

from megatron_port.model.spec import MLPSpec, MoESpec
from megatron_port.plan.experts import Routed, routed
from megatron_port.plan.operations import Sizes, gated, gelu, product, saved_input
from megatron_port.plan.tape import Block, Tape, Value

INDEX = 8
"""Bytes of an index (int64)."""


def routed_experts(t: Tape, s: Sizes, spec: MoESpec, x: Value, beside: Value | None) -> Value:
    """``model.moe.MoE``: what the experts add to the residual stream of a rank's tokens, with what all tokens pass
    ``beside`` them."""
    case, sizes = s.case, routed(s.case, spec)
    apart, whole = case.tp > 1 and not case.sequence_parallel, x.size
    own = sizes.tokens * case.model.hidden_size * case.width
    if apart:  # a view of the rank's own tokens
        x = t.note(x.block, [x], lambda grad, saved: [t.block(whole)])
    weights = _router(t, s, spec, x, own)
    place = t.block(sizes.tokens * spec.top_k * INDEX)
    leaving = _copies(t, s, sizes, x, own, place)
    arrived = leaving if case.ep == 1 else _reordered(t, sizes, _exchanged(t, leaving, sizes.rows / sizes.sent))
    up = _grouped(t, s, sizes, arrived, spec.experts, first=True)
    del arrived
    active = gated(t, s, up, spec.experts) if spec.experts.gated else gelu(t, s, up, bias=False)
    del up
    down = _grouped(t, s, sizes, active, spec.experts, first=False)
    del active
    if case.ep > 1:
        down = _exchanged(t, _reordered(t, sizes, down), sizes.sent / sizes.rows)
    out = _combined(t, s, down, weights, place, own)
    del down, leaving
    if apart:
        out = t.note(t.block(whole), [out], lambda grad, saved: [t.block(own)])
    if beside is None:
        return out
    return t.note(t.block(out.size), [out, beside], lambda grad, saved: [grad, grad])


def _need(t: Tape, s: Sizes, *sizes: float) -> None:
    """Count what torch's ops allocate in passing, and one kernel does not."""
    if s.torch:
        t.meter.need(*sizes)


def _router(t: Tape, s: Sizes, spec: MoESpec, x: Value, own: float) -> Value:
    """``model.router.Router``: the weights of the chosen experts, from scores of all in full precision."""
    case, sizes = s.case, routed(s.case, spec)
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


def _copies(t: Tape, s: Sizes, sizes: Routed, x: Value, own: float, place: Block) -> Value:
    """``backend.expert_rows.copies``: a row for each of a token's experts, sorted by expert."""
    sent = sizes.sent * s.case.model.hidden_size * s.case.width

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        _need(t, s, own * s.ratio, own, own * s.ratio if s.ratio > 1 else 0.0)
        return [t.block(own)]

    return t.note(t.block(sent), [x], backward, [place])


def _exchanged(t: Tape, x: Value, change: float) -> Value:
    """Rows that arrive for those that leave."""
    before = x.size
    return t.note(t.block(before * change), [x], lambda grad, saved: [t.block(before)])


def _reordered(t: Tape, sizes: Routed, x: Value) -> Value:
    """Rows sorted by expert, or as they came."""
    size = x.size
    return t.note(t.block(size), [x], lambda grad, saved: [t.block(size)], [t.block(sizes.rows * INDEX)])


def _combined(t: Tape, s: Sizes, y: Value, weights: Value, place: Block, own: float) -> Value:
    """``backend.expert_rows.combined``: each token's sum of its experts' results."""
    size, of_weights, wide = y.size, weights.size, own * s.ratio
    weighed = s.case.engine.weighs_activation
    narrow = own if s.ratio > 1 else 0.0

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        rows, factors = t.block(size), t.block(of_weights)
        _need(t, s, wide, wide, narrow)
        return [rows, factors]

    _need(t, s, wide, wide, wide, narrow)
    kept = [] if weighed else [y.block]
    return t.note(t.block(own), [y, weights], backward, [*kept, place, weights.block])


def _grouped(t: Tape, s: Sizes, sizes: Routed, x: Value, mlp: MLPSpec, *, first: bool) -> Value:
    """Products of each expert with its rows."""
    w = s.case.width
    outputs, inputs = (mlp.up if first else mlp.down).product(s.case.etp)
    size_in, size_out = x.size, x.size / inputs * outputs
    wide = s.widening / sizes.experts  # one expert after the other

    frozen = s.case.fine_tuning.enabled

    again = not first and "moe_act" in s.case.modules  # the activation's result is dropped and made again

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

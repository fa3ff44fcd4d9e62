"""Memory of a layer of experts: router, rows on their way to the experts and back, products (rules of
``plan.meter``)."""

from __future__ import annotations

from megatron_port.core.model.moe_spec import MoESpec
from megatron_port.core.model.ops import Op
from megatron_port.core.model.spec import MLPSpec
from megatron_port.tools.plan.experts import Routed, routed
from megatron_port.tools.plan.operations import Sizes, gated, gelu, product, saved_input
from megatron_port.tools.plan.tape import Block, Tape, Value

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
    """``model.router.Router``: the weights of the chosen experts, from scores of all in full precision."""
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
    """``layers.expert_rows.copies``: a row for each of a token's experts, sorted by expert; and where each row is."""
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
    """``layers.expert_rows.combined``: each token's sum of its experts' results."""
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
    return gated(t, s, x, mlp) if mlp.gated else gelu(t, s, x, bias=False)


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

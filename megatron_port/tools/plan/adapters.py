"""What low-rank adapters add to a layer's passes on a rank: memory of the adapted products, and their seconds."""

from __future__ import annotations

from megatron_port.core.model.spec import LayerSpec, LinearSpec
from megatron_port.ext.weights.adapter_spec import AdapterSpec, adapter_spec, layer_adapters, parts_of
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.operations import Sizes, leave, linear, product
from megatron_port.tools.plan.rates import Rates
from megatron_port.tools.plan.tape import Block, Tape, Value


def rank_of(spec: AdapterSpec) -> int:
    """Return the rows of the A's of a linear's adapters together."""
    return spec.rank * len(spec.adapted)


def tuned_linear(t: Tape, s: Sizes, x: Value, linear: LinearSpec) -> Value:
    """A product with a frozen weight, beside which there may be adapters (``weights.adapter``)."""
    w, (outputs, inputs) = s.case.width, linear.product(s.case.tp)
    spec = adapter_spec(linear, s.case.fine_tuning)
    gathers = linear.parallel == "column" and s.case.sequence_parallel
    tokens = s.tokens / s.case.tp if linear.parallel == "none" and s.case.sequence_parallel else s.tokens
    size_in, size_out, weight = tokens * inputs * w, tokens * outputs * w, inputs * outputs * w
    rank = 0 if spec is None else rank_of(spec)
    low, drops = tokens * rank * w, s.case.fine_tuning.dropout > 0 and spec is not None
    constant = x.constant

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        full = t.block(size_in) if gathers and rank else None
        d_low = t.block(low)
        if constant:
            return [None]
        partial = product(t, s, size_out, weight, size_in)
        if rank:
            t.meter.need(size_in, *((size_in, size_in) if drops else ()))  # the second summand, dropped elements
        dx = t.block(size_in / s.case.tp) if gathers else partial
        del full, d_low
        return [dx]

    full = t.block(size_in) if gathers else None
    out = product(t, s, size_in, weight, size_out)
    kept: list[Block] = []
    if spec is not None:
        if drops:
            t.meter.need(size_in, size_in)
        kept = [x.block, t.block(low)]
        if len(parts_of(linear)) > 1:  # A's one below the other, B's in their rows and columns
            kept += [t.block(rank * inputs * w), t.block(rank * outputs * w)]
        t.meter.need(size_out)
    y = t.note(out, [x], backward, kept, trains=spec is not None)
    del full
    if spec is None or not spec.with_magnitude:
        return y
    return t.note(t.block(size_out), [y], lambda grad, saved: [t.block(size_out)], [y.block])


def enter(t: Tape, s: Sizes, x: Value, spec: LinearSpec) -> Value:
    """A product at the beginning of a tensor-parallel region, of one matrix or of two factors."""
    for factor in spec.factors:
        x = (tuned_linear if s.case.fine_tuning.enabled else linear)(t, s, x, factor)
    return x


def leave_by(t: Tape, s: Sizes, x: Value, spec: LinearSpec) -> Value:
    """A product at the end of a region and its sum over ranks, behind which the second of two factors follows."""
    low, *high = spec.factors
    y = leave(t, s, (tuned_linear if s.case.fine_tuning.enabled else linear)(t, s, x, low))
    return linear(t, s, y, high[0]) if high else y


def adapter_seconds(case: Case, layer: LayerSpec, rates: Rates, tokens: float) -> tuple[float, float]:
    """Return the seconds of a forward and a backward of a layer's adapters."""
    forward = backward = 0.0
    for spec in layer_adapters(layer, case.fine_tuning):
        outputs, inputs = spec.linear.product(case.tp)
        rank, w = rank_of(spec), case.width
        forward += rates.product(tokens, rank, inputs, width=w) + rates.product(tokens, outputs, rank, width=w)
        forward += rates.stream(3 * tokens * outputs * w)  # added to the product
        backward += rates.product(tokens, rank, outputs, width=w) + rates.product(tokens, inputs, rank, width=w)
        backward += rates.product(rank, inputs, tokens, width=w) + rates.product(outputs, rank, tokens, width=w)
        backward += rates.stream(3 * tokens * inputs * w)
        if spec.with_magnitude:  # the rows' lengths, and every output scaled
            forward += rates.stream((2 * tokens * outputs + outputs * inputs) * w, 2)
            backward += rates.stream(4 * tokens * outputs * w, 2)
    return forward, backward

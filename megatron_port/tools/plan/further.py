"""Modules that predict further tokens (``objectives.multi_token_layers``): memory of their passes, and seconds."""

from __future__ import annotations

from megatron_port.core.model.spec import PredictionSpec
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.cost import Cost
from megatron_port.tools.plan.ends import logits_loss, token_rows
from megatron_port.tools.plan.layer import embedding_cost, head_cost, layer_cost
from megatron_port.tools.plan.links import Links, Span
from megatron_port.tools.plan.meter import layer
from megatron_port.tools.plan.operations import Sizes, linear, normalize
from megatron_port.tools.plan.rates import Rates
from megatron_port.tools.plan.tape import Tape, Value


def prediction(t: Tape, s: Sizes, part: PredictionSpec, hidden: Value) -> tuple[Value, Value]:
    """Return the hidden states of a module and the losses of its logits; ``hidden``: of the depth before."""
    embedded = normalize(t, s, token_rows(t, s), part.embedding_norm)[0]
    hidden = normalize(t, s, hidden, part.hidden_norm)[0]
    # Each takes its half of the gradient, which is a view.
    both = t.note(t.block(embedded.size + hidden.size), [embedded, hidden], lambda grad, saved: [grad, grad])
    del embedded, hidden
    x = layer(t, s, part.layer, linear(t, s, both, part.projection))
    del both
    found = normalize(t, s, x, part.norm)[0]
    return found, logits_loss(t, s, found)


def prediction_cost(case: Case, part: PredictionSpec, rates: Rates, links: Links, group: Span) -> Cost:
    """Seconds of a module: its rows, the projection, its layer, its logits. Norms and the concatenation are passes over
    the residual stream that are left out."""
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

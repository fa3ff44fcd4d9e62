"""Memory of the embedding, the head and the loss as programs over blocks (``plan.tape``); of layers: ``plan.meter``."""

from __future__ import annotations

from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.spec import PredictionSpec
from megatron_port.tools.plan.meter import layer
from megatron_port.tools.plan.operations import Sizes, drop, leave, linear, matrix, normalize
from megatron_port.tools.plan.tape import Block, Tape, Value

LOSS_CHUNK = 1 << 22
"""Logits that torch's cross-entropy takes at a time (``backend.cross_entropy``)."""


def token_rows(t: Tape, s: Sizes) -> Value:
    """``layers.embedding.VocabParallelEmbedding``. Its tokens are not counted."""
    table = model_spec(s.case.model).embedding.word.local_numel(s.case.tp, s.case.padded_vocab) * s.case.width
    whole, native = s.whole, s.case.engine.name == "native"
    widened = whole * s.ratio if s.ratio > 1 and s.case.kernels == "torch" else 0.0

    def of_table(grad: Block, saved: list[Block]) -> list[Block | None]:
        if native and t.defers:
            t.defer(grad)
        elif native:
            t.meter.need(widened)  # rows are added to the sums
        else:
            t.meter.need(table, s.widening * table)
        return []

    x = t.note(t.block(whole), [], of_table, trains=not s.case.fine_tuning.enabled)
    if s.case.tp > 1:
        x = t.note(t.block(whole), [x], lambda grad, saved: [t.block(whole)])
        x = leave(t, s, x)
    return x


def embedding(t: Tape, s: Sizes) -> Value:
    """``model.layers.Embedding``: rows of the table, positions, dropout."""
    spec, w = model_spec(s.case.model).embedding, s.case.width
    x = token_rows(t, s)
    if spec.position is not None:
        positions = spec.position.numel * w

        def of_positions(grad: Block, saved: list[Block]) -> list[Block | None]:
            t.meter.need(positions, s.widening * positions)
            return [grad]

        x = t.note(t.block(x.size), [x], of_positions)
    if s.case.model.hidden_dropout > 0:
        if s.torch:
            return drop(t, s, x)
        masks = [t.block(x.size / w * s.mask)] if s.mask else []
        size = x.size
        return t.note(t.block(size), [x], lambda grad, saved: [t.block(size)], masks)
    return x


def _softcap(t: Tape, logits: Value) -> Value:
    """``Head.capped``: the hyperbolic tangent stays for its backward pass."""
    size = logits.size
    divided = t.note(t.block(size), [logits], lambda grad, saved: [t.block(size)])
    tanh = t.block(size)
    bent = t.note(tanh, [divided], lambda grad, saved: [t.block(size)], [tanh])
    del divided
    return t.note(t.block(size), [bent], lambda grad, saved: [t.block(size)])


def head(t: Tape, s: Sizes, x: Value) -> tuple[Value, Value]:
    """``model.layers.Head``: (the normed hidden states, the loss of the logits)."""
    normed = normalize(t, s, x, model_spec(s.case.model).head.norm)[0]
    return normed, logits_loss(t, s, normed)


def logits_loss(t: Tape, s: Sizes, normed: Value) -> Value:
    """Logits and their loss, whose gradient is written over them."""
    case = s.case
    logits = matrix(
        t, s, normed, case.model.hidden_size, case.padded_vocab / case.tp, bias=0.0, entry=True
    )
    del normed
    if case.model.logits_softcap > 0:
        logits = _softcap(t, logits)
    elements = logits.size / case.width
    wide = elements * 4 if case.engine.copies_logits else min(elements, LOSS_CHUNK) * case.wide
    torchs = case.kernels != "own" or case.engine.copies_logits

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        if torchs and s.ratio > 1:
            t.meter.need(wide)
        return [saved[0]]

    if torchs:
        t.meter.need(*([wide] * (2 if s.ratio > 1 and not case.engine.copies_logits else 1)))
    statistics = t.block(s.tokens * case.wide * 2)
    return t.note(t.block(s.tokens * case.wide), [logits], backward, [logits.block, statistics])


def prediction(t: Tape, s: Sizes, part: PredictionSpec, hidden: Value) -> tuple[Value, Value]:
    """A module that predicts further tokens: its hidden states and its loss; ``hidden``: of the depth before."""
    embedded = normalize(t, s, token_rows(t, s), part.embedding_norm)[0]
    hidden = normalize(t, s, hidden, part.hidden_norm)[0]
    # Each takes its half of the gradient, which is a view.
    both = t.note(t.block(embedded.size + hidden.size), [embedded, hidden], lambda grad, saved: [grad, grad])
    del embedded, hidden
    x = layer(t, s, part.layer, linear(t, s, both, part.projection))
    del both
    found = normalize(t, s, x, part.norm)[0]
    return found, logits_loss(t, s, found)

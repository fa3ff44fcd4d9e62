"""Forward and backward passes of embedding, layer and head as programs over memory (``plan.tape``).

Each function allocates what the module of its name allocates, in its order, and lets go of it where the module does:
Python's locals here stand for Python's locals there. ``tests/unit/test_plan_ranks.py`` compares them with the
allocations of real ranks, to 2 % of a rank's peak.
"""

from __future__ import annotations

from megatron_port.model.decoder_spec import model_spec
from megatron_port.model.spec import LayerSpec, MLPSpec, MoESpec, NormSpec
from megatron_port.plan.adapters import enter, leave_by
from megatron_port.plan.attention_passes import attention
from megatron_port.plan.expert_passes import routed_experts
from megatron_port.plan.operations import Sizes, drop, gated, gelu, leave, matrix, normalize
from megatron_port.plan.tape import Block, Tape, Value

LOSS_CHUNK = 1 << 22
"""Logits that torch's cross-entropy takes at a time (``backend.cross_entropy``)."""


def _join(t: Tape, s: Sizes, x: Value, residual: Value, *, bias: bool) -> Value:
    """``ResidualStream.bias_dropout_add``."""
    p, size = s.case.model.hidden_dropout, x.size
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


def layer(t: Tape, s: Sizes, spec: LayerSpec, x: Value) -> Value:
    """``model.layers.TransformerLayer``, under the case's recompute policy."""
    if s.case.recompute == "full":
        return t.checkpoint(lambda tape, x: _layer(tape, s, spec, x), x)
    return _layer(t, s, spec, x)


def _layer(t: Tape, s: Sizes, spec: LayerSpec, x: Value) -> Value:
    y = x if spec.norm1 is None else normalize(t, s, x, spec.norm1)[0]
    end = spec.moe is None and spec.dense.down.bias
    out, biased = _branch(t, s, attention(t, s, spec, y), spec.attention.output.bias, spec.post_norm1)
    if spec.parallel_residual:
        if spec.norm2 is not None:
            y = normalize(t, s, x, spec.norm2)[0]
        branch, branch_biased = _branch(t, s, _feed_forward(t, s, spec, y), end, spec.post_norm2)
        del y
        x = _join(t, s, out, x, bias=biased)
        return _join(t, s, branch, x, bias=branch_biased)
    if spec.norm2 is not None and not biased and s.case.model.hidden_dropout == 0:
        y, x = normalize(t, s, out, spec.norm2, x)
    else:
        x = _join(t, s, out, x, bias=biased)
        y = x if spec.norm2 is None else normalize(t, s, x, spec.norm2)[0]
    branch, branch_biased = _branch(t, s, _feed_forward(t, s, spec, y), end, spec.post_norm2)
    return _join(t, s, branch, x, bias=branch_biased)


def _branch(t: Tape, s: Sizes, out: Value, bias: bool, norm: NormSpec | None) -> tuple[Value, bool]:
    """``TransformerLayer._branch``: (a branch's result, whether its bias is yet to be added)."""
    if norm is None:
        return out, bias
    if bias:
        out = t.note(t.block(out.size), [out], lambda grad, saved: [grad])
    return normalize(t, s, out, norm)[0], False


def _feed_forward(t: Tape, s: Sizes, spec: LayerSpec, x: Value) -> Value:
    moe = spec.moe
    if moe is None:
        return _mlp(t, s, spec.dense, x)
    if s.case.recompute == "experts":  # other programs alone
        normed = "layernorm" in s.case.modules and spec.norm2 is not None
        return t.checkpoint(lambda tape, x: _experts(tape, s, moe, x), x, made_again=normed)
    return _experts(t, s, moe, x)


def _experts(t: Tape, s: Sizes, moe: MoESpec, x: Value) -> Value:
    return routed_experts(t, s, moe, x, None if moe.shared is None else _mlp(t, s, moe.shared, x))


def _mlp(t: Tape, s: Sizes, mlp: MLPSpec, x: Value) -> Value:
    up = enter(t, s, x, mlp.up)
    if mlp.gated:
        active = gated(t, s, up, mlp)
    else:
        active = gelu(t, s, up, bias=mlp.up.bias)
    del up
    return leave_by(t, s, active, mlp.down)


def token_rows(t: Tape, s: Sizes) -> Value:
    """``parallel.embedding.VocabParallelEmbedding``. Its tokens are not counted."""
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

"""Memory of a layer's passes, from its operations (``model.ops``): what each allocates, keeps and needs, by its kind.

The meter runs the list that the modules run, on values that are blocks of memory (``plan.tape``), and lets go of them
where the forward pass does. ``tests/unit/test_plan_ranks.py`` compares it with the allocations of real ranks, to 2 % of
a rank's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_port.core.model.activation_sites import SITES
from megatron_port.core.model.ops import INPUT, Op, Site, last_uses
from megatron_port.core.model.spec import LayerSpec
from megatron_port.tools.plan import expert_memory, head_memory
from megatron_port.tools.plan.adapters import enter, leave_by
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.operations import Sizes, drop, gated, gelu, normalize
from megatron_port.tools.plan.tape import Meter, Tape, Value

Rule = Callable[..., "Value | tuple[Value, ...]"]
"""(tape, sizes, operation, *values that it reads) → what it writes: one value, or several."""


def layer(t: Tape, s: Sizes, spec: LayerSpec, x: Value) -> Value:
    """``model.layers.TransformerLayer``, under the case's recompute policy."""
    if s.case.recompute == "full":
        return t.checkpoint(lambda tape, x: run(tape, s, spec.ops, x), x)
    return run(t, s, spec.ops, x)


def run(t: Tape, s: Sizes, ops: Sequence[Op], x: Value) -> Value:
    """Run operations on the input x; return what the last one writes."""
    values: dict[str, Value | tuple[Value, ...]] = {INPUT: x}
    for op, dead in zip(ops, last_uses(ops)):
        t.site = op.site
        _note(values, op, RULES.get(op.kind, _stated)(t, s, op, *_arguments(values, op)))
        for name in dead:
            del values[name]
    (out,) = values.values()
    assert isinstance(out, Value)
    return out


def metered_bytes(case: Case, spec: LayerSpec) -> dict[Site, float]:
    """Return the bytes that each site of a layer keeps of one micro-batch, its input among them: of the blocks that the
    backward pass reads, each under the site whose operation made it."""
    s, tape = Sizes(case), Tape(Meter())
    x = Value(tape.block(s.stream))
    run(tape, s, spec.ops, x)
    out: dict[Site, float] = dict.fromkeys(SITES, 0.0)
    for block in tape.kept_blocks():
        out[block.site] += block.size
    return out


def _stated(t: Tape, s: Sizes, op: Op, *inputs: Value) -> Value:
    """An operation without a rule: the memory that it states of itself (``Op.features``, ``keeps``, ``beside``)."""
    each, sizes = s.tokens / s.case.tp * s.case.width, [x.size for x in inputs]
    beside = t.block(op.beside * each)
    out = t.block(op.features * each)
    blocks = {**{name: x.block for name, x in zip(op.reads, inputs)}, op.writes[0]: out}
    saved = [blocks[name] for name in op.keeps]
    if op.beside:
        saved.append(beside)
    return t.note(out, inputs, lambda grad, saved: [t.block(size) for size in sizes], saved)


def _arguments(values: dict[str, Value | tuple[Value, ...]], op: Op) -> list[Value]:
    found = (values[name] for name in op.reads)
    return [part for value in found for part in (value if isinstance(value, tuple) else (value,))]


def _note(values: dict[str, Value | tuple[Value, ...]], op: Op, out: Value | tuple[Value, ...]) -> None:
    if len(op.writes) == 1:
        values[op.writes[0]] = out
    else:
        assert isinstance(out, tuple)
        values.update(zip(op.writes, out, strict=True))


def _add(t: Tape, s: Sizes, op: Op, x: Value, residual: Value) -> Value:
    """``ResidualStream.bias_dropout_add``."""
    p, size, bias = s.case.model.hidden_dropout, x.size, op.kind == "biased add"
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


def _norm(t: Tape, s: Sizes, op: Op, x: Value) -> tuple[Value, Value]:
    return normalize(t, s, x, op.part)


def _branch_norm(t: Tape, s: Sizes, op: Op, out: Value) -> Value:
    return normalize(t, s, out, op.part)[0]


def _bias(t: Tape, s: Sizes, op: Op, out: Value) -> Value:
    return t.note(t.block(out.size), [out], lambda grad, saved: [grad])


def _activation(t: Tape, s: Sizes, op: Op, x: Value) -> Value:
    return gated(t, s, x, op.part) if op.part.gated else gelu(t, s, x, bias=op.part.up.bias)


def _experts(t: Tape, s: Sizes, op: Op, x: Value) -> Value:
    """``model.moe.MoE``. Programs that make its result again keep its input alone."""
    inner = op.part.inner_ops
    if s.case.recompute != "experts":  # other programs alone
        return run(t, s, inner, x)
    normed = s.case.engine.drops("layernorm") and op.reads[0].startswith("norm")  # made again, so it isn't kept either
    return t.checkpoint(lambda tape, x: run(tape, s, inner, x), x, made_again=normed)


RULES: dict[str, Rule] = {
    "norm": _norm, "branch norm": _branch_norm, "bias": _bias, "add": _add, "biased add": _add,
    "column": lambda t, s, op, x: enter(t, s, x, op.part), "row": lambda t, s, op, x: leave_by(t, s, x, op.part),
    "activation": _activation, "heads": head_memory.heads, "latent heads": head_memory.heads,
    "scores": head_memory.attend, "padded scores": head_memory.attend, "experts": _experts,
    "share": expert_memory.share, "route": expert_memory.route, "dispatch": expert_memory.dispatch,
    "beside": expert_memory.beside, "arrive": expert_memory.arrive, "experts up": expert_memory.grouped,
    "experts activation": expert_memory.activate, "experts down": expert_memory.grouped,
    "send home": expert_memory.send_home, "combine": expert_memory.combine, "join shares": expert_memory.join_shares,
}
"""By kind; of others, an operation states its memory itself."""

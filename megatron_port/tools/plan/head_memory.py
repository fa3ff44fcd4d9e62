"""Memory of queries, keys and values, from the projection on, and of attention itself (rules of ``plan.meter``)."""

from __future__ import annotations

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.model.latent_spec import LatentAttentionSpec, LatentSpec
from megatron_port.core.model.ops import Op
from megatron_port.core.model.spec import AttentionSpec, GroupedAttentionSpec
from megatron_port.tools.plan.adapters import enter, tuned_linear
from megatron_port.tools.plan.attention_cores import Heads, context_core, fused_core, heads_of, scores_core
from megatron_port.tools.plan.operations import Sizes, linear, normalize
from megatron_port.tools.plan.tape import Tape, Value


def heads(t: Tape, s: Sizes, op: Op, x: Value) -> tuple[Value, ...]:
    """``SelfAttention.core_arguments``: queries, keys and values; one value where a kernel takes them packed."""
    project = _latent_project if op.kind == "latent heads" else _project
    return _split_or_packed(t, s, op.part, project(t, s, op.part, x))


def _split_or_packed(t: Tape, s: Sizes, spec: AttentionSpec, y: Value) -> tuple[Value, ...]:
    h, rotary = heads_of(s, spec), uses_tables(s.case.model, spec)
    if s.case.cp > 1 or (s.torch and not s.case.flash):
        return _split(t, s, h, y, rotary=rotary)
    return (t.note(t.block(y.size), [y], lambda grad, saved: [t.block(h.q + 2 * h.k)]) if rotary else y,)


def attend(t: Tape, s: Sizes, op: Op, *heads: Value) -> Value:
    """``SelfAttention.attend_to``, which may be run again in the backward pass; values are padded where they are
    smaller than keys."""
    spec: AttentionSpec = op.part
    h, whole = heads_of(s, spec), 3 // len(heads)

    def core(t: Tape, *heads: Value) -> Value:
        return scores_core(t, s, h, *(heads * whole))

    if s.case.cp > 1:
        out = context_core(t, s, h, heads)
    elif s.case.flash:
        out = fused_core(t, s, h, *(heads * whole), rotated=uses_tables(s.case.model, spec))
    elif s.case.recompute == "selective":
        out = t.checkpoint(core, *heads)
    else:
        out = core(t, *heads)
    if op.kind != "padded scores":
        return out
    size = out.size
    values = size * spec.value_size / spec.groups.head_size
    return t.note(t.block(values), [out], lambda grad, saved: [t.block(size)])


def _project(t: Tape, s: Sizes, spec: GroupedAttentionSpec, x: Value) -> Value:
    """The packed projection, with normed heads where the model has them."""
    y = enter(t, s, x, spec.qkv)
    features = spec.normalized_features(s.case.tp)
    if not features:
        return y
    size, normed = y.size, s.tokens / s.case.tp * features * s.case.width
    heads = t.note(t.block(normed), [y], lambda grad, saved: [t.block(size)])
    norm = spec.normed_heads
    assert norm is not None
    heads = normalize(t, s, heads, norm)[0]
    return t.note(t.block(size), [heads, y], lambda grad, saved: [t.block(normed), grad])


def _latent_project(t: Tape, s: Sizes, spec: LatentAttentionSpec, x: Value) -> Value:
    """``LatentAttention.project``: latents, their norms, heads from them, all put together."""
    latent = spec.latent
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


def _split(t: Tape, s: Sizes, h: Heads, y: Value, *, rotary: bool) -> tuple[Value, Value, Value]:
    """torch's split of the packed projection: views, but for queries of several heads a group."""
    size = y.size

    q, k, v = t.split(y, lambda grad, saved: [t.block(size)], 3)
    if h.grouped:
        q = t.note(t.block(h.q), [q], lambda grad, saved: [grad])
    return (_rotate(t, s, q, h.q), _rotate(t, s, k, h.k), v) if rotary else (q, k, v)


def _rotate(t: Tape, s: Sizes, x: Value, size: float) -> Value:
    """``layers.fused.apply_rotary``: x · cos + turned x · sin; the tables are made for each call and kept. Other
    programs have one kernel for it, and one table for all layers."""
    model = s.case.model
    if s.case.kernels == "fused":
        return t.note(t.block(size), [x], lambda grad, saved: [t.block(size)])
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

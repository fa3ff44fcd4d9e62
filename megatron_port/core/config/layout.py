"""Whether a model can be split as asked.

Pure arithmetic on sizes. Every message holds the numbers and a value that works;
``advice.nearest_layout`` gives one whole layout that passes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import BatchConfig, LayoutConfig, RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import PARTS


def divisors(n: int) -> list[int]:
    """Divisors of ``n`` in order. Beyond 10^10 those with no factor below 10^5 are not found."""
    small = [d for d in range(1, min(math.isqrt(n), 100_000) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest(value: int, legal: list[int]) -> list[int]:
    """The legal values next to ``value`` on either side (at most two)."""
    below = [x for x in legal if x < value]
    above = [x for x in legal if x > value]
    return below[-1:] + above[:1]


def octaves(a: int, b: int) -> float:
    """Return how far two sizes are apart, in factors of two."""
    return abs(math.log2(a) - math.log2(b))


def either(values: list[int]) -> str:
    """Return ``4 or 6``."""
    return " or ".join(str(v) for v in values)


def with_values(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """A copy with dotted leaves (``layout.tensor_parallel_size``) replaced."""
    for name, value in changes.items():
        config = _with_leaf(config, name, value)
    return config


def _with_leaf(part: Any, name: str, value: Any) -> Any:
    key, _, rest = name.partition(".")
    return replace(part, **{key: _with_leaf(getattr(part, key), rest, value) if rest else value})


def asked_world(config: RunConfig, world_size: int | None) -> int | None:
    """The number of ranks: as given, or cluster.nodes × gpus_per_node, or None where neither is known."""
    if world_size is not None:
        return world_size
    return config.cluster.nodes * config.cluster.gpus_per_node or None


def model_ranks(layout: LayoutConfig) -> int:
    """Return the ranks of one replica: tensor × pipeline × context parallel."""
    return layout.tensor_parallel_size * layout.pipeline_parallel_size * layout.context_parallel_size


def sizes_text(tp: int, pp: int, dp: int | str, cp: int = 1, times: str = "x") -> str:
    """Return the sizes that multiply to the number of ranks, ``tp 2 x pp 4 x dp 8``; cp where it is above 1."""
    parts = [f"tp {tp}", f"pp {pp}", *([f"cp {cp}"] if cp > 1 else []), f"dp {dp}"]
    return f" {times} ".join(parts)


def topology_sizes(config: RunConfig, world_size: int | None) -> tuple[int, int, int]:
    """Return ``(tp, pp, dp)``; dp is derived from the world where the configuration leaves it 0.

    ``world_size`` None: cluster.nodes × gpus_per_node, or where that is 0 too, whatever
    the layout asks (dp 0 counts as 1).

    Raises:
        ConfigError: the sizes do not multiply to the world.
    """
    problems = _world_problems(config, world_size)
    if problems:
        raise ConfigError(problems)
    layout = config.layout
    world = asked_world(config, world_size)
    dp = layout.data_parallel_size or (world // model_ranks(layout) if world else 1)
    return layout.tensor_parallel_size, layout.pipeline_parallel_size, dp


def layout_problems(config: RunConfig, world_size: int | None) -> list[str]:
    """Every reason why the model, the batch and the world cannot be split as asked. Sizes must be positive."""
    return [
        *_model_problems(config), *_tensor_problems(config, world_size), *pipeline_problems(config),
        *_world_problems(config, world_size), *batch_problems(config.batch, _replicas(config, world_size)),
        *_axis_problems(config, world_size),
    ]


def _model_problems(config: RunConfig) -> list[str]:
    m = config.model
    out = []
    if not m.head_dim and m.hidden_size % m.num_attention_heads:
        near = nearest(m.num_attention_heads, legal_heads(config))
        out.append(
            f"hidden_size {m.hidden_size} does not divide by num_attention_heads {m.num_attention_heads}; "
            f"use {either(near)} heads, or set head_dim" if near else
            f"hidden_size {m.hidden_size} does not divide by num_attention_heads {m.num_attention_heads}; set head_dim"
        )
    elif m.position_embedding == "rope" and m.head_size % 2:
        near = nearest(m.num_attention_heads, legal_heads(config))
        fix = f"use {either(near)} heads" if near and not m.head_dim else f"set head_dim = {m.head_size + 1}"
        out.append(
            f"rope rotates pairs, but the head size is {m.head_size} (hidden_size {m.hidden_size}, "
            f"num_attention_heads {m.num_attention_heads}); {fix}"
        )
    if m.num_attention_heads % m.kv_heads:
        near = nearest(m.kv_heads, divisors(m.num_attention_heads))
        out.append(
            f"num_attention_heads {m.num_attention_heads} does not divide by num_query_groups {m.kv_heads}; "
            f"use {either(near)}"
        )
    return out


def legal_heads(config: RunConfig) -> list[int]:
    """Head counts that divide hidden_size (with an even head size under rope)."""
    m = config.model
    even = 2 if m.position_embedding == "rope" else 1
    return [n for n in divisors(m.hidden_size) if m.hidden_size // n % even == 0]


def _many_nodes(config: RunConfig, world: int | None) -> bool:
    nodes = config.cluster.nodes or (-(-world // config.cluster.gpus_per_node) if world else 1)
    return nodes > 1


def legal_tensor_sizes(config: RunConfig, world: int | None) -> list[int]:
    """Tensor-parallel sizes that divide heads and MLP width (and the sequence), and divide the key/value heads or are a
    multiple of them, within a node."""
    m = config.model
    common = math.gcd(m.num_attention_heads, m.ffn_size)
    if config.layout.sequence_parallel:
        common = math.gcd(common, m.seq_length)
    most = min(m.vocab_size, config.cluster.gpus_per_node if _many_nodes(config, world) else m.vocab_size)
    return [t for t in divisors(common) if t <= most and not (m.kv_heads % t and t % m.kv_heads)]


def _tensor_problems(config: RunConfig, world_size: int | None) -> list[str]:
    m, t = config.model, config.layout.tensor_parallel_size
    world = asked_world(config, world_size)
    use = f"use {either(nearest(t, legal_tensor_sizes(config, world)) or [1])}"
    rows = [("num_attention_heads", m.num_attention_heads), ("ffn_hidden_size", m.ffn_size)]
    if config.layout.sequence_parallel:
        rows.append(("seq_length (sequence_parallel)", m.seq_length))
    out = [f"{name} {size} does not divide by tensor_parallel_size {t}; {use}" for name, size in rows if size % t]
    out += _chunk_problems(config)
    if m.kv_heads != m.num_attention_heads and m.kv_heads % t and t % m.kv_heads:
        out.append(
            f"num_query_groups {m.kv_heads} and tensor_parallel_size {t}: one must be a multiple of the other (above "
            f"the groups, ranks share a key/value head); {use}"
        )
    if m.vocab_size < t:
        out.append(f"vocab_size {m.vocab_size} is smaller than tensor_parallel_size {t}; {use}")
    if _many_nodes(config, world) and t > config.cluster.gpus_per_node:
        out.append(
            f"tensor_parallel_size {t} is larger than a node of {config.cluster.gpus_per_node} ranks; "
            f"{use} (or fix cluster.gpus_per_node)"
        )
    return out


def _chunk_problems(config: RunConfig) -> list[str]:
    layout, seq = config.layout, config.model.seq_length
    chunks, ranks = max(layout.tp_overlap_chunks, 1), layout.tensor_parallel_size if layout.sequence_parallel else 1
    if seq % ranks or seq // ranks % chunks == 0:
        return []
    use = either(nearest(chunks, divisors(seq // ranks)))
    return [f"layout.tp_overlap_chunks {chunks} does not divide the {seq // ranks} positions of a rank; use {use}"]


def pipeline_problems(config: RunConfig) -> list[str]:
    layers, layout = config.model.num_layers, config.layout
    p, v = layout.pipeline_parallel_size, layout.virtual_pipeline_size
    split = layout.pipeline_split
    out = []
    if layers < p * v:
        chunks = f" × virtual_pipeline_size {v} = {p * v}" if v > 1 else ""
        fits = f"use {layers // v}" if layers >= v else f"use virtual_pipeline_size {max(1, layers // p)}"
        out.append(
            f"num_layers {layers} is fewer than pipeline_parallel_size {p}{chunks}; each stage needs a layer; {fits}"
        )
    elif split and (len(split) != p * v or sum(split) != layers or min(split) < 1):
        shown = f"{list(split)}" if len(split) <= 64 else f"of {len(split)} stages"
        out.append(
            f"pipeline_split {shown} has {len(split)} entries that sum to {sum(split)} (smallest {min(split)}); "
            f"it must have {p * v} of at least 1 that sum to num_layers {layers}; "
            f"leave it [] (balanced) or use {_even(layers, p * v)}"
        )
    return out


def _even(layers: int, stages: int) -> str:
    each, extra = divmod(layers, stages)
    if stages > 64:
        return f"{each} a stage" + (f" and {each + 1} on {extra} of them" if extra else "")
    return str([each + (i < extra) for i in range(stages)])


def _world_problems(config: RunConfig, world_size: int | None) -> list[str]:
    cluster, layout = config.cluster, config.layout
    if world_size is not None and world_size < 1:
        return [f"the world has {world_size} ranks; it must have at least 1"]
    out = []
    told = cluster.nodes * cluster.gpus_per_node
    if world_size is not None and told and told != world_size:
        out.append(
            f"cluster.nodes {cluster.nodes} × gpus_per_node {cluster.gpus_per_node} = {told} ranks, but the world has "
            f"{world_size}; start {told} ranks, or set cluster.nodes = 0"
        )
    world = asked_world(config, world_size)
    if world is None:
        return out
    ranks, d, c = model_ranks(layout), layout.data_parallel_size, layout.context_parallel_size
    fits = world % ranks == 0
    near = f"use a product of {either(nearest(ranks, divisors(world)))} for tp × pp{' × cp' if c > 1 else ''}"
    t, p = layout.tensor_parallel_size, layout.pipeline_parallel_size
    sizes = f"tensor_parallel_size {t} × pipeline_parallel_size {p}"
    sizes += f" × context_parallel_size {c}" if c > 1 else ""
    if d and ranks * d != world:
        fix = f"use data_parallel_size {world // ranks} (or 0: derived)" if fits else near
        out.append(f"{sizes} × data_parallel_size {d} = {ranks * d} ranks, but the world has {world}; {fix}")
    elif not d and not fits:
        out.append(f"a world of {world} ranks does not divide by {sizes} = {ranks}; {near}")
    return out


def _replicas(config: RunConfig, world_size: int | None) -> int:
    """Return the number of replicas; 1 where neither the layout nor the world gives it."""
    layout = config.layout
    world = asked_world(config, world_size)
    if layout.data_parallel_size or not world or world < 1:
        return layout.data_parallel_size or 1
    return max(world // model_ranks(layout), 1)


def _axis_problems(config: RunConfig, world_size: int | None) -> list[str]:
    """Return what is wrong with context and expert parallelism, or with hybrid sharding."""
    layout, out = config.layout, context_problems(config)
    replicas, shard = _replicas(config, world_size), layout.shard_size
    out += _expert_problems(layout, replicas)
    if shard and replicas % shard:
        near = either(nearest(shard, divisors(replicas)))
        out.append(f"layout.shard_size {shard} does not divide data_parallel_size {replicas}; use {near}, or 0: all")
    if layout.reshard != "forward" and layout.zero_stage != 3:
        out.append(
            f'layout.reshard "{layout.reshard}" with zero_stage {layout.zero_stage}, which keeps whole weights; use '
            'zero_stage 3, or "forward" here'
        )
    if shard and not layout.zero_stage:
        out.append(f"layout.shard_size {shard} with zero_stage 0, which splits nothing; use zero_stage 1, or 0 here")
    return out


def expert_cuts(tp: int, cp: int, replicas: int, shard: int = 0) -> tuple[list[int], list[int]]:
    """Return the boundaries at which dense layers divide the ranks of a stage, and the expert-parallel sizes that fit
    between them."""
    cuts = [tp, tp * cp, tp * cp * (shard or replicas), tp * cp * replicas]
    return cuts, [e for e in divisors(cuts[-1]) if all(e % cut == 0 or cut % e == 0 for cut in cuts)]


def _expert_problems(layout: LayoutConfig, replicas: int) -> list[str]:
    """Whether experts can be divided over the ranks of a stage."""
    found: list[str] = []
    if layout.expert_parallel_size > 1:
        found = PARTS.function("expert-parallel checks")(layout, replicas)
    return found


def batch_problems(b: BatchConfig, d: int) -> list[str]:
    """Return why ``d`` replicas cannot take a step's samples, or a ramp-up's. Sizes must be in their ranges."""
    unit = b.micro_batch_size * d
    what = f"micro_batch_size {b.micro_batch_size} × data_parallel_size {d} = {unit}"
    out = []
    if b.global_batch_size % unit:
        out.append(
            f"global_batch_size {b.global_batch_size} does not divide by {what}; "
            f"use {either(multiples(b.global_batch_size, unit))}"
        )
    if not b.rampup_start:
        if b.rampup_increment or b.rampup_samples:
            out.append(
                f"rampup_increment {b.rampup_increment} and rampup_samples {b.rampup_samples} need rampup_start; "
                f"set rampup_start = {unit} or the others to 0"
            )
        return out
    ramp = f"rampup_start {b.rampup_start}"
    if b.rampup_start >= b.global_batch_size:
        out.append(f"{ramp} is not below global_batch_size {b.global_batch_size}; use 0 for no ramp-up")
        return out
    if b.rampup_increment < 1 or b.rampup_samples < 1:
        out.append(
            f"{ramp} needs rampup_increment and rampup_samples of at least 1 "
            f"(they are {b.rampup_increment} and {b.rampup_samples}); e.g. rampup_increment = {unit}"
        )
        return out
    for name, value in (("rampup_start", b.rampup_start), ("rampup_increment", b.rampup_increment)):
        if value % unit:
            out.append(
                f"{name} {value} does not divide by {what}; use {either(multiples(value, unit))}. A run whose ramp-up "
                "has ended resumes without it: rampup_start = 0, rampup_increment = 0, rampup_samples = 0"
            )
    rise = b.global_batch_size - b.rampup_start
    if rise % b.rampup_increment:
        out.append(
            f"global_batch_size {b.global_batch_size} − {ramp} = {rise} does not divide by rampup_increment "
            f"{b.rampup_increment}; use {either(nearest(b.rampup_increment, divisors(rise)))}"
        )
    return out


def multiples(value: int, unit: int) -> list[int]:
    low = value // unit * unit
    return ([low] if low else []) + [low + unit]


def context_problems(config: RunConfig) -> list[str]:
    """Name what does not go with ``layout.context_parallel_size`` above 1."""
    found: list[str] = []
    if config.layout.context_parallel_size > 1:
        found = PARTS.function("context-parallel checks")(config)
    return found

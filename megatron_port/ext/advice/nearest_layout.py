"""The nearest legal layout to one that is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_port.core.config.choices import RANGES
from megatron_port.core.config.dump import leaves
from megatron_port.core.config.layout import (
    asked_world,
    batch_problems,
    context_problems,
    divisors,
    layout_problems,
    legal_heads,
    legal_tensor_sizes,
    multiples,
    nearest,
    octaves,
    pipeline_problems,
    with_values,
)
from megatron_port.core.config.schema import RunConfig

_SPLIT = (
    "layout.tensor_parallel_size",
    "layout.pipeline_parallel_size",
    "layout.data_parallel_size",
    "layout.context_parallel_size",
    "batch.micro_batch_size",
    "batch.global_batch_size",
)


@dataclass(frozen=True)
class Neighbour:
    """A legal layout close to the one asked for."""

    tp: int
    pp: int
    dp: int
    cp: int
    micro_batch: int
    global_batch: int
    other: tuple[tuple[str, Any], ...] = ()
    """Further leaves that have to change, by dotted name (heads, layers, nodes, ramp-up, split)."""

    def apply(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with this layout."""
        split = (self.tp, self.pp, self.dp, self.cp, self.micro_batch, self.global_batch)
        return with_values(config, {**dict(self.other), **dict(zip(_SPLIT, split))})

    def __str__(self) -> str:
        rest = "".join(f", {name} {list(v) if isinstance(v, tuple) else v}" for name, v in self.other)
        context = f"context_parallel_size {self.cp} × " if self.cp > 1 else ""
        return (
            f"tensor_parallel_size {self.tp} × pipeline_parallel_size {self.pp} × {context}data_parallel_size "
            f"{self.dp} = {self.tp * self.pp * self.cp * self.dp} ranks, micro_batch_size {self.micro_batch}, "
            f"global_batch_size {self.global_batch}{rest}"
        )


def legal_neighbour(config: RunConfig, world_size: int | None) -> Neighbour | None:
    """One whole legal layout near the one asked for, on the same number of ranks; None if there is none.

    The ranks are kept, then the sizes of the split in the logarithm, then the batch
    (a smaller micro-batch is preferred to another global batch, which is a
    hyperparameter). The model is touched only where it is impossible by itself.
    """
    if world_size is not None and world_size < 1:
        world_size = None
    repairs = _repairs(config, world_size)
    fixed = with_values(config, repairs)
    layout, batch = fixed.layout, fixed.batch
    asked = (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size)
    best: tuple[float, Neighbour] | None = None
    world, c = asked_world(fixed, world_size), layout.context_parallel_size
    for t, p, d in _grids(fixed, None if world is None else world // c):
        cost = 1.0 * octaves(t, asked[0]) + 1.0 * octaves(p, asked[1]) + (0.5 * octaves(d, asked[2] or d))
        if best and cost >= best[0]:
            continue
        micro, whole, change = _near_batch(batch.micro_batch_size, batch.global_batch_size, d)
        if best is None or cost + change < best[0]:
            best = (cost + change, Neighbour(t, p, d, c, micro, whole))
    if best is None:
        return None
    found = replace(best[1], other=tuple((k, v) for k, v in repairs.items() if k not in _SPLIT))
    extra: dict[str, Any] = {}
    if layout.pipeline_split and pipeline_problems(found.apply(config)):
        extra["layout.pipeline_split"] = ()
    if batch_problems(found.apply(config).batch, found.dp):
        extra.update({"batch.rampup_start": 0, "batch.rampup_increment": 0, "batch.rampup_samples": 0})
    found = replace(found, other=(*found.other, *extra.items()))
    return None if layout_problems(found.apply(config), world_size) else found


def _repairs(config: RunConfig, world_size: int | None) -> dict[str, Any]:
    """The smallest changes that make the model and the sizes possible at all, before any split."""
    values = dict(leaves(config))
    out: dict[str, Any] = {name: legal.least for name, legal in RANGES.items()
                           if legal.is_size and not legal.holds(values[name])}
    c = with_values(config, out)
    if (not c.model.head_dim and c.model.hidden_size % c.model.num_attention_heads) or (
        c.model.position_embedding == "rope" and c.model.head_size % 2
    ):
        heads = nearest(c.model.num_attention_heads, legal_heads(c))
        if c.model.head_dim or not heads:
            out["model.head_dim"] = c.model.head_size + c.model.head_size % 2 or 2
        else:
            out["model.num_attention_heads"] = min(heads, key=lambda n: octaves(n, c.model.num_attention_heads))
        c = with_values(config, out)
    if c.model.num_attention_heads % c.model.kv_heads:
        groups = nearest(c.model.kv_heads, divisors(c.model.num_attention_heads))
        out["model.num_query_groups"] = min(groups, key=lambda n: octaves(n, c.model.kv_heads))
    if c.layout.virtual_pipeline_size > c.model.num_layers:
        out["layout.virtual_pipeline_size"] = 1
    context = c.layout.context_parallel_size
    ways = [n for n in divisors(asked_world(c, world_size) or context)
            if not context_problems(with_values(c, {"layout.context_parallel_size": n}))]
    if context not in ways and ways:
        out["layout.context_parallel_size"] = min(ways, key=lambda n: octaves(n, context))
    told = c.cluster.nodes * c.cluster.gpus_per_node
    if told and world_size is not None and told != world_size:
        out["cluster.nodes"] = 0
    return out


def _grids(config: RunConfig, world: int | None) -> Iterator[tuple[int, int, int]]:
    """Every legal (tp, pp, dp) on ``world`` ranks, those of one cp position; without a world, those nearest to what is
    asked."""
    layout = config.layout
    most = config.model.num_layers // layout.virtual_pipeline_size
    tensor_sizes = legal_tensor_sizes(config, world)
    if world is None:
        t0 = layout.tensor_parallel_size
        for t in [t0] if t0 in tensor_sizes else nearest(t0, tensor_sizes):
            yield t, min(layout.pipeline_parallel_size, most), layout.data_parallel_size or 1
        return
    for t in tensor_sizes:
        if world % t == 0:
            for p in divisors(world // t):
                if p <= most:
                    yield t, p, world // (t * p)


def _near_batch(micro: int, whole: int, dp: int) -> tuple[int, int, float]:
    """Return (micro-batch, global batch, cost) that fit ``dp`` replicas, near the ones asked for."""
    unit = micro * dp
    if whole % unit == 0:
        return micro, whole, 0.0
    options = [(0.5 + abs(near - whole) / whole, micro, near) for near in multiples(whole, unit)]
    if whole % dp == 0:
        smaller = max(n for n in divisors(whole // dp) if n <= micro)
        options.append((0.1 * octaves(smaller, micro), smaller, whole))
    cost, micro, whole = min(options)
    return micro, whole, cost

"""A layout for another number of ranks than the run asks for. Pure; docs/elastic.md holds the rule in words.

The global batch, the model and the order of the samples never change: what is
chosen is only how the same run is split (first invariant of the design: a layout is not a
hyperparameter).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_port.core.config.checks import problems, resolve
from megatron_port.core.config.layout import (
    divisors,
    expert_cuts,
    layout_problems,
    legal_tensor_sizes,
    octaves,
    pipeline_problems,
    sizes_text,
    with_values,
)
from megatron_port.core.config.schema import DataConfig, LayoutConfig, RunConfig
from megatron_port.core.errors import ConfigError


@dataclass(frozen=True)
class ElasticChoice:
    """The layout to continue with."""

    config: RunConfig
    """The run, split for the ranks that came."""
    line: str
    """What changed, for the log; empty: nothing, the layout fits as it is."""


def elastic_layout(config: RunConfig, world_size: int) -> ElasticChoice:
    """The layout of ``config`` on ``world_size`` ranks, by the rule of docs/elastic.md.

    In this order: tp, pp and micro-batch as they are; another pp; another tp (within a node) with the pp that then
    is nearest; and only then the same search with smaller micro-batches, and at last with smaller divisors of cp.
    Nearest is measured in octaves, and of two as near the larger is taken (it needs less memory a rank). A layout
    that fits is returned as it is. The expert-parallel size is the one asked for, or the largest below it that fits.

    Raises:
        ConfigError: ``world_size`` is below 1, or no split of the model and the global batch fits that many ranks.
    """
    if not layout_problems(config, world_size):
        return ElasticChoice(config, "")
    base = _free_of_world(config)
    if world_size >= 1:
        for cp in _context_sizes(base, world_size):
            for micro in _micro_batches(base):
                for tp, pp in _splits(base, world_size // cp):
                    found = _candidate(base, world_size // cp, tp, pp, cp, micro)
                    if not layout_problems(found, world_size):
                        return ElasticChoice(found, _line(config, found, world_size))
    layout = config.layout
    raise ConfigError(
        f"layout.elastic: no legal layout for {world_size} ranks: num_layers {config.model.num_layers}, "
        f"num_attention_heads {config.model.num_attention_heads} and global_batch_size "
        f"{config.batch.global_batch_size} cannot be split so that {_product(layout)} = {world_size} (the run asks for "
        f"tp {layout.tensor_parallel_size} × pp {layout.pipeline_parallel_size}); start another number of ranks"
    )


def _product(layout: LayoutConfig) -> str:
    return "tp × pp × cp × dp" if layout.context_parallel_size > 1 else "tp × pp × dp"


def _free_of_world(config: RunConfig) -> RunConfig:
    """Without the numbers that say how many ranks there are."""
    return with_values(config, {"layout.data_parallel_size": 0, "cluster.nodes": 0})


def _by_nearness(asked: int, legal: list[int]) -> list[int]:
    return sorted(legal, key=lambda n: (round(octaves(n, asked), 9), -n))


def _context_sizes(config: RunConfig, world: int) -> list[int]:
    """The cp asked for, then its smaller divisors: each cuts the sequence where the one asked for does."""
    return [c for c in sorted(divisors(config.layout.context_parallel_size), reverse=True) if world % c == 0]


def _micro_batches(config: RunConfig) -> list[int]:
    """The micro-batch asked for, then its smaller divisors."""
    return sorted(divisors(config.batch.micro_batch_size), reverse=True)


def _splits(config: RunConfig, world: int) -> Iterator[tuple[int, int]]:
    """Yield (tp, pp) of ``world`` ranks, those of one cp position, in order of preference."""
    layout = config.layout
    most = config.model.num_layers // layout.virtual_pipeline_size
    tensor_sizes = [t for t in legal_tensor_sizes(config, world) if world % t == 0]
    for tp in _by_nearness(layout.tensor_parallel_size, tensor_sizes):
        for pp in _by_nearness(layout.pipeline_parallel_size, [p for p in divisors(world // tp) if p <= most]):
            yield tp, pp


def _candidate(config: RunConfig, world: int, tp: int, pp: int, cp: int, micro: int) -> RunConfig:
    experts, asked = config.model.moe.num_experts, config.layout.expert_parallel_size
    _, fitting = expert_cuts(tp, cp, world // (tp * pp), config.layout.shard_size)
    ep = max((e for e in fitting if e <= asked and experts % e == 0), default=1)
    found = with_values(config, {
        "layout.expert_parallel_size": ep,
        "layout.tensor_parallel_size": tp, "layout.pipeline_parallel_size": pp, "layout.context_parallel_size": cp,
        "layout.data_parallel_size": world // (tp * pp), "batch.micro_batch_size": micro,
    })
    if found.layout.pipeline_split and pipeline_problems(found):
        found = with_values(found, {"layout.pipeline_split": ()})
    return found


def _line(asked: RunConfig, found: RunConfig, world: int) -> str:
    """Return what changed, in one line."""

    def sizes(config: RunConfig, dp: int | str) -> str:
        layout = config.layout
        tp, pp, cp = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size
        ep = layout.expert_parallel_size
        return sizes_text(tp, pp, dp, cp) + (f" (ep {ep})" if ep > 1 else "")

    was, now = asked.batch.micro_batch_size, found.batch.micro_batch_size
    micro = f", micro-batch {now} instead of {was}" if now != was else ""
    split = "" if asked.layout.pipeline_split == found.layout.pipeline_split else ", layers balanced over the stages"
    return (
        f"elastic: {world} rank{'s' if world > 1 else ''} came, and the run asks for "
        f"{sizes(asked, asked.layout.data_parallel_size or 'any')}; continuing with "
        f"{sizes(found, found.layout.data_parallel_size)}{micro}{split}; global batch "
        f"{found.batch.global_batch_size} as before"
    )


# Whether a run's batch leaves pipeline stages without work, on the ranks that were started.

def as_started(config: RunConfig, world_size: int | None) -> RunConfig | None:
    """Return the run with the layout that its ranks will take, without its corpus; None where it is not legal."""
    config = replace(config, data=DataConfig(synthetic=True))
    try:
        if config.layout.elastic and world_size and problems(config, world_size=world_size):
            config = elastic_layout(config, world_size).config
    except ConfigError:
        return None
    return None if problems(config, world_size=world_size) else config


def starved_stages(config: RunConfig, world_size: int | None = None) -> str:
    """Return :func:`starved_pipeline` of the run on its ranks; a batch that ramps up is judged at its end."""
    legal = as_started(config, world_size)
    if legal is None or legal.layout.pipeline_parallel_size == 1:
        return ""
    dp, batch = resolve(legal, world_size).layout.data_parallel_size, legal.batch
    micro_batches = batch.global_batch_size // (batch.micro_batch_size * max(dp, 1))
    return starved_pipeline(legal.layout.pipeline_parallel_size, micro_batches)


def starved_pipeline(stages: int, micro_batches: int) -> str:
    """Return why a pipeline waits most of the time, where a replica has fewer micro-batches than stages; or nothing."""
    if stages == 1 or micro_batches >= stages:
        return ""
    return (
        f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} for {stages} stages: fewer than stages, so "
        "that most of them wait most of the time; use fewer stages or a larger batch"
    )

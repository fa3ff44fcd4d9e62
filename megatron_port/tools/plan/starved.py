"""Whether a run's batch leaves pipeline stages without work, on the ranks that were started."""

from __future__ import annotations

from dataclasses import replace

from megatron_port.core.config.checks import problems, resolve
from megatron_port.core.config.elastic import elastic_layout
from megatron_port.core.config.schema import DataConfig, RunConfig
from megatron_port.core.errors import ConfigError


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

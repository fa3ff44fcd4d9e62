"""Importance of a small model measured on any layout: what the tests of compression send to the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from cases import providers_of

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.loader import RankView
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import StateReader
from megatron_port.run.build import build_engine
from megatron_port.tools.compress.importance import measure_importance
from megatron_port.tools.inference.model import StreamWindows

SAMPLES = 5
"""No multiple of what two replicas take at a time: the rest is filled up and must not count."""


def calibration(config: RunConfig) -> StreamWindows:
    """A drawn stream of ``SAMPLES`` samples."""
    length = config.model.seq_length
    ids = torch.randint(0, config.model.vocab_size, (SAMPLES * length + 1,), generator=torch.Generator().manual_seed(5))
    return StreamWindows(lambda at, n: ids[at : at + n].numpy(), len(ids), length, config.model.vocab_size)


def measured(config: RunConfig, topology: Topology, read: StateReader | None = None) -> dict[str, np.ndarray]:
    """Measure on this rank; weights are drawn from the seed, or read."""
    ctx = ParallelContext.create(
        dataclasses.replace(topology, vp=config.layout.virtual_pipeline_size,
                            kv_copies=config.model.kv_heads_held(topology.tp) // config.model.kv_heads), "cpu"
    )
    try:
        engine = build_engine(config, ctx, providers_of(config), initialise=read is None)
        if read is not None:
            engine.load_weights(read)
        scores, tokens, _ = measure_importance(
            engine, ctx, config.model, calibration(config), view=RankView.on(config, ctx),
            micro_batch_size=config.batch.micro_batch_size,
        )
        assert tokens == SAMPLES * config.model.seq_length
        return scores
    finally:
        ctx.close()


def measure_all(cases: Sequence[tuple[RunConfig, Topology]]) -> list[dict[str, np.ndarray]]:
    """Several layouts of one world size on the same ranks."""
    return [measured(*case) for case in cases]

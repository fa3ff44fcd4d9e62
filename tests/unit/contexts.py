"""Ranks of layouts without processes, and records of their slices."""

from __future__ import annotations

from typing import Any

import torch

from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import ParameterRecord, Shard, make_record


def rank_of(topology: Topology, rank: int = 0, **groups: Any) -> ParallelContext:
    """A rank whose groups along single axes are the given stand-ins; without any, nothing is connected."""
    connected = {topology.mesh.dims(axis): group for axis, group in groups.items()} if groups else None
    return ParallelContext(topology, rank, torch.device("cpu"), topology.coordinates(rank), connected)


def slice_record(
    name: str, shape: tuple[int, ...], *, split_dim: int | None = None, tp_rank: int = 0, tp_size: int = 1, **given: Any
) -> ParameterRecord:
    """The slice of one of ``tp_size`` tensor-parallel ranks."""
    shards = () if split_dim is None else (Shard(split_dim, ("tp",)),)
    return make_record(name, shape, rank_of(Topology(tp=tp_size), tp_rank), shards=shards, **given)

"""Every optimizer rule gives, on any layout, the run of one process: losses, norms and every gradient by name."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from cases import make_config, run_cases, single_run
from fuzz import RATES
from pool import RankPool

from megatron_port.config.schema import MoEConfig, OptimizerConfig, RunConfig
from megatron_port.parallel.topology import Topology
from megatron_port.parity.comparison import FP64, Run, compare

STEPS = 4
LLAMA: dict[str, Any] = {
    "position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu", "add_bias": False,
    "num_query_groups": 2, "num_attention_heads": 4, "hidden_size": 32, "ffn_hidden_size": 40,
}
TIED: dict[str, Any] = {"tie_embeddings": True}
EXPERTS: dict[str, Any] = {
    **LLAMA, "moe": MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=24, balance_loss="sequence"),
}
LAYOUTS: dict[str, tuple[dict[str, Any], Topology, dict[str, Any]]] = {
    "zero1-tp2-sp": (LLAMA, Topology(tp=2, dp=2), {"zero_stage": 1, "sequence_parallel": True}),
    "zero3-dp4": (LLAMA, Topology(dp=4), {"zero_stage": 3}),
    "zero2-pp2-tied-padded": (TIED, Topology(pp=2, dp=2), {"zero_stage": 2, "vocab_padding_multiple": 16}),
    "zero0-tp4-kv-copies": (LLAMA, Topology(tp=4), {"zero_stage": 0, "vocab_padding_multiple": 16}),
    "hybrid-dp4": ({}, Topology(dp=4), {"zero_stage": 1, "shard_size": 2}),
    "cp2-tp2": (LLAMA, Topology(tp=2, cp=2), {"zero_stage": 1, "context_parallel_size": 2}),
    "ep2-tp2-dp2": (EXPERTS, Topology(tp=2, dp=2, ep=2), {"zero_stage": 1, "expert_parallel_size": 2}),
    "zb-pp2-tp2": (TIED, Topology(tp=2, pp=2), {"zero_stage": 1, "pipeline_schedule": "zb-h1"}),
}
RULES = tuple(RATES)


def config_of(rule: str, model: dict[str, Any], layout: dict[str, Any], topology: Topology) -> RunConfig:
    """A run of one rule in fp64."""
    sizes = {"tensor_parallel_size": topology.tp, "pipeline_parallel_size": topology.pp,
             "data_parallel_size": topology.dp}
    config = make_config(dtype="fp64", model=model, layout={**sizes, **layout})
    optimizer: OptimizerConfig = dataclasses.replace(
        config.optimizer, name=rule, lr=config.optimizer.lr * RATES[rule], beta2=0.9,
    )
    return dataclasses.replace(config, optimizer=optimizer)


@functools.lru_cache(maxsize=64)
def reference(config: RunConfig) -> Run:
    return single_run(config, steps=STEPS)


PAIRS = {
    "zero1-tp2-sp": ("adafactor", "muon", "sm3"), "zero3-dp4": ("came", "muon", "sgd"),
    "zero2-pp2-tied-padded": ("adafactor", "lamb", "lion"), "zero0-tp4-kv-copies": ("muon", "came", "lamb"),
    "hybrid-dp4": ("adafactor", "sm3", "muon"), "cp2-tp2": ("lamb", "adagrad", "came"),
    "ep2-tp2-dp2": ("muon", "adafactor", "lamb"), "zb-pp2-tp2": ("sm3", "muon"),
}
"""What the suite runs of each layout; all of them: ``python tests/distributed/rules_matrix.py``."""


@pytest.mark.parametrize("name", PAIRS)
def test_a_layout_changes_nothing(ranks: RankPool, name: str) -> None:
    model, topology, layout = LAYOUTS[name]
    configs = [config_of(rule, model, layout, topology) for rule in PAIRS[name]]
    cases = [(config, topology, STEPS, 1) for config in configs]
    traces = ranks.run(topology.world_size, run_cases, cases, timeout=240.0)
    for i, config in enumerate(configs):
        found = compare(reference(config), Run.of([trace[i] for trace in traces]), FP64, config.model,
                        lr=config.optimizer.lr)
        assert not [str(d) for d in found if not d.ok], config.optimizer.name

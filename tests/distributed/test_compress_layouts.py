"""Compression on every kind of layout: what is measured, and what is trained, is that of one process."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import hf_models as hf
import numpy as np
import pytest
import torch
from cases import make_config, run_cases, single_run
from fuzz import plain
from importance import calibration, measure_all, measured
from pool import RankPool

from megatron_port.core.config.schema import LayoutConfig, MoEConfig, RunConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.run.weights import open_weights
from megatron_port.tools.parity.comparison import FP64, Run, compare

LLAMA: dict[str, Any] = {
    "num_layers": 2, "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope",
    "add_bias": False, "tie_embeddings": False, "num_query_groups": 2, "ffn_hidden_size": 48,
}
GPT: dict[str, Any] = {"num_layers": 4}
MOE = {**LLAMA, "moe": MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8, first_dense=1, capacity_factor=1.25)}


def run_of(model: dict[str, Any], **layout: Any) -> RunConfig:
    return make_config(dtype="fp64", model=model, layout=layout)


@pytest.mark.parametrize("world", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_importance_does_not_depend_on_the_layout(ranks: RankPool, world: int) -> None:
    cases = {
        2: [
            (run_of(LLAMA, sequence_parallel=True), Topology(tp=2)), (run_of(LLAMA), Topology(tp=2)),
            (run_of(LLAMA, context_parallel_size=2), Topology(cp=2)),
            (run_of({**LLAMA, "num_layers": 4}, virtual_pipeline_size=2), Topology(pp=2)),
            (run_of(MOE, expert_parallel_size=2), Topology(dp=2, ep=2)), (run_of(MOE), Topology(tp=2)),
        ],
        8: [(run_of(LLAMA, sequence_parallel=True), Topology(2, 2, 2)), (run_of(LLAMA), Topology(tp=4, dp=2))],
    }[world]
    results = ranks.run(world, measure_all, cases)
    for number, (config, topology) in enumerate(cases):
        alone = measured(dataclasses.replace(config, layout=LayoutConfig(vocab_padding_multiple=1)), Topology())
        for rank in results:
            found = rank[number]
            assert found.keys() == alone.keys()
            for name, wanted in alone.items():
                assert np.any(wanted) and np.abs(found[name] - wanted).max() <= 1e-9 * np.abs(wanted).max(), (
                    topology, name
                )


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_importance_is_what_transformers_modules_give(tmp_path: Path, family: str) -> None:
    """The same sums by hooks of another program's modules, in float64."""
    pytest.importorskip("transformers")
    theirs = hf.reference(hf.llama() if family == "llama" else hf.small("mixtral"))
    weights = open_weights(hf.saved(theirs, tmp_path / "m"))
    theirs = theirs.double()
    config = dataclasses.replace(make_config(dtype="fp64"), model=weights.model)
    found = measured(config, Topology(), weights.read)
    sums: dict[str, Any] = {"hidden": 0.0}

    def add(name: str, layer: int, value: torch.Tensor) -> None:
        sums.setdefault(name, {}).setdefault(layer, 0.0)
        sums[name][layer] = sums[name][layer] + value.numpy()

    def watch(index: int, layer: Any) -> None:
        def whole(_: Any, args: Any, kwargs: Any, out: Any) -> None:
            a, b = args[0] if args else kwargs["hidden_states"], out[0] if isinstance(out, tuple) else out
            add("layers", index, (1 - torch.cosine_similarity(a, b, dim=-1)).sum())

        def norm(_: Any, args: Any, out: torch.Tensor) -> None:
            sums["hidden"] = sums["hidden"] + out.square().flatten(0, -2).sum(0).numpy()

        layer.register_forward_hook(whole, with_kwargs=True)
        layer.input_layernorm.register_forward_hook(norm)
        layer.post_attention_layernorm.register_forward_hook(norm)
        heads = config.model.num_attention_heads
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, args: add("heads", index, args[0].unflatten(-1, (heads, -1)).norm(dim=-1).flatten(0, -2).sum(0))
        )
        if family == "llama":
            layer.mlp.down_proj.register_forward_pre_hook(
                lambda _, args: add("ffn", index, args[0].square().flatten(0, -2).sum(0))
            )
        else:
            def router(_: Any, args: Any, out: Any) -> None:
                whole = torch.zeros(config.model.moe.num_experts, dtype=torch.float64)
                add("experts", index, whole.index_add(0, out[2].flatten(), out[1].flatten().double()))

            layer.mlp.gate.register_forward_hook(router)

    for index, layer in enumerate(theirs.model.layers):
        watch(index, layer)
    samples = calibration(config)
    with torch.no_grad(), hf.in_double(theirs.double()):
        for i in range(len(samples)):
            theirs(torch.from_numpy(samples.sample(i).tokens[:-1])[None])
    for name, wanted in sums.items():
        mine = found[name]
        rows = np.stack([wanted[i] for i in range(len(wanted))]) if isinstance(wanted, dict) else wanted
        assert np.abs(mine.reshape(rows.shape) - rows).max() <= 1e-7 * np.abs(rows).max(), name


FACTORED = {"qkv_rank": 7, "output_rank": 9, "up_rank": 11, "down_rank": 10, "hidden_dropout": 0.1}
SHARED = {"num_layers": 4, "hidden_dropout": 0.1, "shared_layers": 3}
TRAINED: dict[int, list[tuple[RunConfig, Topology]]] = {
    2: [
        (run_of({**LLAMA, **FACTORED}, sequence_parallel=True, recompute="full"), Topology(tp=2)),
        (run_of({**MOE, **FACTORED}, zero_stage=3, expert_parallel_size=2), Topology(dp=2, ep=2)),
        # Each stage has a part of both groups, in two chunks.
        (run_of(SHARED, pipeline_schedule="zb-v", virtual_pipeline_size=2), Topology(pp=2)),
        (run_of({**LLAMA, "shared_layers": 2, "down_rank": 5}, zero_stage=3), Topology(dp=2)),
    ],
    4: [
        (run_of({**LLAMA, **FACTORED}, sequence_parallel=True), Topology(tp=4)),
        (run_of({**LLAMA, **FACTORED, "add_bias": True}), Topology(tp=4)),
        (run_of({**GPT, **FACTORED}, sequence_parallel=True, pipeline_schedule="zb-h1",
                recompute=("qkv+core+activation", "norm1+hidden+residual+input:partition", "qkv+hidden", "core")),
         Topology(tp=2, pp=2)),
        (run_of({**LLAMA, **FACTORED}, zero_stage=2, sequence_parallel=True, context_parallel_size=2),
         Topology(tp=2, cp=2)),
        (run_of({**LLAMA, **FACTORED}, zero_stage=3, reshard="step", reduce_bucket_size=200, tp_overlap_chunks=2),
         Topology(tp=2, dp=2)),
        (run_of({**SHARED, "shared_layers": 4}, zero_stage=3), Topology(pp=2, dp=2)),
        (run_of(SHARED, zero_stage=2, virtual_pipeline_size=2), Topology(pp=2, dp=2)),
        (run_of({"num_layers": 7, "shared_layers": 3, "tie_embeddings": False}, sequence_parallel=True, zero_stage=0),
         Topology(pp=4)),
        (run_of({**LLAMA, **FACTORED, "num_layers": 4, "shared_layers": 2}, zero_stage=1, context_parallel_size=2),
         Topology(pp=2, cp=2)),
        (run_of({**SHARED, "hidden_dropout": 0.0}, sequence_parallel=True, pipeline_schedule="zb-h1"),
         Topology(tp=2, pp=2)),
    ],
}
"""By number of ranks."""


@functools.lru_cache(maxsize=16)
def alone(config: RunConfig) -> Run:
    """Three steps on one process, with the gradients of the first."""
    return single_run(config, steps=3)


@pytest.mark.parametrize("world", [2, *(pytest.param(w, marks=pytest.mark.slow) for w in TRAINED if w != 2)])
def test_smaller_models_train_as_on_one_process(ranks: RankPool, world: int) -> None:
    cases = [(config, topology, 3, 1) for config, topology in TRAINED[world]]
    results = ranks.run(world, run_cases, cases, timeout=200)
    for number, (config, topology, *_) in enumerate(cases):
        found = compare(alone(plain(config)), Run.of([result[number] for result in results]), FP64, config.model,
                        lr=1e-2)
        bad = [str(d) for d in found if not d.ok]
        assert not bad, f"{topology}: {bad}"

"""The planner's bytes: elements against the meta model, published memory, schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from published import Program

from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import (
    ActivationsConfig,
    BackendConfig,
    LayoutConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.run.build import build_model
from megatron_port.tools.plan.case import Case, Machine, balanced_split, case_of, machine_of
from megatron_port.tools.plan.chunk import layer_activation_bytes
from megatron_port.tools.plan.elements import stage_elements
from megatron_port.tools.plan.engines import Engine
from megatron_port.tools.plan.layer import attention_seconds
from megatron_port.tools.plan.memory import plan_memory, stage_memory, waiting_slots
from megatron_port.tools.plan.rates import Rates

GIB, MIB = 2**30, 2**20
MEASURED_175B = (
    33902, 31436, 31136, 30836, 30536, 30236, 29936, 29636, 29336, 29035, 28736, 28436, 28136, 27836, 27536, 29138,
)
"""MiB allocated at the peak, stage 0…15: 175B, tp 4, pp 16, dp 2, micro-batch 1, ZeRO-1, fp16, full recompute."""


def machine(name: str = "selene") -> Machine:
    return machine_of(load(f"clusters/{name}").config)


@pytest.mark.parametrize(("name", "tp", "pp"), [
    *((name, tp, pp) for tp, pp in ((1, 1), (2, 1), (1, 3), (2, 4))
      for name in ("gpt-tiny", "llama-tiny", "gpt-1.4b", "gpt-22b", "llama-8b")),
    ("llama-8b", 32, 2),  # 8 key/value heads
])
def test_elements_of_every_rank_are_the_meta_models(name: str, tp: int, pp: int) -> None:
    model = load(f"models/{name}").config.model
    layout = LayoutConfig(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, pipeline_split=balanced_split(model, pp)
    )
    config = RunConfig(model=model, layout=layout, engine="native")
    case, _ = case_of(config)
    topology = Topology(tp=tp, pp=pp, dp=1, kv_copies=max(tp // model.kv_heads, 1))
    for stage in range(pp):
        rank = topology.first_rank(pp=stage, tp=tp - 1)
        ctx = ParallelContext(topology, rank, torch.device("meta"), topology.coordinates(rank))
        (built,) = build_model(config, ctx, torch_providers(), StepSlot(DropoutStream(0, ctx.device)))
        assert stage_elements(case, stage) == sum(p.numel() for p in built.parameters()), stage


def test_the_16_measured_stages_of_the_175b_run() -> None:
    config = load("runs/frontier-175b").config
    case, _ = case_of(config)
    # The measured program kept fp16 gradients and accumulated in them; ours accumulates in fp32.
    case = replace(case, engine=Program(name="Megatron-DeepSpeed", gradient_bytes=2, bucket_bytes=0.0))
    stages = plan_memory(case, machine("frontier"))
    assert stages[1].elements == 2_718_480_384
    for stage, measured in zip(stages, MEASURED_175B):
        assert stage.allocated / MIB == pytest.approx(measured, rel=0.05), stage.stage
    assert (stages[1].allocated - stages[14].allocated) / 13 / MIB == pytest.approx(300, rel=0.05)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "pp", "vp", "micro", "batch", "static", "without", "both"),
    [
        (48, 6144, 64, 1, 1, 4, 4, 45.56, 59.25, 9.56),
        (96, 12288, 96, 8, 3, 1, 64, 45.56, 66.84, 12.35),
        (105, 20480, 128, 35, 3, 1, 280, 31.64, 114.02, 23.08),
        (128, 25600, 160, 64, 1, 1, 512, 32.96, 131.25, 26.56),
    ],
)
def test_korthikantis_memory(
    layers: int, hidden: int, heads: int, pp: int, vp: int, micro: int, batch: int, static: float, without: float,
    both: float,
) -> None:
    """arXiv 2205.05198: parameters + optimizer of an average rank (18 B each), activations of the first stage."""
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=51200, seq_length=2048,
        hidden_dropout=0.1, attention_dropout=0.1,
    )
    case = Case(
        model=model, engine=Program(name="Megatron-LM"), tp=8, pp=pp, vp=vp, micro_batch=micro, zero_stage=0,
        micro_batches=batch // micro, global_batch=batch, flash=False, dtype="fp16",
        schedule="1f1b",
    )
    stages = plan_memory(case, machine())
    assert sum(s.static for s in stages) / pp / GIB == pytest.approx(static, rel=0.07)
    assert stages[0].activations / GIB == pytest.approx(without, rel=0.07)
    less = replace(case, sequence_parallel=True, recompute="selective")
    assert stage_memory(less, machine(), 0).activations / GIB == pytest.approx(both, rel=0.07)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layers_activations_are_korthikantis_formula(sequence_parallel: bool) -> None:
    model = ModelConfig(
        num_layers=2, hidden_size=1024, num_attention_heads=16, seq_length=512, hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    case = Case(
        model=model, engine=Program(name="x"), tp=4, micro_batch=2, flash=False, sequence_parallel=sequence_parallel
    )
    s, b, h, a, t = 512, 2, 1024, 16, 4
    scores = 5 * a * s / h
    formula = s * b * h * ((34 + scores) / t if sequence_parallel else 10 + (24 + scores) / t)
    assert layer_activation_bytes(case) == pytest.approx(formula, rel=1e-12)
    full = 2 * s * b * h / (t if sequence_parallel else 1)
    assert layer_activation_bytes(replace(case, recompute="full")) == full


def test_zero_shards_the_optimizer_only() -> None:
    config = load("runs/frontier-175b").config
    case, _ = case_of(config)
    one, four = (stage_memory(replace(case, dp=d), machine("frontier"), 3) for d in (1, 4))
    assert one.optimizer == 4 * four.optimizer == 12 * one.elements
    assert (one.weights, one.gradients) == (four.weights, four.gradients) == (2 * one.elements, 4 * one.elements)
    assert stage_memory(replace(case, dp=4, zero_stage=0), machine("frontier"), 3).optimizer == one.optimizer


def test_parts_add_up() -> None:
    case, _ = case_of(load("runs/frontier-1t", ["cluster.nodes=64"]).config)
    for stage in plan_memory(case, machine("frontier")):
        assert sum(stage.parts().values()) == pytest.approx(stage.total, rel=1e-12)


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt, dropout": {"hidden_dropout": 0.1},
    "gpt, attention dropout": {"attention_dropout": 0.1},
    "llama": {
        "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope", "add_bias": False,
        "tie_embeddings": False, "num_query_groups": 2,
    },
    "qwen3": {
        "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope", "add_bias": False,
        "tie_embeddings": False, "num_query_groups": 2, "qk_norm": True,
    },
    "gpt, normed heads": {"qk_norm": True}, "gpt, relu2": {"activation": "relu2"},
    "latents": {
        "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope", "add_bias": False,
        "tie_embeddings": False, "head_dim": 96, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
}


def kept_bytes(model: ModelConfig, recompute: Literal["none", "selective", "full"], batch: int) -> int:
    """Bytes that a forward of the real model keeps for its backward, parameters left out."""
    config = RunConfig(model=model, activations=ActivationsConfig(policy=recompute), engine="native")
    ctx = ParallelContext.single("cpu")
    stream = DropoutStream(0, ctx.device)
    stream.set_micro_batch(0, tuple(range(batch)))
    (built,) = build_model(config, ctx, torch_providers(), StepSlot(stream))
    for p in built.parameters():
        torch.nn.init.normal_(p, std=0.02)
    own = {p.untyped_storage().data_ptr() for p in built.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        built(torch.randint(0, 100, (batch, model.seq_length)))
    return sum(size for size, _ in kept.values())


def test_dropout_inside_of_the_own_attention_keeps_no_scores() -> None:
    """On a GPU, where the kernel can serve: two numbers of a row stay, and a step is faster than with scores."""
    def planned(**other: Any) -> Case:
        model = ModelConfig(**{"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024,
                               "vocab_size": 50257, "hidden_dropout": 0.1, "attention_dropout": 0.1} | other)
        return case_of(RunConfig(model=model, engine="native", precision=PrecisionConfig(dtype="bf16"),
                                 backend=BackendConfig(device="cuda")))[0]

    inside, none, wide = planned(), planned(attention_dropout=0.0), planned(num_attention_heads=4)
    assert inside.drops_inside and none.flash and not none.drops_inside and not wide.flash
    rows = 1024 * inside.micro_batch * 12 * 4
    assert layer_activation_bytes(inside) == layer_activation_bytes(none) + rows
    scores = 1024 * rows / 4 * 4  # probabilities and dropped ones, bf16
    written = layer_activation_bytes(replace(inside, flash=False))
    assert written == layer_activation_bytes(none) - rows + scores
    rates, layer = Rates.of(machine_of(load("clusters/h200").config)), model_spec(inside.model).layers[0]
    kernel, math = (sum(attention_seconds(replace(inside, flash=flash), layer, rates)) for flash in (True, False))
    assert kernel < 0.6 * math, (kernel, math)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_a_layer_really_keeps(family: str, recompute: Any, batch: int) -> None:
    """One layer more or less of the real model, in bf16 with torch's ops, against the formula."""
    model = ModelConfig(
        num_layers=1, hidden_size=256, num_attention_heads=4, seq_length=128, vocab_size=1000, **FAMILIES[family]
    )
    measured = kept_bytes(replace(model, num_layers=2), recompute, batch) - kept_bytes(model, recompute, batch)
    case = Case(
        model=model, engine=Engine(name="native"), recompute=recompute, micro_batch=batch, flash=False, kernels="torch"
    )
    assert layer_activation_bytes(case) == pytest.approx(measured, rel=0.05)


def test_sums_that_wait_are_counted_where_own_kernels_make_them() -> None:
    """At most the 32 MiB that wait, and no more than a small model has; 4 bytes of 264 partial sums of a column."""
    small = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=8448, vocab_size=256)
    large = replace(small, num_layers=8, hidden_size=4096, num_attention_heads=32)
    described = load("clusters/h200").config

    def bytes_of(model: ModelConfig, **backend: Any) -> float:
        config = replace(described, model=model, layout=LayoutConfig(), backend=BackendConfig(**backend),
                         precision=PrecisionConfig(dtype="bf16"), cluster=replace(described.cluster, nodes=0))
        return waiting_slots(case_of(config, 1)[0], 0)

    assert bytes_of(small) == 4 * 264 * 2 * 13 * 64
    assert bytes_of(replace(small, add_bias=False)) == 4 * 264 * 2 * 4 * 64
    assert bytes_of(large) == 32 * MIB
    assert bytes_of(large, own_kernels="off") == bytes_of(large, device="cpu") == 0

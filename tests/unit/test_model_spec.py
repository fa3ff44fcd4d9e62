"""The spec of a model against the modules built from it: every parameter of every rank, and nothing beside."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from math import prod

import pytest
import torch

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import LayoutConfig, ModelConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import ParameterRecord, record_of
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.embedding import padded_vocab_size
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.shapes import model_records, parameter_shapes
from megatron_port.core.model.spec import GroupedAttentionSpec, LayerSpec, ParameterSpec
from megatron_port.ext.telemetry.flops import parameter_count, unit_costs

SMALL = ModelConfig(num_layers=2, hidden_size=48, num_attention_heads=4, vocab_size=53, seq_length=16)
LLAMA = replace(
    SMALL, activation="swiglu", normalization="rmsnorm", position_embedding="rope", add_bias=False,
    tie_embeddings=False, num_query_groups=2, ffn_hidden_size=64,
)
MODELS = {
    "gpt": SMALL,
    "gpt untied": replace(SMALL, tie_embeddings=False),
    "gpt without biases": replace(SMALL, add_bias=False),
    "neox": replace(SMALL, position_embedding="rope", rotary_percent=0.5, parallel_residual=True),
    "llama": LLAMA,
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=24),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "deepseek": replace(
        LLAMA, num_query_groups=0, head_dim=12, kv_lora_rank=20, q_lora_rank=14, qk_rope_head_dim=4, v_head_dim=10
    ),
    "gpt with normed heads": replace(SMALL, qk_norm=True),
    "windows, sinks": replace(
        LLAMA, sliding_window=5, attention_pattern=("window", "full"), attention_sinks=True, attention_softcap=3.0
    ),
    "olmo2": replace(LLAMA, norm_placement="post", qk_norm=True, qk_norm_over="projection"),
    "norms by layer": replace(LLAMA, norm_pattern=("pre", "post"), mtp_layers=1),
    "gemma": replace(LLAMA, norm_placement="sandwich", qk_norm=True, norm_zero_centered=True, activation="geglu_tanh"),
    "gpt-j": replace(SMALL, position_embedding="rope", parallel_residual=True, shared_norm=True, add_bias=False,
                     mlp_bias=True, norm_bias=True, head_bias=True, tie_embeddings=False),
    "smollm3": replace(LLAMA, rope_pattern=("rope", "none"), attention_scale=0.3),
    "llama, further tokens": replace(LLAMA, mtp_layers=2),
    "gpt, a further token": replace(SMALL, position_embedding="rope", mtp_layers=1, head_bias=True),
    "experts": replace(LLAMA, moe=MoEConfig(num_experts=4, shared_ffn_hidden_size=16)),
    "experts, a gated shared block": replace(
        LLAMA, moe=MoEConfig(num_experts=4, shared_ffn_hidden_size=16, shared_gate=True)
    ),
    "experts, a further token": replace(LLAMA, mtp_layers=1, moe=MoEConfig(num_experts=4, router_bias=True)),
    "gpt, shared layers": replace(SMALL, num_layers=3, shared_layers=2),
    "gpt, factored": replace(SMALL, qkv_rank=5, output_rank=7, up_rank=9, down_rank=11),
    "llama, factored": replace(LLAMA, qkv_rank=8, up_rank=6, add_bias=True),
    "llama with biases": replace(LLAMA, add_bias=True, num_query_groups=1, head_dim=24),
}


def stage_records(model: ModelConfig, topology: Topology, tp_rank: int, *, sp: bool) -> list[ParameterRecord]:
    """Records of a rank's parameters, one stage, on the meta device."""
    layout = LayoutConfig(
        tensor_parallel_size=topology.tp, sequence_parallel=sp, vocab_padding_multiple=1 if topology.tp == 1 else 8
    )
    ctx = ParallelContext(topology, tp_rank, torch.device("meta"), topology.coordinates(tp_rank))
    build = BuildContext(
        model=model, layout=layout, ctx=ctx, providers=torch_providers(),
        step=StepSlot(DropoutStream(0, torch.device("meta"))), dtype=torch.float32,
    )
    return [record_of(p) for p in GPTStage(build, start=0, stop=model.num_layers).parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_one_process_holds_what_the_spec_states(name: str) -> None:
    """Names, order, shapes, initial values, decay and split."""
    built = stage_records(MODELS[name], Topology(), 0, sp=False)
    assert {r.name: r for r in built} == model_records(MODELS[name])
    assert [r.name for r in built] == list(parameter_shapes(MODELS[name]))
    assert sum(r.numel for r in built) == parameter_count(MODELS[name])


def differing(spec: ParameterSpec, records: list[ParameterRecord], tp: int, sp: bool, padded: int) -> list[str]:
    """What a rank's parameters of one name have otherwise than the spec says."""
    held = sum(prod(r.local_shape) for r in records)
    shared = sum(prod(r.local_shape) for r in records if "kv_copies" in r.partial_over)
    facts = {
        "elements": held == spec.local_numel(tp, padded), "shared elements": shared == spec.shared_numel(tp),
        "shape": {r.shape for r in records} == {spec.shape}, "decay": {r.decay for r in records} == {spec.decay},
        "partial": {"tp" in r.partial_over for r in records} == {
            spec.is_partial(tp, sp) and (spec.split is None or spec.split.experts)
        },
        "init": {(r.init.kind, r.init.std) for r in records} == {(spec.init, spec.std)},
    }
    return [fact for fact, same in facts.items() if not same]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tp", "sp"), [(2, False), (2, True), (4, False), (4, True)])
def test_every_rank_holds_what_the_spec_states(name: str, tp: int, sp: bool) -> None:
    model = MODELS[name]
    topology = Topology(tp=tp, kv_copies=max(tp // model.kv_heads, 1))
    padded = padded_vocab_size(model.vocab_size, tp=tp, multiple=8)
    for rank in range(tp):
        built = stage_records(model, topology, rank, sp=sp)
        by_name = {n: list(r) for n, r in itertools.groupby(built, key=lambda r: r.name)}
        specs = {spec.name: spec for spec in model_spec(model).parameters()}
        assert list(by_name) == list(specs)
        wrong = {n: differing(specs[n], by_name[n], tp, sp, padded) for n in specs}
        assert not any(wrong.values()), wrong


def test_layers_of_other_kinds_are_counted_apart() -> None:
    """Counts go over kinds × how many, not over the first layer alone."""
    spec = model_spec(SMALL)
    thin = model_spec(replace(SMALL, ffn_hidden_size=8)).layers[0]
    mixed = replace(spec, layers=(spec.layers[0], thin, thin))
    assert [(layer is thin, count) for layer, count in mixed.kinds()] == [(False, 1), (True, 2)]
    assert [(layer is thin, count) for layer, count in mixed.kinds(1, 2)] == [(True, 1)]


def test_a_units_cost_is_its_matrices_and_its_core() -> None:
    """Per token 2 operations for each element of its matrices, and 4·s·a·d of attention."""
    (layer,) = {id(x): x for x in model_spec(LLAMA).layers}.values()
    assert isinstance(layer, LayerSpec)
    matrices = sum(p.numel for p in layer.parameters if len(p.shape) > 1)
    assert unit_costs(LLAMA) == [0.0, *[2.0 * matrices + 4 * 16 * 48] * 2, 2.0 * 53 * 48]


def test_a_window_counts_as_its_band() -> None:
    """Scores of a windowed layer: twice the band, as all scores are twice the causal half; kinds follow the pattern."""
    model = replace(MODELS["windows, sinks"], num_layers=5)
    spec, seq = model_spec(model), model.seq_length
    assert [layer.mixer.window for layer in spec.layers] == [5, 0, 5, 0, 5]
    assert len({id(layer) for layer in spec.layers}) == 2
    outside = (seq - 5) ** 2  # two triangles of seq - 5 rows, whose sides count half
    assert [layer.mixer.flops(seq) for layer in spec.layers[:2]] == [
        4 * 48 * (seq * seq - outside), 4 * 48 * seq * seq]
    assert model_spec(replace(model, sliding_window=99)).layers[0].mixer.flops(seq) == 4 * 48 * seq * seq


@pytest.mark.parametrize("window", [0, 3, 8, 99])
def test_documents_count_as_their_squares(window: int) -> None:
    """Alike ones with any window, and different ones without, by their mean over tokens; only the core changes."""
    model = replace(MODELS["windows, sinks"], sliding_window=window, attention_pattern=(), seq_length=24)
    layer = model_spec(model).layers[0]
    core = layer.mixer.flops
    assert core(24, 8) == 3 * core(8) < core(24)
    if not window:
        lengths = (1, 5, 18)
        mean = sum(n * n for n in lengths) / 24
        assert core(24, mean) == sum(map(core, lengths))
    assert layer.forward_flops(24) - layer.forward_flops(24, 8) == core(24) - core(24, 8)


def test_normed_heads_are_partial_whatever_the_layout() -> None:
    """Each tensor-parallel rank has its heads' part of the gradient, with sequence parallelism and without."""
    spec = model_spec(MODELS["qwen3"]).layers[0].mixer
    assert isinstance(spec, GroupedAttentionSpec)
    assert spec.query_norm is not None and spec.key_norm is not None
    for norm in (spec.query_norm, spec.key_norm):
        (weight,) = norm.parameters
        assert weight.shape == (24,) and not weight.decay
        assert weight.is_partial(2, False) and weight.is_partial(2, True) and not weight.is_partial(1, False)
    plain = replace(MODELS["qwen3"], qk_norm=False)
    assert parameter_count(MODELS["qwen3"]) - parameter_count(plain) == 2 * 2 * 24


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_reads_all_that_its_operations_write(name: str) -> None:
    """Else an addition reads the residual stream before a norm, and gradients are not added where the norm's backward
    pass adds them: two roundings in place of one in half precision, which no comparison in fp32 sees."""
    for layer in model_spec(MODELS[name]).layers:
        read = {value for op in layer.ops for value in op.reads}
        written = [value for op in layer.ops for value in op.writes]
        assert [value for value in written if value not in read] == list(layer.ops[-1].writes)


def test_specs_need_no_torch() -> None:
    """The planner, the tuner and the configuration's commands read them on a login node."""
    modules = "megatron_port.ext.telemetry.flops, megatron_port.core.model.decoder_spec"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

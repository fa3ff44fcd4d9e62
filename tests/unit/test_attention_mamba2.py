"""Attention and Mamba-2 beside one another: their formulas, one position after the other, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_mixers import layer_of
from test_recurrences import BATCH, mamba2, refused, rows_in

from megatron_port.core.config.checks import problems
from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import DataConfig, LayoutConfig, ModelConfig, OptimizerConfig, RunConfig
from megatron_port.core.engine.module import recorded_parameters
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.mixers.scaled_mlp import ScaledSwiGLU
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.ext.weights.settings import targets_of

SEQ = 40
MODEL = ModelConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, num_query_groups=2, head_dim=6, seq_length=SEQ, vocab_size=100,
    normalization="rmsnorm", add_bias=False, position_embedding="rope", rope_theta=100.0, activation="swiglu",
    attention_scale=0.3, mixer="attention_mamba2", mlp_multipliers=(0.7, 1.6), recurrent=RecurrentConfig(
        heads=4, key_heads=2, key_size=5, value_size=3, kernel=3, chunk=16, attention_multiplier=0.4,
        multipliers=(0.5, 0.7, 1.3, 0.8, 1.2), result_multiplier=0.6, gated_norm="none",
    ),
)
MODELS = {
    "groups": MODEL, "one group, window": replace(
        MODEL, sliding_window=7, recurrent=replace(MODEL.recurrent, key_heads=1, gated_norm="group", multipliers=()),
    ),
}
STARTS = ((0, 1, 2, 16, 17, 30), (0, 15, 39))
EDGES = {None: (((0, SEQ),),) * BATCH, STARTS: tuple(tuple(zip(at, (*at[1:], SEQ), strict=True)) for at in STARTS)}


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """A head, of which element i and i + d/2 are a pair."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        # Tables are made in float32.
        angle = torch.tensor(float(position)) * (1.0 / MODEL.rope_theta ** torch.tensor(2 * i / len(x)))
        cos, sin = float(angle.cos()), float(angle.sin())
        out[i], out[i + half] = x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin
    return out


def attention(p: dict[str, torch.Tensor], x: torch.Tensor, model: ModelConfig, first: int) -> torch.Tensor:
    """One document, whose first position is ``first``."""
    heads, groups, d = model.num_attention_heads, model.kv_heads, model.head_size
    rows = (x @ p["qkv.weight"].T).view(len(x), groups, heads // groups + 2, d)
    out = []
    for t in range(len(x)):
        seen = range(max(0, t + 1 - model.sliding_window) if model.sliding_window else 0, t + 1)
        mixed = []
        for head in range(heads):
            group, place = divmod(head, heads // groups)
            query = rotated(rows[t, group, place], first + t)
            scores = torch.stack([query @ rotated(rows[j, group, -2], first + j) for j in seen])
            values = torch.stack([rows[j, group, -1] for j in seen])
            mixed.append(torch.softmax(model.attention_scale * scores, 0) @ values)
        out.append(torch.cat(mixed))
    return torch.stack(out) @ p["output.weight"].T


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("starts", [None, STARTS], ids=["one document", "documents"])
def test_the_mixer_is_the_sum_of_both_formulas(model: ModelConfig, starts: Any) -> None:
    mixer, x = layer_of(model).attention, rows_in(model).requires_grad_()
    if starts is not None:
        begun = torch.zeros(BATCH, SEQ, dtype=torch.int32)
        for row, at in zip(begun, starts, strict=True):
            for start in at:
                row[start:] = start
        assert isinstance(mixer.step.current, StepContext)
        mixer.step.current = replace(mixer.step.current, document_starts=begun)
    p: dict[str, torch.Tensor] = {r.name.partition(".attention.")[2]: own for r, own in recorded_parameters(mixer)}
    recurrent = {**p, "output.weight": p["recurrent_output.weight"]}
    samples = [
        torch.cat([
            0.4 * attention(p, x[a:b, i], model, a) + mamba2(recurrent, x[a:b, i], model) for a, b in edges
        ]) for i, edges in enumerate(EDGES[starts])
    ]
    wanted = torch.stack(samples, dim=1)
    factor = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leaves = [x, *mixer.parameters()]
    gradients = torch.autograd.grad((wanted * factor).sum(), leaves)
    found = mixer(x)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7 * float(wanted.abs().max()))
    for want, got, name in zip(
        gradients, torch.autograd.grad((found * factor).sum(), leaves), ["x", *p], strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7 * float(want.abs().max()), msg=name)


def test_a_layer_adds_both_to_the_residual_stream() -> None:
    layer, x = layer_of(MODEL), rows_in(MODEL)
    assert layer.norm1 is not None and layer.norm2 is not None
    middle = x + layer.attention(layer.norm1(x))
    gate, up = layer.mlp.up(layer.norm2(middle)).chunk(2, dim=-1)
    gate = 0.7 * gate
    torch.testing.assert_close(layer(x), middle + 1.6 * layer.mlp.down(gate / (1 + torch.exp(-gate)) * up))


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.25, 3.0)])
def test_scaled_swiglu_is_its_formula(factors: tuple[float, float]) -> None:
    x = torch.randn(3, 5, 14, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    wanted = factors[1] * factors[0] * gate * torch.sigmoid(factors[0] * gate) * up
    found, grad = ScaledSwiGLU.apply(x, *factors), torch.randn(3, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    one, two = (torch.autograd.grad(out, x, grad)[0] for out in (found, wanted))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_what_the_mixer_states_of_itself() -> None:
    spec = model_spec(MODEL).layers[0].mixer
    attention, recurrent = spec.parts
    assert spec.attention == attention and not attention.recomputes and recurrent.recomputes
    assert spec.flops(SEQ) == attention.flops(SEQ) + recurrent.flops(SEQ)
    assert spec.pair_flops(SEQ) == attention.flops(SEQ)
    assert sum(p.numel for p in spec.parameters) == sum(p.numel for part in spec.parts for p in part.parameters)
    assert spec.linears == (*attention.projections, *recurrent.projections, attention.output, recurrent.output)
    assert model_spec(MODEL).layers[0].region_widths(24) == [(24, 24)] * 3
    alone = (replace(MODEL, mixer=name) for name in ("attention", "mamba2"))
    both = sum(map(parameter_count, alone))
    own = MODEL.num_layers * sum(p.numel for p in spec.parameters)
    assert 2 * (parameter_count(MODEL) - own) == both - own
    assert not {"query", "key", "value"} & {*targets_of(MODEL)}


@pytest.mark.parametrize(("change", "said"), [
    ({"add_bias": True}, "model.add_bias true is not built for model.mixer 'attention_mamba2'; leave it out"),
    ({"attention_gate": True}, "model.attention_gate true is not built for"),
    ({"kv_lora_rank": 8, "qk_rope_head_dim": 2, "num_query_groups": 0}, "model.kv_lora_rank 8 is not built for"),
    ({"qkv_rank": 3}, "model.qkv_rank 3 is not built for"), ({"mup_base_size": 12}, "mup_base_size 12 is not built"),
    ({"mlp_multipliers": (1.0,)}, "mlp_multipliers (1.0,): give two above 0"),
    ({"mlp_multipliers": (1.0, -1.0)}, "give two above 0"), ({"mlp_bias": True}, "does not go with model.mlp_bias"),
    ({"activation": "gelu"}, "does not go with model.activation"),
    ({"recurrent": replace(MODEL.recurrent, multipliers=(1.0, 2.0))}, "multipliers [1.0, 2.0]: give five above 0"),
    ({"recurrent": replace(MODEL.recurrent, multipliers=(1.0, 2.0, 0.0, 1.0, 1.0))}, "give five above 0"),
    ({"recurrent": replace(MODEL.recurrent, negative_eigenvalues=True)}, "negative_eigenvalues True is of other"),
    ({"mixer": "mamba2", "attention_scale": 0.0, "num_query_groups": 0}, "attention_multiplier 0.4 is of other mixers"),
])
def test_what_does_not_go_together_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    assert refused(MODEL) == []
    found = refused(replace(MODEL, **change))
    assert any(said in line for line in found), found


def test_ranks_that_do_not_divide_the_recurrence_are_refused() -> None:
    (said,) = refused(MODEL, tensor_parallel_size=4)
    assert said.startswith("layout.tensor_parallel_size 4 does not divide model.recurrent.key_heads 2")


@pytest.mark.parametrize("change", [{"attention_gate": True}, {"kv_lora_rank": 8, "qk_rope_head_dim": 2}])
def test_other_attention_is_refused_by_name_whatever_else_asks_for_the_spec(change: dict[str, Any]) -> None:
    run = RunConfig(
        model=replace(MODEL, **change), data=DataConfig(synthetic=True), optimizer=OptimizerConfig(name="adamw-8bit"),
        layout=LayoutConfig(tensor_parallel_size=2, vocab_padding_multiple=1), engine="native",
    )
    found = problems(run, world_size=2)
    assert any("is not built for model.mixer 'attention_mamba2'" in line for line in found), found

"""Rotary frequencies, first weights and sizes of a model, against transformers' functions and published formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.counter import key_of
from megatron_port.core.dist.positions import Positions
from megatron_port.core.dist.record import InitSpec, initial_values
from megatron_port.core.layers.attention import AttentionMask, masked_softmax
from megatron_port.core.layers.fused import torch_layer_norm, torch_rms_norm
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.rotary import RotaryTables, frequencies, score_factor, turning_factor

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------ rotary embeddings


def theirs(kind: str, model: ModelConfig, **more: Any) -> tuple[torch.Tensor, float]:
    """transformers' (frequencies, factor of cos and sin)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_theta": model.rope_theta, "factor": model.rope_factor, "partial_rotary_factor": model.rotary_percent,
        "original_max_position_embeddings": model.rope_original_length, **more,
    }
    config: Any = SimpleNamespace(
        rope_parameters=parameters, standardize_rope_params=lambda: None, head_dim=model.head_size,
        hidden_size=model.hidden_size, num_attention_heads=model.num_attention_heads,
    )
    found, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
    return found, float(factor)


def rope(head: int, theta: float, percent: float, **more: Any) -> ModelConfig:
    return ModelConfig(hidden_size=2 * head, num_attention_heads=2, position_embedding="rope", rope_theta=theta,
                       rotary_percent=percent, **more)


def same(model: ModelConfig, kind: str, **more: Any) -> None:
    wanted, factor = theirs(kind, model, **more)
    found = frequencies(model, CPU)
    torch.testing.assert_close(found[: len(wanted)], wanted, rtol=2e-6, atol=0)
    assert len(found) == model.head_size // 2 and not found[len(wanted) :].any()
    assert turning_factor(model) == pytest.approx(factor, rel=1e-12) and score_factor(model) == 1.0


THETAS, SHARES = st.sampled_from([100.0, 1e4, 5e5]), st.sampled_from([0.25, 0.5, 1.0])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([16, 64, 128]), THETAS, SHARES, st.floats(1.0, 40.0), st.integers(16, 9000),
       st.floats(0.2, 3.0), st.floats(1.05, 8.0))
def test_scaled_frequencies_are_transformers(
    head: int, theta: float, percent: float, factor: float, original: int, low: float, ratio: float
) -> None:
    """Linear, and Llama 3.1's with waves short, long and between."""
    same(rope(head, theta, percent, rope_scaling="linear", rope_factor=factor), "linear")
    same(rope(head, theta, percent, rope_scaling="llama3", rope_factor=factor, rope_original_length=original,
              rope_low_freq_factor=low, rope_high_freq_factor=low * ratio), "llama3",
         low_freq_factor=low, high_freq_factor=low * ratio)


@settings(max_examples=120, deadline=None)
@example(16, 100.0, 1.0, 8.0, 2000, 0.02, 1000.0, True, 0.0)
@given(st.sampled_from([16, 64, 128]), THETAS, SHARES, st.floats(1.0, 40.0), st.integers(8, 20000),
       st.floats(0.02, 4.0), st.floats(1.05, 60.0), st.booleans(), st.sampled_from([0.0, 0.7, 1.3]))
def test_yarn_is_transformers(
    head: int, theta: float, percent: float, factor: float, original: int, slow: float, ratio: float, truncate: bool,
    attention: float,
) -> None:
    """Ramps that begin before the first pair, end behind the last one, or have no width, too."""
    fast, rotated = slow * ratio, int(head * percent)
    at = rotated * math.log(original / (fast * 2 * math.pi)) / (2 * math.log(theta))
    to = rotated * math.log(original / (slow * 2 * math.pi)) / (2 * math.log(theta))
    assume(max(at, 0.0) + 1 < min(to, rotated - 1))  # elsewhere theirs may turn the ramp round
    model = rope(head, theta, percent, rope_scaling="yarn", rope_factor=factor, rope_original_length=original,
                 rope_beta_fast=fast, rope_beta_slow=slow, rope_truncate=truncate, rope_attention_factor=attention)
    more: dict[str, Any] = {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
    same(model, "yarn", **more, **({"attention_factor": attention} if attention else {}))


def test_yarn_of_a_context_in_which_all_turn() -> None:
    """Pairs that turn more often than beta_fast stay."""
    model = rope(16, 100.0, 1.0, rope_scaling="yarn", rope_factor=8.0, rope_original_length=2_000_000)
    assert torch.equal(frequencies(model, CPU), frequencies(rope(16, 100.0, 1.0), CPU))


def test_windowed_layers_have_their_own_base_and_others_no_angle() -> None:
    model = rope(16, 1e4, 1.0, rope_scaling="linear", rope_factor=8.0, window_rope_theta=500.0, sliding_window=4)
    wanted = 500.0 ** (-torch.arange(8, dtype=torch.float64) / 8)  # not scaled
    torch.testing.assert_close(frequencies(model, CPU, "window").double(), wanted, rtol=1e-6, atol=0)
    assert not frequencies(model, CPU, "none").any()


@pytest.mark.parametrize("rotation", ["usual", "window", "none"])
def test_tables_carry_the_factor_of_scores(rotation: Literal["usual", "window", "none"]) -> None:
    """Products of queries and keys, each with the tables' factor, over the root of the head size are attention_scale
    times their product; YaRN's factor counts twice for the pairs that turn, as in transformers."""
    model = rope(32, 1e4, 0.5, rope_scaling="yarn", rope_factor=4.0, rope_original_length=64, attention_scale=0.3,
                 window_rope_theta=500.0)
    cos, sin = RotaryTables(model, rotation).rows(Positions.contiguous(5), CPU)
    square = (cos.double() ** 2 + sin.double() ** 2) / math.sqrt(32)
    yarn = (0.1 * math.log(4.0) + 1.0) ** 2 if rotation == "usual" else 1.0
    torch.testing.assert_close(square[:, :8], torch.full((5, 8), 0.3 * yarn, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(square[:, 8:], torch.full((5, 8), 0.3, dtype=torch.float64), rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------ first weights

SMALL: dict[str, Any] = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 97,
                         "seq_length": 16, "init_std": 0.03}
MODELS: dict[str, ModelConfig] = {
    "gpt": ModelConfig(**SMALL), "muP": ModelConfig(**SMALL, mup_base_size=16, tie_embeddings=False),
    "experts": ModelConfig(**SMALL, mup_base_size=32, activation="swiglu", moe=MoEConfig(
        num_experts=4, shared_ffn_hidden_size=32, shared_gate=True, router_bias=True, first_dense=1)),
    "latent": ModelConfig(**SMALL, add_bias=False, normalization="rmsnorm", position_embedding="rope", kv_lora_rank=24,
                          q_lora_rank=40, qk_rope_head_dim=8, head_dim=24, v_head_dim=16),
    "zero-centred, further tokens": ModelConfig(
        **SMALL, norm_zero_centered=True, position_embedding="rope", normalization="rmsnorm", qk_norm=True,
        attention_sinks=True, head_bias=True, mtp_layers=1, norm_placement="sandwich"),
}
RESIDUAL = ("attention.output.weight", "mlp.down.weight", "experts.down.weight", "shared.down.weight")


@pytest.mark.parametrize("name", MODELS)
def test_first_weights_are_drawn_as_documented(name: str) -> None:
    """Megatron-LM's scaled_init_method_normal: init_std, divided by the root of 2 L where a layer writes to the
    residual stream; under muP matrices by the root of m and routers by m (arXiv 2203.03466, table 8). Mean, deviation
    and fourth moment of the drawn numbers, within five deviations."""
    model = MODELS[name]
    m = model.hidden_size / model.mup_base_size if model.mup_base_size else 1.0
    specs = list(model_spec(model).parameters())
    assert len({s.name for s in specs}) == len(specs) > 10
    for spec in specs:
        values = initial_values(
            seed=3, name=spec.name, init=InitSpec(spec.init, spec.std), shape=spec.shape,
            offset=(0,) * len(spec.shape), extent=spec.shape).double()
        if not spec.name.endswith(".weight"):
            assert not values.any(), spec.name  # biases, sinks
        elif "norm" in spec.name:
            assert bool((values == (0.0 if model.norm_zero_centered else 1.0)).all()), spec.name
        else:
            std = 0.03
            if "router" in spec.name or "shared_gate" in spec.name:
                std /= m
            elif not spec.name.startswith(("embedding.", "head.")):
                std /= math.sqrt(m)
            if spec.name.endswith(RESIDUAL):
                std /= math.sqrt(2 * 3)
            n, z = values.numel(), values / std
            assert abs(z.mean()) < 5 / math.sqrt(n), spec.name
            assert abs(z.square().mean() - 1) < 5 * math.sqrt(2 / n), spec.name
            assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / n), spec.name


def test_uniform_draws_have_the_deviation_and_a_range() -> None:
    """What adapters begin with."""
    x = initial_values(seed=1, name="a", init=InitSpec("uniform", 0.5), shape=(200, 200), offset=(0, 0),
                       extent=(200, 200)).double() / (0.5 * math.sqrt(12.0)) + 0.5
    assert float(x.min()) > 0 and float(x.max()) < 1 and float(x.min()) < 1e-3 and float(x.max()) > 1 - 1e-3
    assert abs(x.mean() - 0.5) < 5 / math.sqrt(12 * 40_000) and abs(x.var() - 1 / 12) < 5 / math.sqrt(180 * 40_000)
    assert key_of("weight", 1, "a") != key_of("weight", 2, "a")


# ------------------------------------------------------------------------------------------------ sizes, norms, scores


@pytest.mark.parametrize("hidden", [8, 96, 97, 256, 768, 4096, 5120])
def test_default_width_of_a_gated_mlp_is_llamas(hidden: int) -> None:
    """facebookresearch/llama, FeedForward: two thirds of 4 h, rounded up to a multiple of 256."""
    width = int(2 * (4 * hidden) / 3)
    assert ModelConfig(hidden_size=hidden, num_attention_heads=1, activation="swiglu").ffn_size == 256 * (
        (width + 256 - 1) // 256)
    assert ModelConfig(hidden_size=hidden, num_attention_heads=1).ffn_size == 4 * hidden


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_norms_are_their_formulas(eps: float) -> None:
    """eps within the root, the variance without Bessel's correction (arXiv 1607.06450, 1910.07467); of a sum too."""
    generator = torch.Generator().manual_seed(1)
    x, r, w, b = (0.1 * torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((4, 9), (4, 9), (9,), (9,)))
    for rest in (None, r):
        total = x if rest is None else x + rest
        centred = total - total.mean(-1, keepdim=True)
        layer = centred / ((centred**2).mean(-1, keepdim=True) + eps) ** 0.5 * w + b
        rms = total / ((total**2).mean(-1, keepdim=True) + eps) ** 0.5 * w
        both = (torch_layer_norm(x, rest, w, b, eps), layer), (torch_rms_norm(x, rest, w, None, eps), rms)
        for found, wanted in both:
            torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=1e-13)
            assert torch.equal(found[1], total)


def test_windows_caps_sinks_and_documents_are_their_definitions() -> None:
    """Query by query in plain Python: ``window`` keys, the query's own among them; cap · tanh(score / cap); the sink
    takes part in the softmax without a value."""
    seq, heads, window, cap = 7, 2, 3, 1.5
    scores = 3 * torch.randn(2, heads, seq, seq, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    first = torch.tensor([[0, 0, 2, 2, 2, 2, 6], [0] * 7], dtype=torch.int32)
    sinks = torch.tensor([0.4, -1.0], dtype=torch.float64)
    found = masked_softmax(scores, AttentionMask(window=window, softcap=cap, sinks=sinks, first=first))
    for b in range(2):
        for h in range(heads):
            for i in range(seq):
                seen = [j for j in range(seq) if j <= i and i - j < window and j >= int(first[b, i])]
                e = {j: math.exp(cap * math.tanh(float(scores[b, h, i, j]) / cap)) for j in seen}
                total = sum(e.values()) + math.exp(float(sinks[h]))
                wanted = [e.get(j, 0.0) / total for j in range(seq)]
                assert found[b, h, i].tolist() == pytest.approx(wanted, rel=1e-12)

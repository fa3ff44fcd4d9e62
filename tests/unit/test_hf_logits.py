"""The models of every family give transformers' logits: an oracle that nobody here wrote.

Weights are scaled by 5: at the usual 0.02 even a wrong activation changes the logits by only 1e-5. How close they must
be, logit_bounds.py says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models as hf
import pytest
import torch
from logit_bounds import FP64, errors_of, logit_errors, stage_of, to_double

from megatron_port.core.engine.module import recorded_parameters
from megatron_port.tools.interop.hf_files import HFFolder
from megatron_port.tools.parity.comparison import gradient_deviation

pytest.importorskip("transformers")


CASES = {
    "gpt2 erf": lambda: hf.gpt2(activation_function="gelu"),
    "gpt2 tanh": lambda: hf.gpt2(activation_function="gelu_new", n_inner=96),
    "gpt2 untied": lambda: hf.gpt2(tie_word_embeddings=False),
    "llama one group a head": lambda: hf.llama(num_key_value_heads=4),
    "llama tied": lambda: hf.llama(tie_word_embeddings=True),
    "llama one group": lambda: hf.llama(num_key_value_heads=1, head_dim=24),
    "llama biases": lambda: hf.llama(attention_bias=True, mlp_bias=True),
    "llama linear": lambda: hf.llama(rope_parameters=dict(hf.LINEAR)),
    "llama llama3": lambda: hf.llama(rope_parameters=dict(hf.LLAMA3)),
    "llama yarn": lambda: hf.llama(rope_parameters=dict(hf.YARN)),
    "deepseek_v3": lambda: hf.deepseek(),
    "deepseek_v3 dense, yarn, no query latent": lambda: hf.deepseek(
        first_k_dense_replace=3, q_lora_rank=None, v_head_dim=20, rms_norm_eps=0.01,
        rope_parameters={**hf.YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    "deepseek_v2": lambda: hf.small("deepseek_v2"),
    "mixtral": lambda: hf.small("mixtral"),
    "qwen2_moe": lambda: hf.small("qwen2_moe", max_window_layers=3),
    "qwen3_moe": lambda: hf.small("qwen3_moe"),
    "qwen3_next": lambda: hf.small("qwen3_next"),
    "qwen3_next dense first, whole rotary": lambda: hf.small(
        "qwen3_next", layer_types=None, num_hidden_layers=4, mlp_only_layers=[0, 1],
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
    ),
    "qwen3_5_text": lambda: hf.small("qwen3_5_text", tie_word_embeddings=True),
    "lfm2": lambda: hf.small("lfm2"),
    "lfm2 by index, no biases, untied": lambda: hf.small(
        "lfm2", layer_types=None, full_attn_idxs=[0, 3], num_hidden_layers=4, conv_bias=False, conv_L_cache=5,
        block_auto_adjust_ff_dim=False, tie_word_embeddings=False, rope_parameters=dict(hf.YARN),
    ),
    "bamba": lambda: hf.small("bamba"),
    "bamba of groups, no biases, yarn": lambda: hf.small(
        "bamba", attn_layer_indices=[0, 2], mamba_n_groups=2, mamba_conv_bias=False, mamba_d_conv=3, mlp_bias=True,
        attention_bias=True, time_step_limit=(0.5, 0.9), rope_parameters={**hf.YARN, "partial_rotary_factor": 0.75},
    ),
    "falcon_h1": lambda: hf.small("falcon_h1"),
    "falcon_h1 of groups, normed, yarn": lambda: hf.small(
        "falcon_h1", mamba_n_groups=2, mamba_conv_bias=False, mamba_d_conv=3, mamba_rms_norm=True, mamba_d_ssm=None,
        mamba_norm_before_gate=False, time_step_limit=(0.5, 0.9), rope_parameters=dict(hf.YARN),
        tie_word_embeddings=True, mlp_multipliers=None, ssm_multipliers=None,
    ),
    "kimi_linear": lambda: hf.small("kimi_linear"),
    "kimi_linear by number, query latent, all dense": lambda: hf.small(
        "kimi_linear", layer_types=None, linear_attn_config={
            "kda_layers": [2], "full_attn_layers": [1, 3], "num_heads": 3, "head_dim": 8, "short_conv_kernel_size": 3,
        }, first_k_dense_replace=3, q_lora_rank=24, rms_norm_eps=0.01,
    ),
    "olmo_hybrid": lambda: hf.small("olmo_hybrid"),
    "olmo_hybrid without positions, usual sizes": lambda: hf.small(
        "olmo_hybrid", rope_parameters={"rope_type": "default", "rope_theta": None}, layer_types=None,
        num_hidden_layers=4, linear_num_key_heads=None, linear_num_value_heads=None, linear_key_head_dim=None,
        linear_value_head_dim=None, linear_allow_neg_eigval=False, rms_norm_eps=1e-3,
    ),
    "granitemoehybrid": lambda: hf.small("granitemoehybrid"),
    "granitemoehybrid dense, rope, groups": lambda: hf.small(
        "granitemoehybrid", num_local_experts=0, position_embedding_type="rope", mamba_n_groups=2,
        layer_types=["full_attention", "linear_attention", "full_attention"], tie_word_embeddings=True,
        rope_parameters=dict(hf.YARN),
    ),
    "nemotron_h": lambda: hf.small("nemotron_h"),
    "nemotron_h dense, one group, biases": lambda: hf.small(
        "nemotron_h", n_groups=1, mlp_bias=True, use_conv_bias=False, time_step_min=0.6,
        layers_block_type=["full_attention", "mlp", "linear_attention", "linear_attention", "mlp"],
    ),
    "mamba2": lambda: hf.small("mamba2"),
    "mamba2 one group, no biases, tied": lambda: hf.small(
        "mamba2", n_groups=1, use_conv_bias=False, conv_kernel=3, tie_word_embeddings=True, expand=3, head_dim=48,
        time_step_limit=(0.5, 0.9),
    ),
    "olmoe": lambda: hf.small("olmoe"),
    "gpt_oss yarn": lambda: hf.small("gpt_oss", rope_parameters={**hf.YARN, "truncate": False}),
    "mistral": lambda: hf.small("mistral"),
    "qwen2": lambda: hf.small("qwen2"),
    "qwen2 layer types": lambda: hf.small("qwen2", layer_types=["sliding_attention", "full_attention"] * 2,
                                          num_hidden_layers=4),
    "qwen2 tied, yarn": lambda: hf.small(
        "qwen2", tie_word_embeddings=True, rope_parameters={**hf.YARN, "attention_factor": 1.5, "beta_fast": 4.0}
    ),
    "granite": lambda: hf.small("granite", **hf.FACTORS),
    "granite biases, yarn": lambda: hf.small(
        "granite", attention_bias=True, mlp_bias=True, rope_parameters=dict(hf.YARN), **hf.FACTORS
    ),
    "phi3": lambda: hf.small("phi3", sliding_window=None),
    "phi3 half rotary": lambda: hf.small(
        "phi3", sliding_window=9,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    ),
    "starcoder2": lambda: hf.small("starcoder2", sliding_window=None),
    "starcoder2 erf, untied": lambda: hf.small("starcoder2", hidden_act="gelu", tie_word_embeddings=False),
    "gemma2": lambda: hf.small("gemma2"),
    "gemma2 untied, no caps": lambda: hf.small(
        "gemma2", attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False
    ),
    "gemma3": lambda: hf.small("gemma3_text"),
    "gemma3 scaled, capped": lambda: hf.small(
        "gemma3_text", final_logit_softcapping=3.0, rope_parameters=hf.GEMMA_ROPE
    ),
    "olmo2": lambda: hf.small("olmo2"),
    "smollm3": lambda: hf.small("smollm3", num_hidden_layers=5, no_rope_layers=None),
    "smollm3 listed, biases": lambda: hf.small(
        "smollm3", attention_bias=True, mlp_bias=True, rope_parameters=dict(hf.YARN)
    ),
    "gptj": lambda: hf.small("gptj"),
    "gptj erf, whole rotary": lambda: hf.small("gptj", activation_function="gelu", rotary_dim=16),
    "falcon": lambda: hf.small("falcon"),
    "falcon sequential, biases": lambda: hf.small("falcon", parallel_attn=False, bias=True, multi_query=False),
    "falcon new decoder": lambda: hf.small("falcon", new_decoder_architecture=True, num_kv_heads=2),
    "falcon new decoder, one norm": lambda: hf.small(
        "falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, tie_word_embeddings=False
    ),
    "qwen3": lambda: hf.small("qwen3", use_sliding_window=False),
    "qwen3 tied, llama3": lambda: hf.small("qwen3", tie_word_embeddings=True, rope_parameters=dict(hf.LLAMA3)),
    "neox": lambda: hf.neox(),
    "neox half rotary, yarn": lambda: hf.neox(rope_parameters={**hf.YARN, "partial_rotary_factor": 0.5}),
    "neox half rotary, sequential": lambda: hf.neox(
        rotary_pct=0.5, use_parallel_residual=False, hidden_act="gelu_fast"
    ),
    "neox whole rotary, tied": lambda: hf.neox(rotary_pct=1.0, tie_word_embeddings=True, rotary_emb_base=500),
}


# transformers has ten digits of √(2/π) in gelu_fast, and DeepSeek-V2 rotates with complex numbers of float32.
INEXACT = {"neox half rotary, sequential": 1e-11, "deepseek_v2": 1e-7}


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    reference = hf.reference(CASES[case]())
    folder = HFFolder(hf.saved(reference, tmp_path, shard="40KB"))
    logit_errors(folder, reference).check(INEXACT.get(case, FP64))


@pytest.mark.parametrize("case", ["gpt2 tanh", "llama llama3"])
def test_documents_within_a_sample(case: str, tmp_path: Path) -> None:
    """transformers gets the mask in full and each document's own positions; ours gets where documents start, and counts
    learned positions from there. Rotary ones stay: their differences are the same."""
    reference = hf.reference(CASES[case]())
    folder = HFFolder(hf.saved(reference, tmp_path))
    tokens = torch.randint(0, hf.VOCABULARY, (3, 32), generator=torch.Generator().manual_seed(1))
    row = torch.arange(32)
    starts = torch.stack([
        torch.where((row[:, None] >= torch.tensor(edges)), torch.tensor(edges), 0).max(1).values
        for edges in ([0, 1, 2, 31], [0, 7, 20], [0])
    ])
    seen = (row >= starts[..., None]) & (row <= row[:, None])
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]

    def ours(dtype: torch.dtype) -> torch.Tensor:
        stage = stage_of(folder, dtype=dtype, position_reset=case.startswith("gpt2"))
        assert stage.embedding is not None
        stage.embedding.residual.step.announce(0, (0, 1, 2), document_starts=starts.to(torch.int32))
        return stage(tokens).transpose(0, 1)[..., : hf.VOCABULARY]

    with torch.no_grad():
        assert hf.relative(ours(torch.float32), reference(tokens).logits) > 1e-2

    def theirs() -> torch.Tensor:
        logits: torch.Tensor = reference(
            tokens, attention_mask=bias.to(reference.dtype), position_ids=row - starts
        ).logits
        return logits

    # cos and sin of other positions are rounded to float32 in another way.
    errors_of(reference, ours, theirs).check(FP64 if case.startswith("gpt2") else 1e-6)


def test_the_embeddings_scale_is_rounded_before_it_is_applied(tmp_path: Path) -> None:
    """In bf16 the root of 72 is 8.5: every bit is Gemma's own."""
    reference = hf.reference(hf.small("gemma2", hidden_size=72))
    stage = stage_of(HFFolder(hf.saved(reference, tmp_path)), dtype=torch.bfloat16)
    tokens = torch.arange(96).view(3, 32)
    assert stage.embedding is not None
    with torch.no_grad():
        theirs = reference.bfloat16().model.embed_tokens(tokens)
        assert torch.equal(stage.embedding(tokens).transpose(0, 1), theirs)


@pytest.mark.parametrize(("family", "changes"), [
    ("qwen3", {}), ("qwen3", {"num_key_value_heads": 1}), ("qwen3", {"head_dim": 8, "num_key_value_heads": 4}),
    ("olmo2", {"num_key_value_heads": 1}), ("smollm3", {}), ("gptj", {}), ("falcon", {}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}), ("gemma2", {"query_pre_attn_scalar": 24}),
    ("gemma3_text", {"rope_parameters": hf.GEMMA_ROPE}), ("mixtral", {}), ("qwen2_moe", {}), ("qwen3_moe", {}),
    ("kimi_linear", {}), ("kimi_linear", {"q_lora_rank": 24}), ("olmo_hybrid", {}),
    ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "num_key_value_heads": 4}),
    pytest.param("qwen3_next", {}, id="qwen3_next"),
    ("qwen3_5_text", {}), ("lfm2", {}), ("lfm2", {"conv_bias": False, "num_key_value_heads": 4}),
    ("bamba", {}), ("bamba", {"mamba_n_groups": 4, "num_key_value_heads": 4}),
    pytest.param("falcon_h1", {}, id="falcon_h1"),
    ("falcon_h1", {"mamba_n_groups": 2, "mamba_rms_norm": True, "num_key_value_heads": 4}),
    ("granitemoehybrid", {}), ("granitemoehybrid", {"num_local_experts": 0, "mamba_n_groups": 4}),
    pytest.param("nemotron_h", {}, id="nemotron_h"),
    ("nemotron_h", {
        "n_groups": 1, "mlp_bias": True, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    }),
    ("mamba2", {}), ("mamba2", {"n_groups": 1}),
    ("olmoe", {}), ("deepseek_v3", {}), ("gpt_oss", {}), ("granite", hf.FACTORS),
])
def test_logits_and_gradients_in_fp64(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """In double, where neither rounds to float32, nothing is left of the difference, however sharp scores are."""
    reference = hf.reference(hf.small(family, **changes))
    folder = HFFolder(hf.saved(reference, tmp_path))
    to_double(reference)
    tokens, stage = torch.arange(96).view(3, 32), stage_of(folder, dtype=torch.float64)
    labels = tokens.roll(-1, 1)
    mine = stage(tokens)
    ours = mine.transpose(0, 1)[..., : hf.VOCABULARY].detach().clone()
    stage.loss_sum(mine, labels, None).backward()
    with hf.in_double(reference):
        theirs = reference(tokens).logits
        torch.nn.functional.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    assert hf.relative(ours, theirs.detach()) <= FP64
    theirs = hf.in_files(reference, {n: p.grad for n, p in reference.named_parameters()})
    exact = hf.in_our_names(folder.model, family, theirs)
    found = {r.name: r.local_view(p.grad) for r, p in recorded_parameters(stage) if p.grad is not None}
    assert gradient_deviation(exact, found, folder.model)[0][0] <= FP64


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("gpt2 tanh", {"activation": "gelu"}),
        ("neox", {"rotary_percent": 0.5}),
        ("neox", {"parallel_residual": False}),
        ("llama llama3", {"rope_scaling": "none"}),
        ("llama llama3", {"rope_high_freq_factor": 3.0}),
        ("llama tied", {"norm_epsilon": 1e-3}),
        ("qwen3", {"qk_norm": False}),
        ("llama yarn", {"rope_attention_factor": 1.0}),
        ("llama yarn", {"rope_beta_fast": 2.0}),
        ("llama yarn", {"rope_beta_slow": 0.25}),
        ("llama yarn", {"rope_original_length": 32}),
        ("llama yarn", {"rope_truncate": False}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2 layer types", {"attention_pattern": ("full", "window")}),
        ("granite", {"embedding_multiplier": 3.1}),
        ("granite", {"residual_multiplier": 0.3}),
        ("granite", {"attention_scale": 0.0}),
        ("granite", {"logits_divisor": 1.3}),
        ("deepseek_v3 dense, yarn, no query latent", {"attention_scale": 0.0}),
        ("deepseek_v3 dense, yarn, no query latent", {"latent_norm_epsilon": 0.0}),
        ("gpt_oss yarn", {"activation": "swiglu"}),
        ("deepseek_v3", {"moe.groups": 1}),
        ("deepseek_v3", {"moe.group_score": "max"}),
        ("deepseek_v3", {"moe.scale": 2.4}),
        ("deepseek_v2", {"moe.top_groups": 3}),
        ("qwen3_moe", {"moe.normalize": False}),
        ("mixtral", {"moe.top_k": 2}),
        ("kimi_linear by number, query latent, all dense", {"latent_norm_epsilon": 0.0}),
        ("kimi_linear", {"rope_pattern": ()}),
        ("olmo_hybrid", {"rope_pattern": ("none",)}),
    ],
)
def test_a_wrong_option_is_seen(case: str, change: dict[str, Any], tmp_path: Path) -> None:
    """The bound can fail: each option, changed alone, exceeds ten times it."""
    reference = hf.reference(CASES[case]())
    folder = HFFolder(hf.saved(reference, tmp_path))
    of_experts = {name.removeprefix("moe."): value for name, value in change.items() if name.startswith("moe.")}
    model = replace(folder.model, moe=replace(folder.model.moe, **of_experts))
    changed = replace(model, **{name: value for name, value in change.items() if not name.startswith("moe.")})
    errors = logit_errors(folder, reference, changed)
    assert errors.ours > 10 * errors.allowed and errors.ours_fp64 > 10 * errors.allowed

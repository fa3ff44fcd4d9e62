"""Families whose layers have a state: 200 greedy tokens through our caches are transformers', and what is left out.

Their logits, gradients, tensors and fields are in the tests of all families.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models as hf
import pytest
import torch
from logit_bounds import stage_of
from safetensors.torch import load_file, save_file

from megatron_port.core.config.loader import load
from megatron_port.core.config.model import ATTENTION
from megatron_port.core.errors import CheckpointError
from megatron_port.ext.families import family_named, family_names
from megatron_port.run.same_model import model_differences
from megatron_port.tools.inference.cache import CacheSlot, KeyValueCache
from megatron_port.tools.interop.hf_config import another_family, family_for, hf_config, model_from_hf
from megatron_port.tools.interop.hf_files import HFFolder
from megatron_port.tools.interop.hf_names import hf_mapping

transformers = pytest.importorskip("transformers")
FAMILIES = [name for name in family_names() if family_named(name).names.mixers]
PROMPT, NEW = 7, 200


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers(family: str, tmp_path: Path) -> None:
    reference = hf.reference(hf.small(family, length=256))
    folder = HFFolder(hf.saved(reference, tmp_path))
    assert set(folder.model.mixers) - {ATTENTION}
    stage, slot, cache = stage_of(folder), CacheSlot(), KeyValueCache(PROMPT + NEW)
    slot.install(stage)
    tokens = torch.arange(PROMPT)[None] * 13 % hf.VOCABULARY
    with torch.no_grad():
        theirs = reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), min_new_tokens=NEW, max_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )
        cache.lengths = torch.tensor([PROMPT])
        found = tokens
        with slot.using(cache):
            logits = stage(tokens)[-1]
            while found.shape[1] < PROMPT + NEW:
                found = torch.cat((found, logits[:, : hf.VOCABULARY].argmax(-1)[None]), dim=1)
                cache.at([found.shape[1] - 1], torch.device("cpu"))
                logits = stage(found[:, -1:])[0]
    assert len(set(found[0].tolist())) > 5  # no loop of a few tokens
    assert torch.equal(found, theirs)


def test_what_transformers_does_not_load_is_left_out_and_said(tmp_path: Path) -> None:
    """Modules of multi-token prediction in Qwen3-Next's files; others are refused as ever."""
    path = hf.saved(hf.reference(hf.small("qwen3_next")), tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2)}, path / "model.safetensors")
    (said,) = HFFolder(path).notes
    assert said.endswith("2 tensors from mtp.fc.weight on are left out, which transformers does not load")
    save_file({**tensors, "mtq.fc.weight": torch.ones(2)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="mtq.fc.weight"):
        HFFolder(path)


@pytest.mark.parametrize(("change", "said"), [
    ({"layer_types": ["linear_attention"] * 2}, "layer_types is .* for 3 layers"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types is"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"), ({"hidden_act": "gelu"}, "silu"),
])
def test_what_qwen3_next_would_need_is_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        model_from_hf({**hf.small("qwen3_next").to_dict(), **change}, "config.json")


@pytest.mark.parametrize(("change", "said"), [
    ({"layer_types": ["conv"] * 2}, "layer_types is .* for 3 layers"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types is"), ({"full_attn_idxs": 1}, "full_attn_idxs is 1"),
    ({"num_attention_heads": 5}, "hidden_size 64 does not divide"), ({"block_multiple_of": 0}, "block_multiple_of is"),
    ({"block_ffn_dim_multiplier": None}, "block_ffn_dim_multiplier is null"),
    ({"block_ff_dim": 48}, "intermediate_size 96 and block_ff_dim 48"),
    ({"tie_embedding": False}, "tie_word_embeddings True and tie_embedding False"),
    ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
])
def test_what_lfm2_would_need_is_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        model_from_hf({**hf.small("lfm2").to_dict(), **change}, "config.json")


def test_lfm2_is_read_as_its_published_files_are_written() -> None:
    """By older names of fields; of two lists of layers the one that transformers reads."""
    notes: list[str] = []
    body = {
        "model_type": "lfm2", "block_ff_dim": 12288, "hidden_size": 2048, "num_hidden_layers": 4, "theta": 1000000.0,
        "full_attn_idxs": [2], "tie_embedding": True, "block_use_swiglu": True, "conv_dim": 2048,
    }
    model = model_from_hf(body, "config.json", notes)
    assert model.ffn_size == 8192 and model.tie_embeddings and model.rope_theta == 1e6
    assert model.mixer_pattern == ("short_conv", "short_conv", "attention")
    assert len(notes) == 1 and "3 fields left out" in notes[0]
    kinds = ["conv", "full_attention"] * 2
    assert model_from_hf({**body, "layer_types": kinds}, "f", notes).mixer_pattern == ("short_conv", "attention")
    assert any("full_attn_idxs [2] is not what layer_types says" in note for note in notes)
    plain = model_from_hf({k: v for k, v in body.items() if k != "full_attn_idxs"}, "config.json")
    assert plain.mixers == (ATTENTION,) and plain.recurrent.kernel == 4


@pytest.mark.parametrize(("change", "said"), [
    ({"attn_layer_indices": [0, 1, 2]}, "attn_layer_indices leaves none of 3 layers to Mamba-2"),
    ({"attn_layer_indices": 1}, "attn_layer_indices is 1"), ({"mamba_proj_bias": True}, "mamba_proj_bias is True"),
    ({"mamba_d_head": 16}, "mamba_n_heads × mamba_d_head is 4 × 16; expected expand × hidden_size, 2 × 64"),
    ({"mamba_n_groups": 3}, "4 heads do not divide by 3 groups"), ({"mamba_n_heads": 0}, "mamba_n_heads is 0"),
    ({"mamba_d_head": None}, "mamba_d_head is null"), ({"attention_bias": True}, "attention_bias True, mlp_bias False"),
    ({"time_step_limit": [0.1]}, "time_step_limit is"), ({"time_step_limit": [0.5, 0.1]}, "time_step_limit is"),
    ({"time_step_limit": None}, "time_step_limit is None"), ({"hidden_act": "gelu"}, "only silu"),
])
def test_what_bamba_would_need_is_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        model_from_hf({**hf.small("bamba").to_dict(), **change}, "config.json")


def test_bamba_is_read_as_its_published_files_are_written() -> None:
    """By sizes that others give; of what a head rotates, what transformers takes."""
    notes: list[str] = []
    body = {
        "model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [2], "mamba_d_head": "auto",
        "mamba_d_state": 128, "time_step_limit": [0.0, float("inf")], "attn_rotary_emb": 64, "vocab_size": 128256,
    }
    model = model_from_hf(body, "config.json", notes)
    assert model.mixer_pattern == ("mamba2", "mamba2", "attention") and model.rotary_percent == 0.5
    assert (model.recurrent.value_size, model.recurrent.step_max) == (64, 0.0)
    assert len(notes) == 1 and "attn_rotary_emb (64)" in notes[0]
    tagged = {"time_step_limit": [0.01, {"__float__": "Infinity"}], "partial_rotary_factor": 1.0}
    model = model_from_hf({**body, **tagged}, "config.json", notes)
    assert model.rotary_percent == 0.5 and model.recurrent.step_min == 0.01
    assert any("partial_rotary_factor 1.0 is not read" in note for note in notes)
    whole = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}}
    assert model_from_hf({**body, **whole}, "config.json").rotary_percent == 1.0


@pytest.mark.parametrize(("change", "said"), [
    *(({name: True}, f"{name} is True: biases of the projections; only False")
      for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")),
    ({"mamba_d_ssm": 96}, "mamba_n_heads × mamba_d_head is 4 × 32; expected 96, which is mamba_d_ssm"),
    ({"mamba_n_groups": 3}, "4 heads do not divide by 3 groups"), ({"mamba_n_heads": 0}, "mamba_n_heads is 0"),
    ({"ssm_multipliers": [1.0, 2.0]}, r"ssm_multipliers is \[1.0, 2.0\]; only 5 factors above 0"),
    ({"mlp_multipliers": [1.0, -1.0]}, "mlp_multipliers is .* only 2 factors above 0"),
    ({"key_multiplier": 0.0}, "key_multiplier is 0.0; only factors above 0"),
    ({"lm_head_multiplier": -0.5}, "lm_head_multiplier is -0.5; only"), ({"hidden_act": "gelu"}, "only silu"),
    ({"lm_head_multiplier": None}, "lm_head_multiplier is null"), ({"time_step_limit": [0.5]}, "time_step_limit is"),
    ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
])
def test_what_falcon_h1_would_need_is_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        model_from_hf({**hf.small("falcon_h1").to_dict(), **change}, "config.json")


FALCON: dict[str, Any] = {
    "model_type": "falcon_h1", "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "vocab_size": 32784,
    "attn_layer_indices": None, "embedding_multiplier": 5.656854249492381, "head_dim": 64, "hidden_size": 1024,
    "intermediate_size": 2048, "key_multiplier": 0.39062499999999994, "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_use_mlp": True,
    "max_position_embeddings": 16384, "mlp_multipliers": [0.8838834764831844, 0.5859375], "num_attention_heads": 8,
    "num_hidden_layers": 36, "num_key_value_heads": 2, "rope_scaling": None, "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
}


def test_falcon_h1_is_read_as_its_published_files_are_written() -> None:
    """The shipped shape is what they say; factors are written so that they are read back to the bit."""
    notes: list[str] = []
    model = model_from_hf(FALCON, "config.json", notes)
    assert not model_differences(load("models/falcon-h1-0.5b").config.model, model) and "mamba_use_mlp" in notes[0]
    written = hf_config(model, dtype="float32", eos=None)
    for name in ("key_multiplier", "lm_head_multiplier", "mlp_multipliers", "attention_out_multiplier"):
        assert written[name] == FALCON[name], name
    assert not model_differences(model, model_from_hf(written, "back"))
    into = model_from_hf({**FALCON, "attention_in_multiplier": 0.5}, "config.json")  # of both scores and values
    assert into.attention_scale == model.attention_scale / 4 and into.recurrent.attention_multiplier == 0.46875
    plain = {"mamba_d_ssm": None, "mamba_d_head": "auto", "ssm_multipliers": None, "ssm_in_multiplier": 1.0}
    model = model_from_hf({**FALCON, **plain, "mlp_multipliers": None, "mamba_n_heads": 32}, "config.json")
    assert model.recurrent.value_size == 64 and model.recurrent.multipliers == () and model.mlp_multipliers == ()


@pytest.mark.parametrize("number", range(40))
def test_falcon_h1s_factors_come_back_to_the_bit(number: int) -> None:
    factor = random.Random(number).uniform(0.01, 3.0)
    names = ("key_multiplier", "lm_head_multiplier", "attention_in_multiplier", "ssm_in_multiplier")
    model = model_from_hf({**FALCON, **dict.fromkeys(names, factor)}, "config.json")
    assert family_for(model) == "falcon_h1"


@pytest.mark.parametrize(("family", "change", "said"), [
    ("granitemoehybrid", {"layer_types": ["mamba"] * 2}, "layer_types is .* for 3 layers"),
    ("granitemoehybrid", {"layer_types": ["conv"] * 3}, "layer_types is"),
    ("granitemoehybrid", {"layers_block_type": ["mamba"] * 2}, "layers_block_type is .* for 3 layers"),
    ("granitemoehybrid", {"layer_types": ["mamba"] * 3, "layers_block_type": ["attention"] * 3},
     "layer_types and layers_block_type are one field by two names, and differ"),
    ("granitemoehybrid", {"shared_intermediate_size": 0}, "shared_intermediate_size is 0"),
    ("granitemoehybrid", {"position_embedding_type": "learned"}, "position_embedding_type is 'learned'"),
    ("granitemoehybrid", {"attention_bias": True}, "attention_bias is True"),
    ("granitemoehybrid", {"mamba_d_head": 16}, "mamba_n_heads × mamba_d_head is 4 × 16"),
    ("nemotron_h", {"layers_block_type": ["mlp", "mamba"]}, r"block 0 \(mlp\) follows no mixer"),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe", "moe"]}, r"block 2 \(moe\) follows no mixer"),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, "has both mlp and moe"),
    ("nemotron_h", {"layers_block_type": ["conv"]}, "layers_block_type is"),
    ("nemotron_h", {"mlp_bias": True}, "mlp_bias is true"),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M?"}, "hybrid_override_pattern is 'M[?]'"),
    ("nemotron_h", {"moe_latent_size": 16}, "moe_latent_size is 16"), ("nemotron_h", {"use_bias": True}, "use_bias is"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is"), ("nemotron_h", {"sliding_window": 4}, "windows"),
    ("nemotron_h", {"n_groups": 3}, "4 heads do not divide by 3 groups"),
    ("nemotron_h", {"mamba_n_groups": 1}, "n_groups 2 and mamba_n_groups 1 are one field"),
    ("mamba2", {"use_bias": True}, "use_bias is True"), ("mamba2", {"hidden_act": "gelu"}, "only silu"),
    ("mamba2", {"expand": 3}, "num_heads × head_dim is 4 × 32; expected expand × hidden_size, 3 × 64"),
])
def test_what_hybrids_of_mamba2_would_need_is_refused_by_name(family: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        model_from_hf({**hf.small(family).to_dict(), **change}, "config.json")


def test_granite_4_is_read_as_its_published_files_are_written() -> None:
    """Kinds of layers by older names; without Mamba-2 it is Granite."""
    notes: list[str] = []
    body = {
        "model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
        "hidden_size": 1536, "num_attention_heads": 12, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128,
        "normalization_function": "rmsnorm", "position_embedding_type": "nope", "rope_theta": 1e4, "init_method": "mup",
        "num_local_experts": 64, "attention_multiplier": 0.0078125, "rope_scaling": None, "logits_scaling": 6,
    }
    model = model_from_hf(body, "config.json", notes)
    assert model.mixer_pattern == ("mamba2", "attention") and model.rope_pattern == ("none",)
    assert model.moe.num_experts == 64 and model.logits_divisor == 6.0
    assert len(notes) == 1 and "2 fields left out" in notes[0]
    kinds = ["linear_attention", "full_attention"]
    for lists in ({"layer_types": None, "layers_block_type": kinds}, {"layers_block_type": kinds},
                  {"layers_block_type": None}):
        assert model_from_hf({**body, **lists}, "config.json").mixer_pattern == ("mamba2", "attention")
    with_two = {**body, "layer_types": None, "layers_block_type": kinds}
    assert transformers.GraniteMoeHybridConfig.from_dict(with_two).layer_types == kinds
    plain = {"layer_types": ["attention"] * 2, "num_local_experts": 0, "position_embedding_type": "rope"}
    assert family_for(model_from_hf({**body, **plain}, "config.json")) == "granite"
    without = model_from_hf({**body, "layer_types": ["attention"] * 2}, "config.json")
    assert family_for(without) == "granitemoehybrid" and without.mixers == (ATTENTION,)


def test_nemotron_h_is_read_as_its_published_files_are_written() -> None:
    """By a pattern of letters; two lists that differ are noted, and tables that are said to be tied."""
    notes: list[str] = []
    body = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5, "mamba_d_conv": 4,
            "rms_norm_eps": 1e-5, "time_step_limit": [0.0, float("inf")], "sliding_window": None}
    model = model_from_hf(body, "config.json", notes)
    assert model.mixer_pattern == ("mamba2", "mamba2", "attention") and model.mlp_pattern == ("mlp", "none")
    assert model.recurrent.step_min == 0.001 and not model.moe.enabled and model.activation == "relu2"
    assert len(notes) == 1 and "rms_norm_eps" in notes[0]
    both = {"layers_block_type": ["mamba", "moe"], "tie_word_embeddings": True}
    model = model_from_hf({**body, **both}, "config.json", notes)
    assert model.num_layers == 1 and model.moe.balance_bias and not model.tie_embeddings
    for said in ("'M-M[*]-' is not what layers_block_type says", "num_hidden_layers 5 is not read: there are 2 blocks",
                 "tie_word_embeddings is not read"):
        assert any(re.search(said, note) for note in notes), said


@pytest.mark.parametrize("family", ["mamba2", "bamba", "granitemoehybrid"])
def test_a_least_time_step_without_a_largest_is_strict_json(family: str, tmp_path: Path) -> None:
    """JSON has no infinity: it is written as transformers writes it, which reads it back."""
    body = {**hf.small(family).to_dict(), "time_step_limit": [0.25, float("inf")]}
    model = model_from_hf(body, "config.json")
    written = hf_config(model, dtype="float32", eos=None, bos=None)
    (tmp_path / "config.json").write_text(json.dumps(written, allow_nan=False))
    assert model_from_hf(written, "config.json").recurrent == model.recurrent and model.recurrent.step_min == 0.25
    assert tuple(transformers.AutoConfig.from_pretrained(tmp_path).time_step_limit) == (0.25, float("inf"))


def test_mamba2_is_exported_whatever_only_other_layers_read() -> None:
    """Heads of attention, widths of blocks and biases of projections that no layer has change nothing."""
    given = model_from_hf(hf.small("mamba2").to_dict(), "config.json")
    other = replace(given, num_attention_heads=2, head_dim=8, ffn_hidden_size=48, activation="swiglu", add_bias=False)
    assert family_for(other) == "mamba2" and not model_differences(given, other)
    assert "mamba2 needs mlp_pattern = ('none',)" in another_family(replace(other, family="mamba2", mlp_pattern=()))
    assert "position_embedding = rope" in another_family(replace(other, family="mamba2", position_embedding="learned"))


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid"])
def test_sizes_that_are_left_out_are_the_same_in_an_export(family: str) -> None:
    given = model_from_hf(hf.small(family).to_dict(), "config.json")
    r = given.recurrent
    size: dict[str, Any] = {"num_attention_heads": r.heads, "num_query_groups": 0, "head_dim": r.key_size}
    given = replace(given, recurrent=replace(r, key_heads=r.heads, value_size=r.key_size), **size)
    short = replace(given, recurrent=replace(given.recurrent, heads=0, key_heads=0, key_size=0, value_size=0))
    assert hf_mapping(short, family) == hf_mapping(given, family)

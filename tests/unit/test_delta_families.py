"""Kimi Linear and OLMo Hybrid: what their files may say, and what of it is refused.

Their logits, gradients, tensors and generated tokens are in the tests of all families.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hf_models as hf
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.config.loader import load
from megatron_port.core.config.model import ATTENTION
from megatron_port.core.errors import CheckpointError
from megatron_port.run.same_model import model_differences
from megatron_port.tools.interop.export_hf import export_hf
from megatron_port.tools.interop.hf_config import model_from_hf
from megatron_port.tools.interop.hf_files import HFFolder
from megatron_port.tools.interop.run_import import import_checkpoint

pytest.importorskip("transformers")


def with_table(**changes: object) -> dict[str, object]:
    """A change of Kimi Linear's table of recurrences, which stands in place of the fields beside it."""
    return {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3], **changes}}


@pytest.mark.parametrize(("change", "said"), [
    ({"mla_use_nope": False}, "mla_use_nope is False"), ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
    ({"use_grouped_topk": False}, "use_grouped_topk is False"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"), ({"hidden_act": "situ"}, "silu"),
    ({"layer_types": ["linear_attention"] * 2}, "layer_types is .* for 3 layers"),
    ({"mlp_layer_types": ["dense"] * 2}, "mlp_layer_types is .* for 3 layers"),
    ({"mlp_layer_types": ["sparse", "dense", "dense"]}, r"makes layers \[1, 2\] of 3 dense"),
    (with_table(full_attn_layers=[]), "layer_types is .*neither"),
    (with_table(kda_layers=None), "linear_attn_config has kda_layers None; expected a list"),
    (with_table(full_attn_layers=3), "linear_attn_config has full_attn_layers 3; expected a list"),
    (with_table(num_heads="4"), "linear_num_heads is '4'"),
    (with_table(gate_lower_bound=-5.0), "linear_attn_config has 'gate_lower_bound'"),
    ({"linear_attn_config": [1]}, r"linear_attn_config is \[1\]"), ({"num_shared_experts": 0}, "n_shared_experts is 0"),
    ({"num_key_value_heads": 2}, "num_key_value_heads is 2"), ({"num_experts": 7, "num_local_experts": 6}, "one field"),
])
def test_what_kimi_linear_would_need_is_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        model_from_hf({**hf.small("kimi_linear").to_dict(), **change}, "config.json")


def test_kimi_linear_is_read_as_its_published_files_are_written() -> None:
    """Layers by their numbers from 1, and fields that transformers does not read; a tied head is none there."""
    notes: list[str] = []
    full = [4, 8, 12, 16, 20, 24, 27]
    body = {
        "model_type": "kimi_linear", "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu",
        "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {
            "full_attn_layers": full, "kda_layers": [n for n in range(1, 28) if n not in full], "head_dim": 128,
            "num_heads": 32, "short_conv_kernel_size": 4,
        }, "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
        "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
        "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
        "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
    }
    model = model_from_hf(body, "config.json", notes)
    assert not notes and not model_differences(model, load("models/kimi-linear-48b-a3b").config.model)
    assert not model_from_hf({**body, "tie_word_embeddings": True}, "config.json", notes).tie_embeddings
    assert "transformers ties no tables of this family" in notes[0]
    plain = model_from_hf({"model_type": "kimi_linear", "num_hidden_layers": 6}, "config.json")
    assert [layer for layer in range(6) if plain.mixer_of(layer) == ATTENTION] == [4]


@pytest.mark.parametrize(("change", "said"), [
    ({"layer_types": ["linear_attention"] * 3}, "layer_types is .* for 3 layers"),
    ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types is .* for 3 layers"),
    ({"layer_types": ["sliding_attention", "full_attention", "linear_attention"]}, "layer_types is"),
    ({"attention_bias": True}, "attention_bias is True"), ({"hidden_act": "gelu"}, "silu"),
    ({"linear_key_head_dim": 1.5}, "linear_key_head_dim is 1.5"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta is 0"),
])
def test_what_olmo_hybrid_would_need_is_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        model_from_hf({**hf.small("olmo_hybrid").to_dict(), **change}, "config.json")


def test_olmo_hybrid_is_read_as_its_published_files_are_written() -> None:
    """Without positions where the base or the type of rope is null; a table that is null has transformers' base."""
    body = {
        "model_type": "olmo_hybrid", "hidden_size": 3840, "num_attention_heads": 30, "num_hidden_layers": 32,
        "rope_parameters": {"rope_type": None}, "rope_theta": None,
    }
    model = model_from_hf(body, "config.json")
    assert not model_differences(model, load("models/olmo-hybrid-7b").config.model)
    for table in ({"rope_theta": None, "rope_type": "default"}, {"rope_type": None}):
        assert model_from_hf({**body, "rope_parameters": table}, "config.json") == model
    rotates = model_from_hf({**body, "rope_parameters": None, "rope_theta": 10000.0}, "config.json")
    assert rotates == replace(model, rope_pattern=())
    few = model_from_hf({**body, "num_hidden_layers": 3}, "config.json")
    assert few.mixer_pattern == ("gated_delta", "gated_delta", "attention") and few.norm_pattern[-1] == "post"


def test_convolutions_that_are_otherwise_divided_in_files_are_read_and_written_as_published(tmp_path: Path) -> None:
    """transformers joins those of queries, keys and values, and writes three parts of equal sizes."""
    sizes = {"linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    path = hf.saved(hf.reference(hf.small("olmo_hybrid", **sizes), scale=1.0), tmp_path / "source")
    tensors, before = load_file(path / "model.safetensors"), "model.layers.0.linear_attn."
    names = [f"{before}{part}_conv1d.weight" for part in "qkv"]
    assert [len(tensors[name]) for name in names] == [43, 43, 42]
    checkpoint = open_checkpoint(import_checkpoint(path, tmp_path / "ours", note=lambda _: None))
    found = export_hf(checkpoint, tmp_path / "back", note=lambda _: None)
    assert found is not None and found.deviation <= found.tolerance
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert [len(back[name]) for name in names] == [24, 24, 80]
    assert torch.equal(torch.cat([back[name] for name in names]), torch.cat([tensors[name] for name in names]))
    for wrong in (torch.ones(42, 1, 4), torch.ones(43, 1, 5)):
        save_file({**tensors, names[0]: wrong}, path / "model.safetensors")
        with pytest.raises(CheckpointError, match="q_conv1d.weight has shape"):
            HFFolder(path)

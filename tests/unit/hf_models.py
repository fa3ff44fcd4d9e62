"""Small random models of transformers', saved as folders, for the tests against them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import WEIGHT
from megatron_port.ext.families import family_named
from megatron_port.tools.interop.hf_names import MODULE_HEAD, hf_mapping, hf_tensors

VOCABULARY = 101
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.31, "attention_multiplier": 0.4, "logits_scaling": 1.2
}
"""Granite's."""
LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.5}
GEMMA_ROPE = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}


def gpt2(length: int = 32, **changes: Any) -> Any:
    import transformers

    return transformers.GPT2Config(**{
        "n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": length, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 100, "eos_token_id": 100, **changes,
    })


def neox(length: int = 32, **changes: Any) -> Any:
    import transformers

    return transformers.GPTNeoXConfig(**{
        "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": VOCABULARY, "max_position_embeddings": length, "bos_token_id": 100, "eos_token_id": 100,
        **changes,
    })


def llama(length: int = 32, **changes: Any) -> Any:
    import transformers

    return transformers.LlamaConfig(**{
        "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": VOCABULARY, "max_position_embeddings": length, "rms_norm_eps": 1e-5,
        "bos_token_id": 100, "eos_token_id": 100, **changes,
    })


SIZES = {
    "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "intermediate_size": 96, "vocab_size": VOCABULARY, "bos_token_id": 100, "eos_token_id": 100, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": None, "sliding_window": 7, "use_sliding_window": True,
    "max_window_layers": 1,
}


_FEW: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 16,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 12, "mamba_chunk_size": 8}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
OWN: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 8}, "smollm3": {"no_rope_layers": [0, 1, 1]},
    "gemma2": {**_WINDOWS, "query_pre_attn_scalar": 20}, "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 24},
    "mixtral": {**_FEW, "num_local_experts": 5}, "qwen2_moe": _FEW, "olmoe": {**_FEW, "num_key_value_heads": 2},
    "qwen3_moe": {**_FEW, "mlp_only_layers": [0], "norm_topk_prob": True},
    "qwen3_next": {
        **_FEW, "mlp_only_layers": [0], "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 8,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "block_multiple_of": 24,
        "block_ffn_dim_multiplier": 1.3,
    },
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "falcon_h1": {
        **_MAMBA, "mamba_d_ssm": 128, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.7, "key_multiplier": 0.4,
        "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.875, 0.75, 1.25, 0.8125, 1.125], "mlp_multipliers": [0.8, 1.4],
    },
    "kimi_linear": {
        **_LATENT, **_FEW, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "q_lora_rank": None, "num_local_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 2,
        "linear_num_heads": 4, "linear_head_dim": 12,
    },
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 6,
    },
    "granitemoehybrid": {
        **_MAMBA, **FACTORS, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "shared_intermediate_size": 56,
    },
    "nemotron_h": {
        **_FEW, "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
        "mamba_num_heads": 4, "mamba_head_dim": 20, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 8,
        "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "moe_shared_expert_intermediate_size": 56,
        "sliding_window": None, "routed_scaling_factor": 1.7,
    },
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 12, "chunk_size": 8},
    "gpt_oss": {**_WINDOWS, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}, "num_local_experts": 6,
                "num_experts_per_tok": 2, "intermediate_size": 40},
    "deepseek_v2": {**_LATENT, **_FEW, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
                    "n_routed_experts": 6, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1},
}
"""Fields whose defaults do not fit so few layers of such a size."""


def small(model_type: str, length: int = 32, **changes: Any) -> Any:
    """A small configuration of any family: of the usual fields those that its class has."""
    import transformers

    if model_type == "deepseek_v3":
        return deepseek(length, **changes)
    kind = transformers.CONFIG_MAPPING[model_type]
    known = {*kind().to_dict(), *kind.attribute_map}
    sizes = {"max_position_embeddings": length, **SIZES, **OWN.get(model_type, {})}
    return kind(**{**{k: v for k, v in sizes.items() if k in known}, **changes})


def deepseek(length: int = 32, **changes: Any) -> Any:
    """DeepSeek-V3: a dense layer and two with experts."""
    import transformers

    return transformers.DeepseekV3Config(**{
        **_LATENT, "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
        "vocab_size": VOCABULARY, "max_position_embeddings": length, "bos_token_id": 100, "eos_token_id": 100,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, **changes,
    })


def reference(config: Any, *, scale: float = 5.0, seed: int = 0) -> Any:
    """A model with weights of ``scale`` times the usual 0.02, biases away from 0 and norms' factors away from 1."""
    import transformers

    config._experts_implementation = "eager"  # grouped products know no float64
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    usual = 0.0 if config.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(usual + 0.3 * noise if p.dim() == 1 and "bias" not in name else scale * 0.02 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def in_files(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors by the names and in the parts that transformers saves: experts one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return found


def saved(model: Any, folder: Path, *, shard: str = "5GB") -> Path:
    """Written by transformers itself."""
    model.save_pretrained(str(folder), max_shard_size=shard)
    return folder


def loaded(folder: Path) -> Any:
    """Read by transformers itself."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), local_files_only=True, attn_implementation="eager", dtype=torch.float32
    )
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.eval()


def as_published(model: ModelConfig, family: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of files by the family's first name of each."""
    known, names = {t.name for t in hf_tensors(model, family)}, family_named(family).names

    def first(name: str) -> str:
        name = names.head if name == MODULE_HEAD else name
        others = (name.replace(other, part) for part, other in names.also.items())
        return name if name in known else next((other for other in others if other in known), name)

    return {first(name): tensor for name, tensor in tensors.items()}


def in_our_names(model: ModelConfig, family: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' tensors in our names and order of rows, put together run by run."""
    tensors = as_published(model, family, tensors)
    out = {}
    for name, mapped in hf_mapping(model, family).items():
        if mapped.kind != WEIGHT:
            continue
        parts = []
        for run in mapped.runs:
            whole = tensors[run.tensor] if run.expert is None else tensors[run.tensor][run.expert]
            whole = whole.squeeze() if mapped.dimensions else whole
            parts.append((whole.t() if mapped.transposed else whole)[run.rows(run.ours, run.count)])
        out[name] = torch.cat(parts).reshape(mapped.shape).double()
    return out


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| ÷ max|b|."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


class _Double(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wider(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wider, args), **{key: wider(value) for key, value in (kwargs or {}).items()})


@contextlib.contextmanager
def in_double(model: Any) -> Iterator[None]:
    """What a model does in float32 whatever its dtype is (Llama's norms and softmax) is done in float64.

    The angles of rotary embeddings stay as they are: they define the model, and ours has the same.
    """
    rotary = [m for name, m in model.named_modules() if name.endswith("rotary_emb")]

    def as_it_is(forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return forward(*args, **kwargs)

        return call

    for module in rotary:
        module.forward = as_it_is(module.forward)
    try:
        with _Double():
            yield
    finally:
        for module in rotary:
            del module.forward

"""DeepSeek-V3: latent attention (MLA) in Llama's layer, experts that a bias keeps in balance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families import shared as moe_like
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.llama import NAMES as LLAMA
from megatron_port.ext.families.shared import USUAL, experts_there, read_latent, read_shared, write_latent

HARMLESS = moe_like.MOE_HARMLESS | {"ep_size", "aux_loss_alpha", "seq_aux", "pretraining_tp"}
"""Fields of training and layouts."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model. Experts in modules that predict further tokens alone are refused."""
    f.refuse("rope_interleave", True, "rotated elements in halves")
    f.refuse("moe_layer_freq", 1, "experts in some of the later layers")
    f.refuse("topk_method", "noaux_tc", "another choice of experts")
    f.refuse("scoring_func", "sigmoid", "other scores")
    values = read_latent(f, hidden=7168, ffn=18432, vocab=129280, length=4096, groups=128, layers=61, heads=128)
    layers, ahead = values["num_layers"], f.get("num_nextn_predict_layers", 0, "num_mtp_layers")
    if layers <= (dense := f.get("first_k_dense_replace", 3)) < layers + ahead:
        raise f.fault(
            f"first_k_dense_replace is {dense} of {layers} layers and {ahead} that predict further tokens, which alone "
            "would have experts; num_nextn_predict_layers = 0 imports the model without them"
        )
    return values | {"moe": _experts(f, layers), "mtp_layers": ahead}


def _experts(f: Fields, layers: int) -> MoEConfig:
    dense, width = f.get("first_k_dense_replace", 3), f.get("moe_intermediate_size", 2048)
    found = MoEConfig(
        num_experts=f.get("n_routed_experts", 256, "num_local_experts"), top_k=f.get("num_experts_per_tok", 8),
        ffn_hidden_size=width, shared_ffn_hidden_size=read_shared(f, 1, width), first_dense=dense, score="sigmoid",
        normalize=f.get("norm_topk_prob", True), scale=f.get("routed_scaling_factor", 2.5), groups=f.get("n_group", 8),
        top_groups=f.get("topk_group", 4), balance_bias=True,
    )
    return found if dense < layers else MoEConfig()


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    dense = {} if model.moe.enabled else {"first_k_dense_replace": model.num_layers + model.mtp_layers}
    return write_latent(model) | experts_there(model) | dense | {
        "rope_interleave": True, "num_nextn_predict_layers": model.mtp_layers,
    }


# DeepSeek-V3's names: Llama's, those of latents, of experts and the block beside them, of further tokens.

_LATENTS = {
    "attention.query": "self_attn.q_proj", "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm", "attention.query_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa", "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
_SHARED: dict[str, str | tuple[str, ...]] = {
    "mlp.shared.up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
_AHEAD = {
    "embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm",
}
NAMES = replace(
    LLAMA, inside={**LLAMA.inside, **_LATENTS, **USUAL, **_SHARED}, buffers=(),
    kinds={"balance_bias": "e_score_correction_bias"},
    ahead=_AHEAD, ahead_copies=("embed_tokens", "shared_head.head"),
)


FAMILY = Family(
    name="deepseek_v3", architecture="DeepseekV3ForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)

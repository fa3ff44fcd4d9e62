"""DeepSeek-V2: latent attention (MLA) in Llama's layer, experts of a few groups by their softmax."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families import shared as moe_like
from megatron_port.ext.families.deepseek_v3 import NAMES
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.shared import experts_there, read_latent, read_shared, write_latent

HARMLESS = moe_like.MOE_HARMLESS | {"ep_size", "aux_loss_alpha", "seq_aux", "pretraining_tp", "rope_interleave"}
"""Fields of training and layouts; rotated pairs are neighbours whatever ``rope_interleave`` says."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model. transformers never divides by the sum of the scores, whatever ``norm_topk_prob`` says."""
    f.refuse("mlp_bias", False, "biases in the MLP alone")
    f.refuse("norm_topk_prob", False, "scores that transformers' DeepSeek-V2 would not divide")
    f.refuse("moe_layer_freq", 1, "experts in some of the later layers")
    f.refuse("scoring_func", "softmax", "other scores")
    values = read_latent(f, vocab=102400)
    return values | {"moe": _experts(f, values["num_layers"])}


def _experts(f: Fields, layers: int) -> MoEConfig:
    dense, width = f.get("first_k_dense_replace", 0), f.get("moe_intermediate_size", 1407)
    method, groups = f.get("topk_method", "greedy"), (f.get("n_group", 1), f.get("topk_group", 1))
    if method not in ("greedy", "group_limited_greedy"):
        raise f.fault(f"topk_method is {method!r:.60}; only greedy and group_limited_greedy can be imported")
    groups = groups if method == "group_limited_greedy" else (1, 1)
    if dense < layers and f.get("num_experts_per_tok", 0) < 1:
        raise f.fault("num_experts_per_tok is missing; a token passes at least one expert")
    found = MoEConfig(
        num_experts=f.get("n_routed_experts", 64, "num_experts"), top_k=f.get("num_experts_per_tok", 0),
        ffn_hidden_size=width, shared_ffn_hidden_size=read_shared(f, 2, width), first_dense=dense, normalize=False,
        scale=f.get("routed_scaling_factor", 1.0), groups=groups[0], top_groups=groups[1],
        group_score="max" if groups[0] > 1 else "top2",
    )
    return found if dense < layers else MoEConfig()


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    limited = model.moe.groups > 1
    return write_latent(model) | experts_there(model) | {
        "topk_method": "group_limited_greedy" if limited else "greedy", "mlp_bias": False,
    }


FAMILY = Family(
    name="deepseek_v2", architecture="DeepseekV2ForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)

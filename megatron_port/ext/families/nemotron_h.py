"""Nemotron-H: blocks of Mamba-2, of attention without positions, and feed-forward ones of squared ReLU or experts.

There, each block is a layer with a norm of its own. Here, a layer is a mixer and the feed-forward block behind it, if
there is one; so layers have other numbers.
"""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.model import ATTENTION, MoEConfig, RecurrentConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, Names, common_sizes
from megatron_port.ext.families.mamba2 import CHUNKS, CONVOLUTIONS, HARMLESS, MIXER, modules_of, rows_of
from megatron_port.ext.families.settings import mixers, mlps
from megatron_port.ext.families.shared import MOE_HARMLESS

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_MIXERS = {"linear_attention": MIXER, "full_attention": ATTENTION}
_ELSEWHERE = ("expand", "mamba_expand", "time_step_limit", "mamba_dt_limit", "mamba_dt_max", "mamba_dt_init_floor")
"""A width that the heads have, and limits that only initial values have."""
_AHEAD = ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
"""Modules that predict further tokens, which transformers does not load."""
_LISTS = ("layers_block_type", "layer_types")


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    for name in ("use_bias", "mamba_proj_bias"):
        f.refuse(name, False, "biases of the projections of Mamba-2")
    f.refuse("attention_bias", False, "biases in attention")
    f.refuse("mlp_hidden_act", "relu2", "another activation")
    f.refuse("mamba_hidden_act", "silu", "another activation of the convolution")
    f.refuse("sliding_window", None, "windows")
    if f.get("tie_word_embeddings", False):
        f.notes.append(f"{f.where}: tie_word_embeddings is not read: transformers ties no tables of this family")
    layers = read_layers(f)
    kinds, blocks = [kind for kind, _ in layers], {block for _, block in layers if block}
    experts, recurrent, bias = read_experts(f), read_recurrent(f), f.get("mlp_bias", False)
    if bias and "moe" in blocks:
        raise f.fault("mlp_bias is true: biases of the block beside the experts alone; only false can be imported")
    return mixers(kinds) | mlps([block is not None for _, block in layers]) | {
        "num_layers": len(layers), "hidden_size": f.get("hidden_size", 4096),
        "num_attention_heads": f.get("num_attention_heads", 32), "num_query_groups": f.get("num_key_value_heads", 8),
        "head_dim": f.get("head_dim", 128), "ffn_hidden_size": f.get("intermediate_size", 21504),
        "vocab_size": f.get("vocab_size", 131072), "seq_length": f.get("max_position_embeddings", 4096),
        "position_embedding": "rope", "rope_pattern": ("none",) if ATTENTION in kinds else (),
        "normalization": "rmsnorm", "norm_epsilon": f.get("layer_norm_epsilon", 1e-5), "activation": "relu2",
        "add_bias": False, "mlp_bias": bias, "tie_embeddings": False,
        "attention_dropout": f.or_none("attention_dropout", 0.0), "init_std": f.get("initializer_range", 0.02),
        "recurrent": recurrent if MIXER in kinds else RecurrentConfig(),
        "moe": experts if "moe" in blocks else MoEConfig(),
    }


def read_layers(f: Fields) -> list[tuple[str, str | None]]:
    """Return the mixer of each layer, and ``mlp`` or ``moe`` where such a block follows it."""
    f.asked.update((*_LISTS, *_AHEAD, "hybrid_override_pattern", "num_hidden_layers"))
    pattern = f.values.get("hybrid_override_pattern")
    found = next((f.values[name] for name in _LISTS if f.values.get(name) is not None), None)
    if pattern is not None and (not isinstance(pattern, str) or set(pattern) - set(_PATTERN)):
        raise f.fault(f"hybrid_override_pattern is {pattern!r:.80}; expected letters of {' '.join(_PATTERN)}")
    written = [_PATTERN[letter] for letter in pattern or ""]
    blocks = written if found is None else found
    known = {*_PATTERN.values(), *_OLDER}
    if not isinstance(blocks, list) or not blocks or any(block not in known for block in blocks):
        raise f.fault(f"layers_block_type is {blocks!r:.80}; expected {', '.join(_PATTERN.values())}")
    blocks = [_OLDER.get(block, block) for block in blocks]
    if pattern is not None and blocks != written:
        f.notes.append(f"{f.where}: hybrid_override_pattern {pattern!r:.80} is not what layers_block_type says; the "
                       "latter is read, as in transformers")
    if (count := f.values.get("num_hidden_layers")) not in (None, len(blocks)):
        f.notes.append(f"{f.where}: num_hidden_layers {count!r:.20} is not read: there are {len(blocks)} blocks")
    layers = list[tuple[str, str | None]]()
    for number, block in enumerate(blocks):
        if block in _MIXERS:
            layers.append((_MIXERS[block], None))
        elif layers and layers[-1][1] is None:
            layers[-1] = (layers[-1][0], block)
        else:
            raise f.fault(f"block {number} ({block}) follows no mixer; a layer is a mixer and at most one feed-forward "
                          "block behind it")
    if {"mlp", "moe"} <= {block for _, block in layers}:
        raise f.fault("layers_block_type has both mlp and moe; experts must be in all feed-forward blocks or in none")
    return layers


def read_recurrent(f: Fields) -> RecurrentConfig:
    """Return the sizes of Mamba-2; older files call some otherwise. Of the limits of a time step transformers reads
    ``time_step_min``, and none where it reads one token at a time."""
    f.asked.update((*CHUNKS, *_ELSEWHERE))
    found = RecurrentConfig(
        heads=f.get("mamba_num_heads", 128), key_heads=f.get("n_groups", 8, "mamba_n_groups"),
        key_size=f.get("ssm_state_size", 128), value_size=f.get("mamba_head_dim", 64),
        kernel=f.get("conv_kernel", 4, "mamba_d_conv"), step_min=f.get("time_step_min", 0.001, "mamba_dt_min"),
        convolution_bias=f.get("use_conv_bias", True, "mamba_conv_bias"),
    )
    if found.heads < 1 or found.key_heads < 1 or found.heads % found.key_heads:
        raise f.fault(f"{found.heads} heads do not divide by {found.key_heads} groups")
    return found


def read_experts(f: Fields) -> MoEConfig:
    """Return the experts."""
    f.refuse("moe_latent_size", None, "experts of a latent")
    f.refuse("n_shared_experts", 1, "other blocks beside the experts")
    return MoEConfig(
        num_experts=f.get("n_routed_experts", 8, "num_local_experts"), top_k=f.get("num_experts_per_tok", 2),
        ffn_hidden_size=f.get("moe_intermediate_size", 7688), score="sigmoid",
        shared_ffn_hidden_size=f.get("moe_shared_expert_intermediate_size", 7688),
        normalize=f.get("norm_topk_prob", True), scale=f.get("routed_scaling_factor", 1.0),
        groups=f.get("n_group", 1), top_groups=f.get("topk_group", 1), balance_bias=True,
    )


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    names, letters = {ours: theirs for theirs, ours in _MIXERS.items()}, {v: k for k, v in _PATTERN.items()}
    block = "moe" if model.moe.enabled else "mlp"
    blocks = [name for layer in range(model.num_layers)
              for name in (names.get(model.mixer_of(layer), ""), *[block] * model.has_mlp(layer))]
    r = model.recurrent
    return common_sizes(model) | {
        "layers_block_type": blocks, "hybrid_override_pattern": "".join(letters.get(name, "?") for name in blocks),
        "num_hidden_layers": len(blocks), "num_key_value_heads": model.kv_heads, "head_dim": model.head_size,
        "layer_norm_epsilon": model.norm_epsilon, "mlp_hidden_act": "relu2", "mlp_bias": model.mlp_bias,
        "mamba_num_heads": r.heads, "mamba_head_dim": r.value_size, "n_groups": r.key_heads,
        "ssm_state_size": r.key_size, "conv_kernel": r.kernel, "use_conv_bias": r.convolution_bias,
        "time_step_min": r.step_min,
    } | (experts_there(model) if model.moe.enabled else {})


def experts_there(model: ModelConfig) -> dict[str, Any]:
    """Fields of experts."""
    moe = model.moe
    return {
        "n_routed_experts": moe.num_experts, "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": model.expert_size, "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size, "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale, "n_group": moe.groups, "topk_group": moe.top_groups,
    }


# Nemotron-H's names: every block's module is its mixer.

def number(model: ModelConfig, layer: int, inside: str) -> int:
    """Return the number of the block there that has what is in a layer of ours."""
    return layer + sum(model.has_mlp(i) for i in range(layer)) + inside.startswith(("norm2", "mlp."))


NAMES = Names(
    prefix="backbone.", outside={"embedding.word": "embeddings", "final_norm": "norm_f"}, head="lm_head.weight",
    layer="layers.{}.", number=number, loaded={"backbone.": "model."},
    inside={
        "norm1": "norm", "norm2": "norm", "attention.qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        "attention.output": "mixer.o_proj", "mlp.up": "mixer.up_proj", "mlp.down": "mixer.down_proj",
        "mlp.router": "mixer.gate", "mlp.experts.up": "mixer.experts.{}.up_proj",
        "mlp.experts.down": "mixer.experts.{}.down_proj", "mlp.shared.up": "mixer.shared_experts.up_proj",
        "mlp.shared.down": "mixer.shared_experts.down_proj",
    },
    mixers=modules_of("mixer"), rows=rows_of("mixer"), convolutions=CONVOLUTIONS, left_out=("mtp.",),
    kinds={"balance_bias": "e_score_correction_bias"},
)


FAMILY = Family(
    name="nemotron_h", architecture="NemotronHForCausalLM", read=read, write=write, names=NAMES,
    harmless=(HARMLESS - {"time_step_min"}) | MOE_HARMLESS | {"moe_shared_expert_overlap"},
)

"""Granite 4: Granite's layer with Mamba-2 in most layers; a block that every token passes, with experts beside it or
alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_port.core.config.model import ATTENTION, MoEConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.bamba import read_recurrent, write_recurrent
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.llama import NAMES as LLAMA
from megatron_port.ext.families.mamba2 import CONVOLUTIONS, HARMLESS, MIXER, modules_of, rows_of
from megatron_port.ext.families.shared import MOE_HARMLESS, read_llama_like, write_llama_like

_MIXERS = {"linear_attention": MIXER, "full_attention": ATTENTION, "mamba": MIXER, "attention": ATTENTION}
"""By the kind of a layer; the last two are older names."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("attention_bias", False, "biases in attention alone")
    values = read_llama_like(f)
    shared = f.get("shared_intermediate_size", 1024)
    if shared < 1:
        raise f.fault(f"shared_intermediate_size is {shared}; expected the width of the block that every token passes")
    experts = MoEConfig(
        num_experts=f.get("num_local_experts", 8), top_k=f.get("num_experts_per_tok", 2),
        ffn_hidden_size=f.get("intermediate_size", 11008), shared_ffn_hidden_size=shared,
    )
    return values | read_positions(f, values) | {
        "add_bias": False, "embedding_multiplier": f.get("embedding_multiplier", 1.0),
        "residual_multiplier": f.get("residual_multiplier", 1.0),
        "attention_scale": f.get("attention_multiplier", 1.0), "logits_divisor": f.get("logits_scaling", 1.0),
        **({"moe": experts} if experts.enabled else {"ffn_hidden_size": shared}),
    } | read_recurrent(f, values["hidden_size"], read_mixers(f, values["num_layers"]))


def read_positions(f: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields that ``position_embedding_type`` changes: without rope, attention has no positions."""
    f.asked.add("position_embedding_type")
    kind = f.values.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise f.fault(f"position_embedding_type is {kind!r:.40}; only rope and nope can be imported")
    if kind == "rope":
        return {}
    plain = ModelConfig()
    return {"rope_pattern": ("none",)} | {
        name: getattr(plain, name) for name in values if name.startswith(("rope_", "rotary_"))
    }


def read_mixers(f: Fields, layers: int) -> list[str]:
    """Return the mixers of the layers that ``layer_types`` names, or the same list by its other name."""
    names = ("layer_types", "layers_block_type")
    f.asked.update(names)
    found: list[list[str]] = []
    for name, kinds in ((name, f.values[name]) for name in names if f.values.get(name) is not None):
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _MIXERS for kind in kinds):
            raise f.fault(f"{name} is {kinds!r:.80}; expected {' or '.join(_MIXERS)} for {layers} layers")
        found.append([_MIXERS[kind] for kind in kinds])
    if found[1:] and found[0] != found[1]:
        raise f.fault("layer_types and layers_block_type are one field by two names, and differ; leave one of them")
    return found[0] if found else [MIXER] * layers


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    names = {MIXER: "linear_attention", ATTENTION: "full_attention"}
    moe, rotates = model.moe, any(model.rotates(layer) for layer in range(model.num_layers))
    return write_llama_like(model) | write_recurrent(model) | {
        "attention_bias": False, "embedding_multiplier": model.embedding_multiplier,
        "residual_multiplier": model.residual_multiplier,
        "attention_multiplier": model.attention_scale or model.head_size**-0.5, "logits_scaling": model.logits_divisor,
        "position_embedding_type": "rope" if rotates else "nope",
        "layer_types": [names.get(model.mixer_of(layer), "") for layer in range(model.num_layers)],
        "num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k, "intermediate_size": model.expert_size,
        "shared_intermediate_size": moe.shared_ffn_hidden_size if moe.enabled else model.ffn_size,
    }


# Granite 4's names. Its files have a tensor for each matrix of all experts, gates before inputs.

def experts(tensor: str, gated: bool) -> Any:
    """Return the rows of a matrix of all experts; ``gated``: of the first one."""
    def rows(model: ModelConfig) -> Iterator[tuple[str, int, int, int]]:
        count = model.expert_size if gated else model.hidden_size
        for expert in range(model.moe.num_experts):
            for part in range(1 + gated):
                yield f"block_sparse_moe.{tensor}.weight", part * count, count, expert

    return rows


_SHARED: dict[str, str | tuple[str, ...]] = {
    "mlp.up": "shared_mlp.input_linear", "mlp.down": "shared_mlp.output_linear",
    "mlp.shared.up": "shared_mlp.input_linear", "mlp.shared.down": "shared_mlp.output_linear",
    "mlp.router": "block_sparse_moe.router.layer",
}
NAMES = replace(
    LLAMA, inside={**LLAMA.inside, **_SHARED}, mixers=modules_of("mamba"), convolutions=CONVOLUTIONS, buffers=(),
    rows={
        **rows_of("mamba"), "mlp.experts.up.weight": experts("input_linear", True),
        "mlp.experts.down.weight": experts("output_linear", False),
    },
    loaded={
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    },
)


FAMILY = Family(
    name="granitemoehybrid", architecture="GraniteMoeHybridForCausalLM", read=read, write=write, names=NAMES,
    harmless=HARMLESS | MOE_HARMLESS,
)

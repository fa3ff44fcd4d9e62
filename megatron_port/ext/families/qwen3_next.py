"""Qwen3-Next: layers of Gated DeltaNet and of gated attention in turn, both with experts beside a shared block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_port.core.config.model import ATTENTION, RecurrentConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.qwen2_moe import NAMES as QWEN2_MOE
from megatron_port.ext.families.qwen3 import NAMES as QWEN3
from megatron_port.ext.families.settings import mixers
from megatron_port.ext.families.shared import (
    MOE_HARMLESS,
    qwen_experts,
    qwen_experts_there,
    read_llama_like,
    write_llama_like,
)

_MIXERS = {"linear_attention": "gated_delta", "full_attention": ATTENTION}


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    f.refuse("attention_bias", False, "biases in attention alone")
    f.refuse("use_sliding_window", False, "windows")
    f = f.changed(partial_rotary_factor=f.get("partial_rotary_factor", 0.25))
    values = read_llama_like(
        f, hidden=2048, ffn=5632, vocab=151936, length=32768, groups=2, head=256, layers=48, heads=16, partial=True,
    )
    layers, shared = values["num_layers"], f.get("shared_expert_intermediate_size", 512)
    if shared < 1:
        raise f.fault(f"shared_expert_intermediate_size is {shared}; expected a block that every token passes")
    return values | mixers(read_mixers(f, layers)) | {
        "add_bias": False, "qk_norm": True, "norm_zero_centered": True, "attention_gate": True,
        "recurrent": read_recurrent(f),
        "moe": qwen_experts(
            f.changed(norm_topk_prob=f.get("norm_topk_prob", True)), layers, experts=512, top_k=10, width=512,
            shared_ffn_hidden_size=shared, shared_gate=True,
        ),
    }


def read_mixers(f: Fields, layers: int) -> list[str]:
    """Return the mixers of the layers that ``layer_types`` names, or ``full_attention_interval`` asks for."""
    every = f.get("full_attention_interval", 4)
    f.asked.add("layer_types")
    kinds = f.values.get("layer_types")
    if kinds is None:
        kinds = [("full" if (layer + 1) % every == 0 else "linear") + "_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _MIXERS for kind in kinds):
        raise f.fault(f"layer_types is {kinds!r:.80}; expected {' or '.join(_MIXERS)} for {layers} layers")
    return [_MIXERS[kind] for kind in kinds]


def read_recurrent(f: Fields) -> RecurrentConfig:
    """Return the sizes of the recurrences."""
    return RecurrentConfig(
        heads=f.get("linear_num_value_heads", 32), key_heads=f.get("linear_num_key_heads", 16),
        key_size=f.get("linear_key_head_dim", 128), value_size=f.get("linear_value_head_dim", 128),
        kernel=f.get("linear_conv_kernel_dim", 4),
    )


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | qwen_experts_there(model) | write_recurrent(model) | {
        "attention_bias": False, "partial_rotary_factor": model.rotary_percent,
        "shared_expert_intermediate_size": model.moe.shared_ffn_hidden_size,
    }


def write_recurrent(model: ModelConfig) -> dict[str, Any]:
    """Fields of recurrences, and which layers have them."""
    r, names = model.recurrent, {ours: theirs for theirs, ours in _MIXERS.items()}
    heads = r.heads or model.num_attention_heads
    return {
        "layer_types": [names.get(model.mixer_of(layer), "") for layer in range(model.num_layers)],
        "linear_num_value_heads": heads, "linear_num_key_heads": r.key_heads or heads,
        "linear_key_head_dim": r.key_size or model.head_size, "linear_value_head_dim": r.value_size or model.head_size,
        "linear_conv_kernel_dim": r.kernel,
    }


# Qwen3-Next's names: Qwen3's and Qwen2-MoE's, and of a layer with a recurrence those below. A unit of ours is a head of
# keys, as in their projections; in their convolution all queries come first, then all keys, then all values.

OF = "linear_attn"
"""Before the names of a recurrence."""


def packed(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Rows of the projection: of each unit what two matrices there have."""
    r = model.recurrent
    each = r.heads // r.key_heads
    wide, narrow = 2 * r.key_size + 2 * each * r.value_size, 2 * each
    for unit in range(r.key_heads):
        yield f"{OF}.in_proj_qkvz.weight", unit * wide, wide
        yield f"{OF}.in_proj_ba.weight", unit * narrow, narrow


def convolved(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Channels of the convolution."""
    r, name = model.recurrent, f"{OF}.conv1d.weight"
    keys, values = r.key_heads * r.key_size, r.heads // r.key_heads * r.value_size
    for unit in range(r.key_heads):
        yield name, unit * r.key_size, r.key_size
        yield name, keys + unit * r.key_size, r.key_size
        yield name, 2 * keys + unit * values, values


NAMES = replace(
    QWEN3,
    inside={**QWEN2_MOE.inside, **QWEN3.inside},
    mixers={"gated_delta": {"attention.output": f"{OF}.out_proj", "attention.norm": f"{OF}.norm"}},
    rows={
        "attention.packed.weight": packed, "attention.convolution.weight": convolved,
        "attention.decay": lambda model: [(f"{OF}.A_log", 0, model.recurrent.heads)],
        "attention.decay_bias": lambda model: [(f"{OF}.dt_bias", 0, model.recurrent.heads)],
    },
    rotation="first", convolutions=("conv1d.weight",), left_out=("mtp.",),
)


FAMILY = Family(
    name="qwen3_next", architecture="Qwen3NextForCausalLM", read=read, write=write, names=NAMES,
    harmless=MOE_HARMLESS,
)

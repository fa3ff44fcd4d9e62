"""Falcon-H1: attention and Mamba-2 beside one another in every layer, and factors of what its matrices make."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.llama import NAMES as LLAMA
from megatron_port.ext.families.mamba2 import (
    CHUNKS,
    CONVOLUTIONS,
    HARMLESS,
    check_groups,
    limit_there,
    read_limit,
    rows_of,
)
from megatron_port.ext.families.shared import read_llama_like, write_llama_like

MIXER = "attention_mamba2"
_BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model. Factors of both branches' input are carried by what reads it."""
    for name in _BIASES:
        f.refuse(name, False, "biases of the projections")
    values = read_llama_like(
        f, hidden=4096, ffn=14336, vocab=128000, length=8192, groups=8, epsilon=1e-5,
    )
    head = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    into, keys = factor(f, "attention_in_multiplier"), factor(f, "key_multiplier")
    scores = keys * into**2
    return values | {
        "add_bias": False, "mixer": MIXER, "attention_scale": 0.0 if scores == 1.0 else scores * head**-0.5,
        "embedding_multiplier": factor(f, "embedding_multiplier"),
        "logits_divisor": 1 / factor(f, "lm_head_multiplier"), "mlp_multipliers": factors(f, "mlp_multipliers", 2),
        "recurrent": read_recurrent(f, values["hidden_size"], factor(f, "attention_out_multiplier") * into),
    }


def read_recurrent(f: Fields, hidden: int, of_attention: float) -> RecurrentConfig:
    """Return the sizes and the factors of Mamba-2."""
    heads, expand = f.get("mamba_n_heads", 128), f.get("mamba_expand", 2)
    if heads < 1:
        raise f.fault(f"mamba_n_heads is {heads}; expected at least 1")
    inner = f.or_none("mamba_d_ssm", 1024, expand * hidden)
    f.asked.update(("mamba_d_head", *CHUNKS))
    width, before = f.values.get("mamba_d_head", "auto"), f.get("mamba_norm_before_gate", True)
    low, high = read_limit(f)
    into, normed = factor(f, "ssm_in_multiplier"), f.get("mamba_rms_norm", False)
    multipliers = tuple(into * one for one in factors(f, "ssm_multipliers", 5) or (1.0,) * 5)
    recurrent = RecurrentConfig(
        heads=heads, key_heads=f.get("mamba_n_groups", 1), key_size=f.get("mamba_d_state", 256),
        value_size=inner // heads if width == "auto" else f.get("mamba_d_head", 0), kernel=f.get("mamba_d_conv", 4),
        convolution_bias=f.get("mamba_conv_bias", True), step_min=low, step_max=high,
        gated_norm="group" if normed else "none", norm_before_gate=normed and before,
        multipliers=() if multipliers == (1.0,) * 5 else multipliers,
        result_multiplier=factor(f, "ssm_out_multiplier"), attention_multiplier=of_attention,
    )
    if heads * recurrent.value_size != inner:
        raise f.fault(f"mamba_n_heads × mamba_d_head is {heads} × {recurrent.value_size}; expected {inner}, which is "
                      "mamba_d_ssm, or without it mamba_expand × hidden_size")
    check_groups(f, recurrent)
    return recurrent


def factor(f: Fields, name: str) -> float:
    """Return a factor, which must be above 0."""
    found: float = f.get(name, 1.0)
    if not 0 < found < math.inf:
        raise f.fault(f"{name} is {found}; only factors above 0 can be imported")
    return found


def factors(f: Fields, name: str, count: int) -> tuple[float, ...]:
    """Return so many factors; none where all are 1."""
    found = f.or_none(name, [1.0] * count, [1.0] * count)
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf for x in found)
    if len(found) != count or not numbers:
        raise f.fault(f"{name} is {found!r:.80}; only {count} factors above 0 can be imported")
    return () if found == [1.0] * count else tuple(map(float, found))


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    r = model.recurrent
    return write_llama_like(model) | limit_there(r) | dict.fromkeys(_BIASES, False) | {
        "mamba_n_heads": r.heads, "mamba_d_head": r.value_size, "mamba_n_groups": r.key_heads,
        "mamba_d_ssm": r.heads * r.value_size,
        "mamba_d_state": r.key_size, "mamba_d_conv": r.kernel, "mamba_conv_bias": r.convolution_bias,
        "mamba_rms_norm": r.gated_norm != "none", "mamba_norm_before_gate": r.norm_before_gate,
        "key_multiplier": model.attention_scale / model.head_size**-0.5 if model.attention_scale else 1.0,
        "attention_out_multiplier": r.attention_multiplier, "ssm_out_multiplier": r.result_multiplier,
        "ssm_multipliers": list(r.multipliers) or None, "mlp_multipliers": list(model.mlp_multipliers) or None,
        "embedding_multiplier": model.embedding_multiplier,
        "lm_head_multiplier": 1 / model.logits_divisor,
    }


NAMES = replace(
    LLAMA, outside={**LLAMA.outside, "final_norm": "final_layernorm"},
    inside={
        **LLAMA.inside, "norm2": "pre_ff_layernorm", "mlp.up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "mlp.down": "feed_forward.down_proj",
    },
    mixers={MIXER: {"attention.norm": "mamba.norm", "attention.recurrent_output": "mamba.out_proj"}},
    rows=rows_of("mamba"), convolutions=CONVOLUTIONS, buffers=("mamba.mup_vector",),
)


FAMILY = Family(
    name="falcon_h1", architecture="FalconH1ForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS,
)

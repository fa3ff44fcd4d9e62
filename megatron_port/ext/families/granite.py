"""Granite: Llama's layer with factors on embeddings, branches, scores and logits."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.llama import NAMES
from megatron_port.ext.families.shared import one_bias, read_llama_like, write_llama_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    return read_llama_like(f) | {
        "add_bias": one_bias(f), "embedding_multiplier": f.get("embedding_multiplier", 1.0),
        "residual_multiplier": f.get("residual_multiplier", 1.0),
        "attention_scale": f.get("attention_multiplier", 1.0), "logits_divisor": f.get("logits_scaling", 1.0),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {
        "attention_bias": model.add_bias, "mlp_bias": model.add_bias,
        "embedding_multiplier": model.embedding_multiplier, "residual_multiplier": model.residual_multiplier,
        "attention_multiplier": model.attention_scale or model.head_size**-0.5, "logits_scaling": model.logits_divisor,
    }


FAMILY = Family(name="granite", architecture="GraniteForCausalLM", read=read, write=write, names=NAMES)

"""Phi-3 and Phi-4: Llama's layer; queries, keys and values in one matrix, gate and up in another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields
from megatron_port.ext.families.llama import NAMES as LLAMA
from megatron_port.ext.families.shared import read_llama_like, write_llama_like

HARMLESS = frozenset({"original_max_position_embeddings"})
"""Read by transformers only for rope_type longrope, which is refused."""


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    values = read_llama_like(f, hidden=3072, ffn=8192, vocab=32064, length=4096, epsilon=1e-5, partial=True)
    if "rope_scaling" in values:
        raise f.fault(f"rope_type {values['rope_scaling']!r}: transformers' phi3 has default and longrope only")
    window = f.window("sliding_window", 0)
    dropout = f.get("resid_pdrop", 0.0)
    f.refuse("embd_pdrop", dropout, "another probability after the embedding than after the branches")
    return values | {"add_bias": False, "sliding_window": window, "hidden_dropout": dropout}


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {
        "partial_rotary_factor": model.rotary_percent, "sliding_window": model.sliding_window or None,
        "resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout,
    }


# Phi-3's names: Llama's, with fused matrices.

_FUSED = {"attention.qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"}
NAMES = replace(LLAMA, inside={**LLAMA.inside, **_FUSED}, rotation="first", buffers=())


FAMILY = Family(
    name="phi3", architecture="Phi3ForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS, twin=True
)

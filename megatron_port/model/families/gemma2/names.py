"""Gemma 2's names: Llama's, with norms of what the branches add."""

from dataclasses import replace

from megatron_port.model.families.llama.names import NAMES as LLAMA

_NORMS = {
    "post_norm1": "post_attention_layernorm", "norm2": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}
NAMES = replace(LLAMA, inside={**LLAMA.inside, **_NORMS}, buffers=())

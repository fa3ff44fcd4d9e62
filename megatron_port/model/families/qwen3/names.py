"""Qwen3's names: Llama's, and the norms of query and key heads."""

from dataclasses import replace

from megatron_port.model.families.llama.names import NAMES as LLAMA

_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
NAMES = replace(LLAMA, inside={**LLAMA.inside, **_NORMS}, buffers=())

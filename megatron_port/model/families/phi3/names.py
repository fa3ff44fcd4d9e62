"""Phi-3's names: Llama's, with fused matrices."""

from dataclasses import replace

from megatron_port.model.families.llama.names import NAMES as LLAMA

_FUSED = {"attention.qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"}
NAMES = replace(LLAMA, inside={**LLAMA.inside, **_FUSED}, rotation="first", buffers=())

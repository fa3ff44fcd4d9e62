"""Mixtral's names: Llama's, and a block of experts with names of its own."""

from dataclasses import replace

from megatron_port.model.families.llama.names import NAMES as LLAMA
from megatron_port.model.families.moe_like import experts_named

_EXPERTS = experts_named("block_sparse_moe", "w1", "w3", "w2")
NAMES = replace(LLAMA, inside={**LLAMA.inside, **_EXPERTS}, buffers=(), loaded={".block_sparse_moe.": ".mlp."})

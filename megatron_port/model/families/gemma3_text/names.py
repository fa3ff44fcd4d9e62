"""Gemma 3's names: Gemma 2's, and the norms of query and key heads."""

from dataclasses import replace

from megatron_port.model.families.gemma2.names import NAMES as GEMMA2

_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
NAMES = replace(GEMMA2, inside={**GEMMA2.inside, **_NORMS})

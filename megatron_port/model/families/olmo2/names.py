"""OLMo 2's names: Llama's, without norms of what attention and MLP read."""

from dataclasses import replace

from megatron_port.model.families.qwen3.names import NAMES as QWEN3

_NORMS = {"post_norm1": "post_attention_layernorm", "post_norm2": "post_feedforward_layernorm"}
_INSIDE = {ours: theirs for ours, theirs in QWEN3.inside.items() if ours not in ("norm1", "norm2")}
NAMES = replace(QWEN3, inside={**_INSIDE, **_NORMS})

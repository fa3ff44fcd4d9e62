"""GPT-OSS's names: Llama's, sinks, and two tensors of all experts."""

from dataclasses import replace

from megatron_port.model.families.llama.names import NAMES as LLAMA

_OWN = {
    "attention": "self_attn", "mlp.router": "mlp.router", "mlp.experts.up": "mlp.experts.gate_up_proj",
    "mlp.experts.down": "mlp.experts.down_proj",
}
NAMES = replace(LLAMA, inside={**LLAMA.inside, **_OWN}, buffers=())

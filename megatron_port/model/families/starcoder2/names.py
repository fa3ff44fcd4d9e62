"""StarCoder2's names: Llama's around an MLP of two matrices."""

from dataclasses import replace

from megatron_port.model.families.llama.names import NAMES as LLAMA

NAMES = replace(LLAMA, inside={**LLAMA.inside, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}, buffers=())

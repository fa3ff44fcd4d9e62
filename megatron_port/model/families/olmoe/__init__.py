"""OLMoE: Llama's layer with norms of all queries and of all keys, and experts whose scores are not normalised."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.moe_like import HARMLESS
from megatron_port.model.families.olmoe.config import read, write
from megatron_port.model.families.qwen3_moe.names import NAMES

FAMILY = Family(name="olmoe", architecture="OlmoeForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS)

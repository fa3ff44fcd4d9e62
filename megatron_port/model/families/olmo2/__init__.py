"""OLMo 2: Llama's matrices, norms of what the branches add, RMSNorm over all queries and over all keys."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.olmo2.config import read, write
from megatron_port.model.families.olmo2.names import NAMES

FAMILY = Family(name="olmo2", architecture="Olmo2ForCausalLM", read=read, write=write, names=NAMES)

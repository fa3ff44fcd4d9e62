"""Qwen2 and Qwen2.5: Llama's layer with biases of queries, keys and values."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.llama.names import NAMES
from megatron_port.model.families.qwen2.config import read, write

FAMILY = Family(name="qwen2", architecture="Qwen2ForCausalLM", read=read, write=write, names=NAMES)

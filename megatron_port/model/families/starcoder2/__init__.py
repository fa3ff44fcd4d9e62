"""StarCoder2 without a window: LayerNorm, GeLU without a gate, biases, rotary positions, grouped queries."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.starcoder2.config import read, write
from megatron_port.model.families.starcoder2.names import NAMES

FAMILY = Family(name="starcoder2", architecture="Starcoder2ForCausalLM", read=read, write=write, names=NAMES)

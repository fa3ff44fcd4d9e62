"""SmolLM3: Llama's layer, of which every fourth knows no positions."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.llama.names import NAMES
from megatron_port.model.families.smollm3.config import read, write

FAMILY = Family(
    name="smollm3", architecture="SmolLM3ForCausalLM", read=read, write=write, names=NAMES,
    harmless=frozenset({"pretraining_tp"}),  # the same products, in slices
)

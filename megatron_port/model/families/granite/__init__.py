"""Granite: Llama's layer with factors on embeddings, branches, scores and logits."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.granite.config import read, write
from megatron_port.model.families.llama.names import NAMES

FAMILY = Family(name="granite", architecture="GraniteForCausalLM", read=read, write=write, names=NAMES)

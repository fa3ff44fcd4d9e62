"""Falcon: rotary positions, LayerNorm, GeLU, few keys and values, attention and feed-forward in parallel."""

from megatron_port.model.families.falcon.config import HARMLESS, read, write
from megatron_port.model.families.falcon.names import NAMES, names_of
from megatron_port.model.families.family import Family

FAMILY = Family(
    name="falcon", architecture="FalconForCausalLM", read=read, write=write, names=NAMES, names_of=names_of,
    harmless=HARMLESS,
)

"""DeepSeek-V2: latent attention (MLA) in Llama's layer, experts of a few groups by their softmax."""

from megatron_port.model.families.deepseek_v2.config import HARMLESS, read, write
from megatron_port.model.families.deepseek_v3.names import NAMES
from megatron_port.model.families.family import Family

FAMILY = Family(
    name="deepseek_v2", architecture="DeepseekV2ForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)

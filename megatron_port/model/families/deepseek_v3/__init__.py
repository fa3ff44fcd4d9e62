"""DeepSeek-V3: latent attention (MLA) in Llama's layer, experts that a bias keeps in balance."""

from megatron_port.model.families.deepseek_v3.config import HARMLESS, read, write
from megatron_port.model.families.deepseek_v3.names import NAMES
from megatron_port.model.families.family import Family

FAMILY = Family(
    name="deepseek_v3", architecture="DeepseekV3ForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)

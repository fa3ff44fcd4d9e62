"""GPT-OSS: biases everywhere, attention with sinks and windows, experts with a clamped activation."""

from megatron_port.model.families.family import Family
from megatron_port.model.families.gpt_oss.config import HARMLESS, read, write
from megatron_port.model.families.gpt_oss.names import NAMES

FAMILY = Family(
    name="gpt_oss", architecture="GptOssForCausalLM", read=read, write=write, names=NAMES, harmless=HARMLESS
)

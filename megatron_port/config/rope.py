"""Which settings of rotary position embeddings fit together."""

from __future__ import annotations

from megatron_port.config.dump import toml_value
from megatron_port.config.schema import ModelConfig


def rope_problems(m: ModelConfig) -> list[str]:
    """Name the rotary options that do not fit together."""
    rotary = {"rotary_percent": 1.0, "rope_scaling": "none", "attention_scale": 0.0}
    if m.position_embedding != "rope":
        asked = [f"{name} = {toml_value(getattr(m, name))}" for name, off in rotary.items() if getattr(m, name) != off]
        return [f"model.{' and '.join(asked)} needs position_embedding = \"rope\""] if asked else []
    out = []
    # A hidden size below the number of heads gives heads of no elements; that is said of the hidden size.
    if not m.kv_lora_rank and m.head_size and m.head_size % 2 == 0 and (m.rotary_size < 2 or m.rotary_size % 2):
        out.append(
            f"model.rotary_percent {m.rotary_percent} of a head of {m.head_size} is {m.rotary_size} elements; rope "
            f"rotates pairs: use a multiple of {2 / m.head_size:g}"
        )
    if m.rope_scaling in ("llama3", "yarn") and m.rope_original_length < 1:
        out.append(f'model.rope_scaling "{m.rope_scaling}" needs rope_original_length, e.g. 8192')
    if m.rope_scaling == "yarn" and m.rope_beta_fast <= m.rope_beta_slow:
        out.append(f"model.rope_beta_fast {m.rope_beta_fast} must be above rope_beta_slow {m.rope_beta_slow}")
    if m.rope_scaling == "llama3" and m.rope_high_freq_factor <= m.rope_low_freq_factor:
        out.append(
            f"model.rope_high_freq_factor {m.rope_high_freq_factor} must be above rope_low_freq_factor "
            f"{m.rope_low_freq_factor}"
        )
    return out

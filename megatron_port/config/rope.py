"""Which settings of rotary position embeddings fit together."""

from __future__ import annotations

from typing import Any

from megatron_port.config.attention import shortest_pattern
from megatron_port.config.dump import toml_value
from megatron_port.config.schema import ModelConfig


def rotations_of(model: ModelConfig) -> dict[str, Any]:
    """Return the pattern of the layers that rotate in its shortest form."""
    if not model.rope_pattern:
        return {}
    kinds = ["rope" if model.rotates(layer) else "none" for layer in range(min(model.num_layers, 1 << 16))]
    return {"rope_pattern": shortest_pattern(kinds) if "none" in kinds else ()}


def rope_problems(m: ModelConfig) -> list[str]:
    """Name the rotary options that do not fit together."""
    rotary = {"rotary_percent": 1.0, "rope_scaling": "none", "attention_scale": 0.0, "window_rope_theta": 0.0}
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
    if m.window_rope_theta and not m.sliding_window:
        out.append(f"model.window_rope_theta {m.window_rope_theta} is of no layer: sliding_window is 0")
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

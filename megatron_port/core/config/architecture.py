"""Which options of a model's norms, biases and positions fit together."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.attention import shortest_pattern
from megatron_port.core.config.conflicts import Conflict, Rule, Table, shown
from megatron_port.core.config.schema import ModelConfig, RunConfig

ROTATIONS = ("rope", "none")
"""Kinds of a layer in model.rope_pattern."""
_OF_ROPE = {"rotary_percent": 1.0, "rope_scaling": "none", "attention_scale": 0.0, "window_rope_theta": 0.0}


def rotations_of(model: ModelConfig) -> dict[str, Any]:
    """Return the pattern of the layers that rotate in its shortest form."""
    if not model.rope_pattern:
        return {}
    kinds = ["rope" if model.rotates(layer) else "none" for layer in range(min(model.num_layers, 1 << 16))]
    return {"rope_pattern": shortest_pattern(kinds) if "none" in kinds else ()}


def _without_rope(config: RunConfig) -> list[str]:
    m = config.model
    asked = [f"{name} = {shown(getattr(m, name))}" for name, off in _OF_ROPE.items() if getattr(m, name) != off]
    return [f"model.{' and '.join(asked)} needs position_embedding = \"rope\""] if asked else []


def _pairs(config: RunConfig) -> list[str]:
    m = config.model
    # A hidden size below the number of heads gives heads of no elements; that is said of the hidden size.
    if m.kv_lora_rank or not m.head_size or m.head_size % 2 or (m.rotary_size >= 2 and m.rotary_size % 2 == 0):
        return []
    return [f"model.rotary_percent {m.rotary_percent} of a head of {m.head_size} is {m.rotary_size} elements; rope "
            f"rotates pairs: use a multiple of {2 / m.head_size:g}"]


def _kinds(config: RunConfig) -> list[str]:
    unknown = ", ".join(map(repr, sorted(set(config.model.rope_pattern) - set(ROTATIONS))))
    return [f"model.rope_pattern has {unknown}; each must be one of {', '.join(ROTATIONS)}"] if unknown else []


CONFLICTS = (
    Table(on=lambda c: c.model.position_embedding != "rope", sized=True, more=(_without_rope,)),
    Table(on=lambda c: c.model.position_embedding == "rope", sized=True, rows=(
        Rule(lambda c: c.model.window_rope_theta and not c.model.sliding_window,
             "model.window_rope_theta {c.model.window_rope_theta} is of no layer: sliding_window is 0"),
        Rule(lambda c: c.model.rope_scaling in ("llama3", "yarn") and c.model.rope_original_length < 1,
             'model.rope_scaling "{c.model.rope_scaling}" needs rope_original_length, e.g. 8192'),
        Rule(lambda c: c.model.rope_scaling == "yarn" and c.model.rope_beta_fast <= c.model.rope_beta_slow,
             "model.rope_beta_fast {c.model.rope_beta_fast} must be above rope_beta_slow {c.model.rope_beta_slow}"),
        Rule(lambda c: c.model.rope_scaling == "llama3"
             and c.model.rope_high_freq_factor <= c.model.rope_low_freq_factor,
             "model.rope_high_freq_factor {c.model.rope_high_freq_factor} must be above rope_low_freq_factor "
             "{c.model.rope_low_freq_factor}"),
    ), more=(_pairs,)),
    Table(sized=True, asked="model.shared_norm", on=lambda c: c.model.shared_norm, rows=(
        Conflict("model.parallel_residual", "only then do both branches read one tensor", refused=(False,),
                 needs="parallel_residual = true"),
        Conflict("model.norm_placement", "there is no norm of the input", 'use "pre"', refused=("post",)),
    )),
    Table(sized=True, asked="model.mup_base_size {c.model.mup_base_size}", on=lambda c: c.model.mup_base_size, rows=(
        Conflict("model.head_bias", "the bias would not be divided with the logits", "leave one of the two out"),
        Conflict("model.kv_lora_rank", "inputs of latents do not grow with the width", "use 0"),
    )),
    Table(sized=True, rows=(
        Rule(lambda c: c.model.qk_norm_over != "head" and not c.model.qk_norm,
             'model.qk_norm_over "{c.model.qk_norm_over}" needs qk_norm = true'),
        Rule(lambda c: c.model.norm_bias and c.model.normalization != "layernorm",
             'model.norm_bias needs normalization = "layernorm"; "{c.model.normalization}" has no bias'),
        *(Rule(lambda c, name=name: c.model.add_bias and getattr(c.model, name),  # type: ignore[misc]
               f"model.{name} is of models without add_bias, which has it; set one of the two to false")
          for name in ("qkv_bias", "mlp_bias", "norm_bias")),
        Rule(lambda c: c.model.head_bias and c.model.logits_divisor != 1.0,
             "model.head_bias with logits_divisor {c.model.logits_divisor}: the bias would not be divided; use 1"),
        Rule(lambda c: c.model.rope_pattern and c.model.position_embedding != "rope",
             'model.rope_pattern needs position_embedding = "rope", not "{c.model.position_embedding}"'),
    ), more=(_kinds,)),
)

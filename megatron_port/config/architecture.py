"""Which options of a model's layers fit together."""

from __future__ import annotations

from megatron_port.config.schema import ModelConfig

ROTATIONS = ("rope", "none")
"""Kinds of a layer in model.rope_pattern."""


def architecture_problems(m: ModelConfig) -> list[str]:
    """Name the options of norms, biases and positions that do not fit together."""
    out = []
    if m.shared_norm and not m.parallel_residual:
        out.append("model.shared_norm needs parallel_residual = true: only then do both branches read one tensor")
    if m.shared_norm and m.norm_placement == "post":
        out.append('model.shared_norm with norm_placement "post": there is no norm of the input; use "pre"')
    if m.qk_norm_over != "head" and not m.qk_norm:
        out.append(f'model.qk_norm_over "{m.qk_norm_over}" needs qk_norm = true')
    if m.norm_bias and m.normalization != "layernorm":
        out.append(f'model.norm_bias needs normalization = "layernorm"; "{m.normalization}" has no bias')
    out += [f"model.{name} is of models without add_bias, which has it; set one of the two to false"
            for name in ("qkv_bias", "mlp_bias", "norm_bias") if m.add_bias and getattr(m, name)]
    if m.head_bias and m.logits_divisor != 1.0:
        out.append(f"model.head_bias with logits_divisor {m.logits_divisor}: the bias would not be divided; use 1")
    if m.mup_base_size:
        out += _mup_problems(m)
    unknown = ", ".join(map(repr, sorted(set(m.rope_pattern) - set(ROTATIONS))))
    if unknown:
        out.append(f"model.rope_pattern has {unknown}; each must be one of {', '.join(ROTATIONS)}")
    if m.rope_pattern and m.position_embedding != "rope":
        out.append(f'model.rope_pattern needs position_embedding = "rope", not "{m.position_embedding}"')
    return out


def _mup_problems(m: ModelConfig) -> list[str]:
    """Name what muP's multipliers are not defined for."""
    name = f"model.mup_base_size {m.mup_base_size}"
    out = []
    if m.head_bias:
        out.append(f"{name} with head_bias: the bias would not be divided with the logits; leave one of the two out")
    if m.kv_lora_rank:
        out.append(f"{name} with kv_lora_rank {m.kv_lora_rank}: inputs of latents do not grow with the width; use 0")
    return out

"""Options of models that families bring (norms, biases, positions, windows): which go together, and the canonical form
of patterns over the layers, the shortest one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_port.core.config.conflicts import Conflict, Rule, Table, shown
from megatron_port.core.config.model import ATTENTION
from megatron_port.core.config.schema import ModelConfig, RunConfig

ROTATIONS = ("rope", "none")
"""Kinds of a layer in model.rope_pattern."""
_OF_ROPE = {"rotary_percent": 1.0, "rope_scaling": "none", "attention_scale": 0.0, "window_rope_theta": 0.0}


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest pattern that, repeated, begins with ``kinds``."""
    # The longest beginning of each part of the list that is also its end (Knuth, Morris and Pratt): linear, whatever a
    # file brings.
    ends = [0] * len(kinds)
    for i in range(1, len(kinds)):
        length = ends[i - 1]
        while length and kinds[i] != kinds[length]:
            length = ends[length - 1]
        ends[i] = length + (kinds[i] == kinds[length])
    return tuple(kinds[: len(kinds) - ends[-1]]) if kinds else ()


def windows(kinds: Sequence[str], window: int) -> dict[str, Any]:
    """Return the fields of a model whose layers have these kinds of attention, the pattern in its shortest form."""
    pattern = shortest_pattern(kinds) if window else ("full",)
    if pattern == ("full",):
        return {"sliding_window": 0, "attention_pattern": ()}
    return {"sliding_window": window, "attention_pattern": () if pattern == ("window",) else pattern}


def windows_of(model: ModelConfig) -> dict[str, Any]:
    """Return the pattern of a model's windows, in its shortest form."""
    if not model.attention_pattern:
        return {}
    if "chunk" in model.attention_pattern:
        return {"attention_pattern": shortest_pattern(_kinds_of(model))}
    kinds = ["window" if model.window_of(layer) else "full" for layer in range(min(model.num_layers, 1 << 16))]
    return windows(kinds, model.sliding_window)


def _kinds_of(model: ModelConfig) -> list[str]:
    """Return the kind of attention of each layer."""
    pattern = model.attention_pattern
    return [pattern[layer % len(pattern)] for layer in range(min(model.num_layers, 1 << 16))]


def mixers_of(model: ModelConfig) -> dict[str, Any]:
    """Return the mixers of a model's layers, a pattern in its shortest form."""
    return mixers([model.mixer_of(layer) for layer in range(min(model.num_layers, 1 << 16))])


def mixers(names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a model whose layers have these mixers."""
    pattern = shortest_pattern(names)
    return {"mixer": pattern[0], "mixer_pattern": ()} if len(pattern) == 1 else {
        "mixer": ATTENTION, "mixer_pattern": pattern
    }


def norms(placements: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a model whose layers have their norms there, the pattern in its shortest form."""
    pattern = shortest_pattern(placements)
    return {"norm_placement": pattern[0], "norm_pattern": ()} if len(pattern) == 1 else {
        "norm_placement": "pre", "norm_pattern": pattern
    }


def norms_of(model: ModelConfig) -> dict[str, Any]:
    """Return where the norms of a model's layers are, a pattern in its shortest form."""
    return norms([model.norms_of(layer) for layer in range(min(model.num_layers, 1 << 16))])


def mlps_of(model: ModelConfig) -> dict[str, Any]:
    """Return the pattern of layers that have a feed-forward block, in its shortest form."""
    return mlps([model.has_mlp(layer) for layer in range(min(model.num_layers, 1 << 16))])


def mlps(there: Sequence[bool]) -> dict[str, Any]:
    """Return the field of a model of whose layers some have a feed-forward block."""
    pattern = shortest_pattern(["mlp" if one else "none" for one in there])
    return {"mlp_pattern": () if pattern == ("mlp",) else pattern}


def rotates_attention(model: ModelConfig) -> list[bool]:
    """Return whether queries and keys are rotated, of each layer of attention."""
    layers = range(min(model.num_layers, 1 << 16))
    return [model.rotates(layer) for layer in layers if model.mixer_of(layer) == ATTENTION]


def rotations_of(model: ModelConfig) -> dict[str, Any]:
    """Return the pattern of layers that rotate, in its shortest form."""
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


OPTIONS = (
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
        Rule(lambda c: "post" in c.model.norm_pattern,
             'model.shared_norm with "post" in model.norm_pattern: there is no norm of the input; use "pre"'),
    )),
    Table(sized=True, asked="model.mup_base_size {c.model.mup_base_size}", on=lambda c: c.model.mup_base_size, rows=(
        Conflict("model.head_bias", "the bias would not be divided with the logits", "leave one of the two out"),
        Conflict("model.kv_lora_rank", "inputs of latents do not grow with the width", "use 0"),
    )),
    Table(sized=True, asked="model.mlp_multipliers {c.model.mlp_multipliers}", on=lambda c: c.model.mlp_multipliers,
          link="does not go with", rows=(
        Conflict("model.activation", use='use "swiglu"', allowed=("swiglu",)),
        Conflict("model.mlp_bias", "the last bias would not be multiplied", "use false"),
        Conflict("model.add_bias", "the last bias would not be multiplied", "use false"),
        Conflict("model.moe.num_experts", "experts have none", "use 0"),
        Rule(lambda c: len(c.model.mlp_multipliers) != 2 or min(c.model.mlp_multipliers) <= 0,
             "{asked}: give two above 0, of the gate and of the result, or none"),
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
        Rule(lambda c: c.model.norm_pattern and c.model.norm_placement != "pre",
             "model.norm_pattern says where the norms of all layers are; leave out model.norm_placement "
             '"{c.model.norm_placement}"'),
        Rule(lambda c: c.model.rope_pattern and c.model.position_embedding != "rope",
             'model.rope_pattern needs position_embedding = "rope", not "{c.model.position_embedding}"'),
    ), more=(_kinds,)),
)


def _windows(config: RunConfig) -> list[str]:
    """Name kinds of layers that do not exist, or windows without a size."""
    m, pattern = config.model, config.model.attention_pattern
    if unknown := sorted(set(pattern) - {"full", "window", "chunk"}):
        return [f"model.attention_pattern has {unknown[0]!r}; each entry must be full, window or chunk"]
    out = []
    if len(pattern) > m.num_layers:
        out.append(
            f"model.attention_pattern has {len(pattern)} entries for num_layers {m.num_layers}; give one per layer, or "
            "fewer that are repeated"
        )
    if "window" in pattern and not m.sliding_window:
        out.append("model.attention_pattern has windows, but sliding_window is 0; e.g. sliding_window = 4096")
    if ("chunk" in pattern) != bool(m.attention_chunk):
        out.append(
            f"model.attention_chunk is {m.attention_chunk}, and attention_pattern {list(pattern)} says which layers "
            'have chunks; give both, e.g. attention_pattern = ["chunk", "full"] and attention_chunk = 8192, or neither'
        )
    if pattern and "window" not in pattern and m.sliding_window:
        out.append(
            f"model.sliding_window {m.sliding_window} is of no layer: attention_pattern {list(pattern)} has no "
            "\"window\"; leave one of the two out"
        )
    return out


WINDOWS = (Table(sized=True, more=(_windows,)),)

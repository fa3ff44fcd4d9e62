"""The rule for two configurations of a model being of the same one: its weights then fit, and compute the same."""

from __future__ import annotations

from dataclasses import fields, replace

from megatron_port.config.schema import ModelConfig

FREE = frozenset({"name", "family", "hidden_dropout", "attention_dropout", "init_std"})
"""Fields of a model that its weights do not depend on."""


def with_sizes(model: ModelConfig) -> ModelConfig:
    """Return the model with its derived sizes filled in; as it is where they cannot be derived (no heads)."""
    try:
        return replace(
            model, num_query_groups=model.kv_heads, head_dim=model.head_size, ffn_hidden_size=model.ffn_size
        )
    except ArithmeticError:
        return model


def model_differences(theirs: ModelConfig, mine: ModelConfig, *, any_length: bool = False) -> list[str]:
    """Return the fields that differ, as ``x is 1 there and 2 here``; derived sizes are compared by their values.

    ``any_length``: under rope the length of a sample is no property of the weights.
    """
    theirs, mine = with_sizes(theirs), with_sizes(mine)
    free = FREE | {"seq_length"} if any_length and mine.position_embedding == "rope" else FREE
    return [
        f"{f.name} is {getattr(theirs, f.name)!r} there and {getattr(mine, f.name)!r} here"
        for f in fields(ModelConfig)
        if f.name not in free and getattr(theirs, f.name) != getattr(mine, f.name)
    ]

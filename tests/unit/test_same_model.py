"""Which fields make two configurations those of the same model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_port.core.config.dump import leaves
from megatron_port.core.config.schema import ModelConfig
from megatron_port.run.same_model import FREE, model_differences, with_sizes

MODEL = ModelConfig(hidden_size=48, num_attention_heads=4, num_layers=2, position_embedding="rope", sliding_window=4)


def other(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, tuple):
        return ("window", "full")
    return not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("name", [name for name, _ in leaves(ModelConfig())])
def test_every_field_counts_but_the_free_ones(name: str) -> None:
    sized = with_sizes(MODEL)
    if name.startswith("moe."):
        field = name.removeprefix("moe.")
        experts = replace(sized.moe, num_experts=4, groups=2)
        sized = with_sizes(replace(sized, moe=experts))
        changed = replace(sized, moe=replace(sized.moe, **{field: other(getattr(sized.moe, field))}))
    elif name.startswith("recurrent."):
        field = name.removeprefix("recurrent.")
        sized = with_sizes(replace(sized, mixer="gated_delta"))
        changed = replace(sized, recurrent=replace(sized.recurrent, **{field: other(getattr(sized.recurrent, field))}))
    else:
        changed = replace(sized, **{name: other(getattr(sized, name))})
    found = model_differences(changed, sized)
    assert not found if name in FREE else any(line.startswith(f"{name} is ") for line in found)


def test_a_size_given_or_derived_is_the_same() -> None:
    given = replace(MODEL, num_query_groups=4, head_dim=12, ffn_hidden_size=MODEL.ffn_size)
    assert not model_differences(given, MODEL) and not model_differences(MODEL, given)
    assert model_differences(replace(given, head_dim=16), MODEL) == ["head_dim is 16 there and 12 here"]


def test_a_pattern_of_windows_has_many_forms() -> None:
    deep = replace(MODEL, num_layers=4, attention_pattern=("full", "window"))
    assert not model_differences(replace(deep, attention_pattern=("full", "window") * 2), deep)
    assert not model_differences(replace(deep, attention_pattern=("window",)), replace(deep, attention_pattern=()))
    assert model_differences(replace(deep, attention_pattern=("full", "window", "window")), deep)


def test_a_pattern_of_norms_has_many_forms() -> None:
    deep = replace(MODEL, num_layers=4, norm_pattern=("pre", "post"))
    assert not model_differences(replace(deep, norm_pattern=("pre", "post") * 2), deep)
    post = replace(MODEL, num_layers=4, norm_placement="post")
    assert not model_differences(replace(deep, norm_pattern=("post",)), post)
    assert model_differences(replace(deep, norm_pattern=("post", "pre")), deep)


def test_the_length_is_free_for_weights_under_rope_only() -> None:
    longer = replace(MODEL, seq_length=2 * MODEL.seq_length)
    assert model_differences(longer, MODEL) and not model_differences(longer, MODEL, any_length=True)
    learned = replace(MODEL, position_embedding="learned")
    assert model_differences(replace(longer, position_embedding="learned"), learned, any_length=True)

"""Layers to stages: as balanced as brute force finds, every stage with a layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.pipeline.partition import balanced_layers, search_split
from megatron_port.ext.telemetry.flops import unit_costs

COSTS = st.integers(0, 20).map(float)


def stage_costs(costs: Sequence[float], split: Sequence[int]) -> list[float]:
    """Embedding on the first stage, head on the last."""
    layers = iter(costs[1:-1])
    stages = [sum(itertools.islice(layers, n)) for n in split]
    stages[0] += costs[0]
    stages[-1] += costs[-1]
    return stages


def costliest(costs: Sequence[float], split: Sequence[int]) -> float:
    return max(stage_costs(costs, split))


def all_splits(layers: int, stages: int) -> Iterator[list[int]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield [b - a for a, b in itertools.pairwise((0, *cuts, layers))]


def brute_force(costs: Sequence[float], stages: int) -> float:
    return min(costliest(costs, split) for split in all_splits(len(costs) - 2, stages))


@settings(max_examples=150, deadline=None)
@given(st.lists(COSTS, min_size=1, max_size=9), COSTS, COSTS, st.data())
def test_as_good_as_brute_force(layers: list[float], embedding: float, head: float, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(layers)))
    costs = [embedding, *layers, head]
    split = balanced_layers(costs, stages)
    assert len(split) == stages and sum(split) == len(layers) and min(split) >= 1
    assert costliest(costs, split) == brute_force(costs, stages)


@pytest.mark.parametrize(("layers", "stages"), [(8, 4), (5, 4), (24, 7), (4, 4), (1, 1)])
def test_equal_layers_are_spread_evenly(layers: int, stages: int) -> None:
    split = balanced_layers([0.0, *[1.0] * layers, 0.0], stages)
    assert sum(split) == layers and max(split) == -(-layers // stages) and min(split) >= 1
    assert split[-1] == min(split), "the smaller stages come last"


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    assert balanced_layers([0.0, *[1.0] * 8, 2.0], 2) == (5, 3)
    assert balanced_layers([3.0, *[1.0] * 8, 0.0], 2)[0] < 4
    assert balanced_layers([0.0, *[1.0] * 4, 100.0], 4) == (1, 1, 1, 1)


def test_gpt2_with_its_vocabulary() -> None:
    """The head of GPT-2 small costs as much as four layers; the others share what is left evenly."""
    model = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257, seq_length=1024)
    costs = unit_costs(model)
    split = balanced_layers(costs, 4)
    # (5, 5, 1, 1) has the same costliest stage, and a fifth layer's activations where most are in flight.
    assert split == (4, 4, 3, 1)
    assert costliest(costs, split) < costliest(costs, (3, 3, 3, 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(COSTS, min_size=1, max_size=8), COSTS, COSTS, st.data())
def test_among_equals_the_most_even(layers: list[float], embedding: float, head: float, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(layers)))
    costs = [embedding, *layers, head]
    best = brute_force(costs, stages)
    squares = [
        sum(c * c for c in stage_costs(costs, split))
        for split in all_splits(len(layers), stages) if costliest(costs, split) == best
    ]
    assert sum(c * c for c in stage_costs(costs, balanced_layers(costs, stages))) == min(squares)


def test_unit_costs_by_hand() -> None:
    """Multiply-adds count two: 24 h² + 4 s h per layer for GPT; grouped queries; swiglu's third matrix."""
    h, s, v = 32, 16, 53
    gpt = ModelConfig(num_layers=3, hidden_size=h, num_attention_heads=4, vocab_size=v, seq_length=s)
    assert unit_costs(gpt) == [0.0, *[24.0 * h * h + 4 * s * h] * 3, 2.0 * h * v]
    llama = ModelConfig(
        num_layers=1, hidden_size=h, num_attention_heads=4, num_query_groups=2, vocab_size=v, seq_length=s,
        activation="swiglu", ffn_hidden_size=40,
    )
    assert unit_costs(llama)[1] == 2 * h * (8 * (4 + 4) + 32) + 4 * s * h + 6 * h * 40


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(ConfigError, match="num_layers 2 is less than pipeline_parallel_size 3.*2 or fewer"):
        balanced_layers([0.0, 1.0, 1.0, 0.0], 3)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 24), st.integers(1, 6), st.integers(0, 14), st.data())
def test_equal_layers_are_split_as_any_layers_are(count: int, layer: int, head: int, data: st.DataObject) -> None:
    """The short way for layers of one cost gives what the search over all splits gives, ties included."""
    costs = [0.0, *[float(layer)] * count, float(head)]
    stages = data.draw(st.integers(1, count))
    assert balanced_layers(costs, stages) == search_split(costs, stages)

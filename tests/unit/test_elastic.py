"""The layout for another number of ranks: the rule, and that what it gives is always legal."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_port.core.config.checks import problems
from megatron_port.core.config.layout import divisors, layout_problems, legal_tensor_sizes, topology_sizes, with_values
from megatron_port.core.config.schema import (
    BatchConfig,
    ClusterConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    MoEConfig,
    RunConfig,
)
from megatron_port.core.errors import ConfigError
from megatron_port.run.elastic import elastic_layout


def run(
    *, tp: int = 1, pp: int = 1, dp: int = 0, micro: int = 1, batch: int = 64, layers: int = 24, heads: int = 16,
    nodes: int = 0, gpus: int = 8, split: tuple[int, ...] = (), sequence_parallel: bool = False, cp: int = 1,
) -> RunConfig:
    return RunConfig(
        model=ModelConfig(num_layers=layers, hidden_size=heads * 8, num_attention_heads=heads),
        layout=LayoutConfig(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=dp, pipeline_split=split,
            elastic=True, sequence_parallel=sequence_parallel, context_parallel_size=cp,
        ),
        batch=BatchConfig(micro_batch_size=micro, global_batch_size=batch),
        cluster=ClusterConfig(nodes=nodes, gpus_per_node=gpus), data=DataConfig(synthetic=True),
    )


def sizes(config: RunConfig, world: int) -> tuple[int, int, int, int]:
    found = elastic_layout(config, world).config
    return (*topology_sizes(found, world), found.batch.micro_batch_size)


@pytest.mark.parametrize(
    ("asked", "world", "expected"),
    [
        # tp and pp are kept, replicas follow
        ({"tp": 2, "pp": 2, "dp": 4}, 8, (2, 2, 2, 1)),
        ({"tp": 2, "pp": 2, "dp": 4}, 32, (2, 2, 8, 1)),
        ({"tp": 8, "pp": 4, "nodes": 8}, 32, (8, 4, 1, 1)),
        # the replicas would not divide the batch (12 x 1 into 64): pp 3 leaves 8
        ({"tp": 1, "pp": 2, "dp": 8}, 24, (1, 3, 8, 1)),
        # tp x pp does not divide the ranks: pp goes first; as near above as below, the larger wins
        ({"tp": 2, "pp": 4, "dp": 2}, 12, (2, 3, 2, 1)),
        ({"tp": 2, "pp": 8, "dp": 2}, 8, (2, 4, 1, 1)),
        # tp has to give way: 3 ranks
        ({"tp": 2, "pp": 1, "dp": 2}, 3, (1, 3, 1, 1)),
        ({"tp": 4, "pp": 1, "dp": 1}, 2, (2, 1, 1, 1)),
        # the micro-batch only when no split helps: one layer, one head, so dp 8 x micro 4 must divide 16
        ({"layers": 1, "heads": 1, "micro": 4, "batch": 16, "dp": 4}, 8, (1, 1, 8, 2)),
    ],
)
def test_the_rule(asked: dict, world: int, expected: tuple[int, int, int, int]) -> None:
    assert sizes(run(**asked), world) == expected


@pytest.mark.parametrize(("world", "expected"), [
    (8, "tp 1 x pp 2 x cp 4 x dp 1"), (4, "tp 1 x pp 1 x cp 4 x dp 1"), (6, "tp 1 x pp 3 x cp 2 x dp 1"),
    (5, "tp 1 x pp 5 x dp 1"),
])
def test_the_context_parallel_size_gives_way_last(world: int, expected: str) -> None:
    found = elastic_layout(run(cp=4, pp=2, dp=2, layers=30), world)
    assert f"asks for tp 1 x pp 2 x cp 4 x dp 2; continuing with {expected};" in found.line
    assert not layout_problems(found.config, world)


def test_the_expert_parallel_size_shrinks_with_the_ranks() -> None:
    base = run(cp=2, pp=1, dp=4)
    model = dataclasses.replace(base.model, moe=MoEConfig(num_experts=12))
    config = dataclasses.replace(base, model=model, layout=dataclasses.replace(base.layout, expert_parallel_size=4))
    assert elastic_layout(config, 8).line == ""
    line = elastic_layout(config, 2).line
    assert "cp 2 x dp 4 (ep 4); continuing with tp 1 x pp 1 x cp 2 x dp 1 (ep 2);" in line


def test_a_layout_that_fits_is_left_alone() -> None:
    config = run(tp=2, pp=2, dp=2)
    choice = elastic_layout(config, 8)
    assert choice.config is config and choice.line == ""


def test_the_line_says_what_changed() -> None:
    line = elastic_layout(run(tp=2, pp=2, dp=4, split=(11, 13)), 8).line
    assert line == (
        "elastic: 8 ranks came, and the run asks for tp 2 x pp 2 x dp 4; continuing with tp 2 x pp 2 x dp 2; "
        "global batch 64 as before"
    )
    other = elastic_layout(run(tp=2, pp=4, dp=2, split=(5, 6, 6, 7)), 12)
    assert "tp 2 x pp 3 x dp 2, layers balanced over the stages" in other.line
    assert other.config.layout.pipeline_split == ()
    assert "micro-batch 2 instead of 4" in elastic_layout(
        run(layers=1, heads=1, micro=4, batch=16, dp=4), 8).line


def test_no_layout_at_all() -> None:
    with pytest.raises(ConfigError, match=r"layout\.elastic: no legal layout for 7 ranks.*num_layers 2.*start another"):
        elastic_layout(run(layers=2, heads=4, batch=8), 7)
    with pytest.raises(ConfigError, match="no legal layout for 0 ranks"):
        elastic_layout(run(), 0)


@settings(max_examples=150, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.integers(1, 8), dp=st.integers(1, 6), micro=st.sampled_from([1, 2, 4]),
    steps=st.integers(1, 6), world=st.integers(1, 64), gpus=st.sampled_from([1, 4, 8]), sp=st.booleans(),
)
def test_what_it_gives_is_legal_and_the_same_run(
    tp: int, pp: int, dp: int, micro: int, steps: int, world: int, gpus: int, sp: bool
) -> None:
    """Legal on the ranks that came; the batch, the model and everything else as they were; tp within a node."""
    assume(tp <= gpus)
    config = run(tp=tp, pp=pp, dp=dp, micro=micro, batch=micro * dp * steps, gpus=gpus, sequence_parallel=sp)
    assert not layout_problems(config, None)
    try:
        choice = elastic_layout(config, world)
    except ConfigError:
        # Truly nothing: even with micro-batches of one sample.
        free = with_values(config, {"layout.data_parallel_size": 0, "batch.micro_batch_size": 1})
        for t in [t for t in legal_tensor_sizes(free, world) if world % t == 0]:
            for p in divisors(world // t):
                tried = with_values(free, {
                    "layout.tensor_parallel_size": t, "layout.pipeline_parallel_size": p,
                })
                assert layout_problems(tried, world), (t, p)
        return
    found = choice.config
    assert not problems(found, world_size=world) and found.model == config.model
    assert found.batch.global_batch_size == config.batch.global_batch_size
    assert math.prod(topology_sizes(found, world)) == world
    assert bool(choice.line) == bool(layout_problems(config, world))
    assert found.layout.tensor_parallel_size <= gpus or world <= gpus
    undo = with_values(found, {
        "layout.tensor_parallel_size": tp, "layout.pipeline_parallel_size": pp, "layout.data_parallel_size": dp,
        "batch.micro_batch_size": micro,
    })
    assert undo == config
    # Whoever keeps tp and pp when it can, keeps them here too.
    kept = with_values(config, {"layout.data_parallel_size": 0})
    if not layout_problems(kept, world):
        assert (found.layout.tensor_parallel_size, found.layout.pipeline_parallel_size) == (tp, pp)
        assert found.batch.micro_batch_size == micro
    # Every rank decides alike, and deciding again changes nothing.
    assert elastic_layout(found, world).config == found

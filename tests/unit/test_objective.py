"""The hook of a run's loss: how an objective is chosen, what it may not be, and how its side tensors are divided."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from megatron_port.core.config.checks import problems
from megatron_port.core.config.features import DistillationConfig
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.loader import RankView
from megatron_port.core.data.objective import Objective, WholeSamples, objective_of
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.positions import SequencePartition
from megatron_port.core.engine.loss_reduction import global_count
from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import OBJECTIVES
from megatron_port.ext.context.division import ChunkDivision
from megatron_port.ext.objectives.distilled import DistillationObjective
from megatron_port.ext.objectives.dpo import PairObjective
from megatron_port.ext.objectives.multi_token import MultiTokenObjective

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "objective"


@pytest.fixture
def weighted(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunConfig]:
    """The run of the example, whose objective is registered for this test."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr(OBJECTIVES, "_added", {})
    sys.modules.pop("distinct_tokens", None)
    yield load(EXAMPLE / "distinct_tokens.toml").config
    sys.modules.pop("distinct_tokens", None)


def config_of(*settings: str) -> RunConfig:
    return load(None, ["data.synthetic=true", *settings]).config


def test_the_settings_choose_the_objective() -> None:
    plain, further = config_of(), config_of("model.mtp_layers=2")
    assert type(objective_of(plain)) is Objective and objective_of(plain).token_loss == "cross_entropy"
    assert isinstance(objective_of(config_of("training.loss=dpo")), PairObjective)
    assert isinstance(objective_of(further), MultiTokenObjective) and objective_of(further).terms == 2
    taught = replace(plain, distillation=DistillationConfig(logits="somewhere"))
    assert isinstance(objective_of(taught), DistillationObjective) and not objective_of(taught).frozen_prefix
    online = objective_of(replace(plain, distillation=DistillationConfig(teacher="somewhere")))
    assert online.is_frozen("teacher.layers.0.norm1.weight") and not online.is_frozen("layers.0.norm1.weight")


@pytest.mark.parametrize("name", ["next_token", "multi_token", "distillation"])
def test_names_that_other_settings_choose_are_no_losses(name: str) -> None:
    (problem,) = problems(config_of("engine=native", f"training.loss={name}"))
    assert problem.startswith(f"training.loss '{name}' is unknown; use cross_entropy, dpo")
    with pytest.raises(ConfigError, match="megatron_port's own"):
        OBJECTIVES.add(name, Objective)


def test_a_plugins_conflicts_are_named(weighted: RunConfig) -> None:
    assert problems(weighted) == []
    divided = replace(weighted, layout=replace(weighted.layout, context_parallel_size=2))
    assert problems(divided) == [
        'training.loss "distinct_tokens" with layout.context_parallel_size 2, which divides a sample; use 1']
    further = replace(weighted, model=replace(weighted.model, mtp_layers=1))
    assert any('training.loss "distinct_tokens" with model.mtp_layers 1' in problem for problem in problems(further))
    other = replace(weighted, engine="deepspeed")
    assert any('training.loss "distinct_tokens" with engine "deepspeed"' in problem for problem in problems(other))


def test_what_is_no_objective_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES._added, "other", lambda config: {})
    config = config_of()
    config = replace(config, training=replace(config.training, loss="other"))
    with pytest.raises(ConfigError, match="objective 'other' is dict, which is no Objective"):
        objective_of(config)


class Marked(Objective):
    """Has a tensor of each layout."""

    side_layout = MappingProxyType({"each": "sample", "places": "position"})

    def side(self, samples: WholeSamples) -> dict[str, torch.Tensor]:
        batch, seq = samples.labels.shape
        places = torch.arange(batch * seq * 2).reshape(batch, seq, 2)
        return {"each": torch.arange(batch * 8.0).reshape(batch, 8), "places": places}


def test_side_tensors_are_divided_as_their_layout_says() -> None:
    """Between two ranks, each with chunks of its own; a stage without labels has none."""
    tokens = np.arange(2 * 9).reshape(2, 9)
    division = ChunkDivision(4, ((0, 3), (1, 2)))
    whole = torch.arange(2 * 8 * 2).reshape(2, 8, 2)
    for rank, positions in enumerate(([0, 1, 6, 7], [2, 3, 4, 5])):
        partition = SequencePartition(division=division, rank=rank)
        batch = RankView(True, True, partition, objective=Marked()).micro_batch((0, 1), tokens)
        assert torch.equal(batch.side["places"], whole[:, positions])
        assert torch.equal(batch.side["each"], torch.arange(16.0).reshape(2, 8))
    assert RankView(True, False, partition, objective=Marked()).micro_batch((0, 1), tokens).side == {}


def test_the_example_counts_samples_and_weighs_them(weighted: RunConfig) -> None:
    """The count is the samples', known to every stage without masks; with masks those with a label that counts."""
    objective, ctx = objective_of(weighted), ParallelContext.single()
    labels = torch.tensor([[1, 1, 1, 1], [1, 2, 1, 3]])
    weights = objective.side(WholeSamples((0, 1), labels, None, None))
    assert weights["weight"].tolist() == [0.25, 0.75]
    batch = MicroBatch((0, 1), tokens=labels, labels=labels)
    assert global_count([batch, batch], objective, ctx, seq_length=4) == 4.0
    masked = replace(batch, loss_mask=torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0] * 4]))
    assert global_count([batch, masked], objective, ctx, seq_length=4) == 3.0

"""What the package does with a registered loss, schedule, data source or kernel: in this process, without files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_ranks import fake_rank

from megatron_port import build_engine, build_loaders, load_config, open_session
from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import BackendConfig, RunConfig
from megatron_port.core.data.loader import build_loaders as loaders_of
from megatron_port.core.errors import ConfigError, DataError, EnvironmentFault
from megatron_port.core.layers.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.core.layers.fused import torch_swiglu
from megatron_port.core.pipeline.schedules import Action, Kind, make_schedule
from megatron_port.core.registry import LOSSES, PROVIDERS, SCHEDULES, SOURCES
from megatron_port.ext.kernels.choose import Candidate, choose_providers
from megatron_port.ext.pipeline.checks import check, peak_in_flight
from megatron_port.run.config_hash import config_hash
from megatron_port.run.device import choose_device
from megatron_port.tools.plan.case import case_of
from megatron_port.tools.plan.ledger import peak_of
from megatron_port.tools.plan.step import timeline

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def tiny() -> RunConfig:
    return load_config(EXAMPLES / "tiny.toml")


def steps(config: RunConfig, count: int = 2) -> Iterator[tuple[Any, Any]]:
    """(result of a training step, of an evaluation after it) of one process."""
    with open_session(config, quiet=True) as session:
        engine, loaders = build_engine(session), build_loaders(session)
        size = config.batch.global_batch_size
        for step in range(count):
            batch = loaders.train.step(step * size, size)
            yield engine.train_step(batch, step=step, lr=1e-3), engine.eval_step(batch)


def test_a_loss_is_trained_and_not_evaluated(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the cross-entropy is twice the loss and twice the gradient; what an evaluation reports stays."""

    def double(logits: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
        return 2 * vocab_parallel_cross_entropy(logits, labels, **more)

    monkeypatch.setitem(LOSSES._added, "double", double)
    other = replace(tiny, training=replace(tiny.training, loss="double"))
    assert config_hash(other) != config_hash(tiny)
    (plain, plain_eval), (twice, twice_eval) = next(steps(tiny)), next(steps(other))
    assert twice.loss == pytest.approx(2 * plain.loss, rel=1e-14)
    assert twice.grad_norm == pytest.approx(2 * plain.grad_norm, rel=1e-13)
    # AdamW's first update does not see the factor, but for eps.
    assert twice_eval.loss == pytest.approx(plain_eval.loss, rel=1e-4) and twice_eval.loss < 1.5 * plain.loss


def test_the_z_loss_is_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "loss")
    monkeypatch.setattr(LOSSES, "_added", {})
    from z_loss import z_loss

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 2, 9, dtype=torch.float64, generator=generator).mul_(3).requires_grad_()
    labels = torch.randint(7, (4, 2), generator=generator)
    losses = z_loss(logits, labels, offset=0, extent=7, group=None, ops=None)
    x = logits.detach()[..., :7]
    log_z, hot = x.logsumexp(-1), torch.nn.functional.one_hot(labels, 7)
    torch.testing.assert_close(losses.detach(), log_z - (x * hot).sum(-1) + 1e-4 * log_z**2, rtol=1e-13, atol=0)
    losses.sum().backward()
    want = x.softmax(-1) * (1 + 2e-4 * log_z).unsqueeze(-1) - hot
    assert logits.grad is not None and not logits.grad[..., 7:].any()  # padding
    torch.testing.assert_close(logits.grad[..., :7], want, rtol=1e-12, atol=1e-14)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's schedule, registered for this test."""
    monkeypatch.syspath_prepend(EXAMPLES / "schedule")
    monkeypatch.setattr(SCHEDULES, "_added", {})
    make_schedule.cache_clear()
    import eager as module

    monkeypatch.setitem(SCHEDULES._added, "eager-1f1b", module.eager_1f1b)


def test_the_eager_schedule_runs_ahead(eager: None) -> None:
    """Right for all sizes; twice 1F1B's warm-up; where messages take time, faster; the planner counts what it holds."""
    for stages in range(1, 6):
        for count in range(1, 14):
            schedule = make_schedule("eager-1f1b", stages, count)
            check(schedule)
            held = [peak_in_flight(plan) for plan in schedule.plans]
            assert held == [min(2 * (stages - s) - 1, count) for s in range(stages)]
    case, _ = case_of(load_config("runs/quickstart", "engine=native"), 8)
    case = replace(case, schedule="eager-1f1b", pp=4, split=(), micro_batches=9)
    assert [peak_of(case, s).in_flight for s in range(4)] == [7, 5, 3, 1]
    spans = [
        timeline(name, 4, [1.0] * 4, [2.0] * 4, transfer=0.5, hidden=True, micro_batches=16).span
        for name in ("1f1b", "eager-1f1b")
    ]
    assert spans[1] < 0.95 * spans[0], spans


def _twice(stage: int, stages: int, count: int) -> list[Action]:
    return [Action(kind, m) for m in range(count) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD)]


def _backwards_first(stage: int, stages: int, count: int) -> list[Action]:
    return [Action(kind, m) for m in range(count) for kind in (Kind.BACKWARD, Kind.FORWARD)]


def _deadlock(stage: int, stages: int, count: int) -> list[Action]:
    order = range(count) if stage else range(count - 1, -1, -1)
    return [Action(kind, m) for m in order for kind in (Kind.FORWARD, Kind.BACKWARD)]


@pytest.mark.parametrize(("plan", "says"), [
    (_twice, "B0 is not there once"), (_backwards_first, "B0 comes before its forward pass"), (_deadlock, "deadlock"),
])
def test_a_wrong_schedule_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch, plan: Any, says: str) -> None:
    monkeypatch.setattr(SCHEDULES, "_added", {"wrong": plan})
    make_schedule.cache_clear()
    with pytest.raises(ConfigError, match=rf'layout.pipeline_schedule "wrong", with 3 stages and 4 .*{says}'):
        make_schedule("wrong", 3, 4)


def test_zero_2_refuses_split_backward_passes(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def split(stage: int, stages: int, count: int) -> list[Action]:
        return [Action(kind, m) for m in range(count) for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)]

    monkeypatch.setattr(SCHEDULES, "_added", {"split": split})
    make_schedule.cache_clear()
    layout = replace(tiny.layout, pipeline_schedule="split", data_parallel_size=2, zero_stage=2)
    with fake_rank(replace(tiny, layout=replace(layout, zero_stage=1)), 0):
        pass
    with pytest.raises(ConfigError, match='zero_stage 2 with pipeline_schedule "split"'), \
            fake_rank(replace(tiny, layout=layout), 0):
        pass


@pytest.fixture
def copying(tiny: RunConfig, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run on the example's data source, registered for this test."""
    monkeypatch.syspath_prepend(EXAMPLES / "source")
    monkeypatch.setattr(SOURCES, "_added", {})
    import copying as module

    monkeypatch.setitem(SOURCES._added, "copying", module.copying)
    return replace(tiny, data=replace(tiny.data, synthetic=False, source="copying"))


def test_a_source_is_read_alike_by_any_replicas(copying: RunConfig) -> None:
    assert problems(copying) == []

    def read(dp: int) -> np.ndarray:
        rows: dict[int, np.ndarray] = {}
        for rank in range(dp):
            loader = loaders_of(copying, dp_rank=rank, dp_size=dp, need_tokens=True, need_labels=True).train
            for batch in loader.step(16, 8):
                assert batch.tokens is not None and batch.labels is not None
                both = torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1)
                rows.update(zip(batch.sample_ids, both.numpy()))
        return np.stack([rows[k] for k in range(16, 24)])

    one = read(1)
    assert np.array_equal(one, read(4)) and one.shape == (8, 17)
    assert np.array_equal(one[:, :8], one[:, 9:]) and len({tuple(row) for row in one}) == 8


def test_what_a_source_may_not_give(copying: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems(replace(copying, data=replace(copying.data, synthetic=True)))
    assert "data.source 'copying' brings its own samples" in problem

    def source_of(row: object, length: int = 9) -> object:
        class Source:
            def __len__(self) -> int:
                return length

            def sample(self, index: int) -> object:
                return row

            def draw(self, seed: int, k: int) -> object:
                return row

        return lambda config, split: Source()

    for row, says in (
        (np.zeros(16, dtype=np.int64), r"sample 0 is int64 \(16,\); it must be a numpy array, int64 \(17,\)"),
        (np.zeros(17, dtype=np.int32), r"int32 \(17,\)"), ([1] * 17, "sample 0 is list"),
        (np.full(17, 61), "has ids from 61 to 61; model.vocab_size is 61"), (np.arange(17) - 1, "has ids from -1"),
    ):
        monkeypatch.setitem(SOURCES._added, "copying", source_of(row))
        loader = loaders_of(copying, dp_rank=0, dp_size=1, need_tokens=True, need_labels=True).train
        with pytest.raises(DataError, match=f'data.source "copying", split train: .*{says}'):
            loader.step(0, 8)
    monkeypatch.setitem(SOURCES._added, "copying", source_of(None, length=0))
    with pytest.raises(DataError, match="no samples to train on"):
        loaders_of(copying, dp_rank=0, dp_size=1, need_tokens=True, need_labels=True)


def test_a_provider_serves_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's gradient is torch's, it is in the table with its note, and ``auto`` leaves it alone."""
    monkeypatch.syspath_prepend(EXAMPLES / "kernel")
    monkeypatch.setattr(PROVIDERS["activation"], "_added", {})
    import lean_swiglu as module

    monkeypatch.setattr(PROVIDERS["activation"], "_added", {"lean": module.lean})
    cpu, wide = choose_device("cpu"), torch.float64
    chosen = choose_providers(BackendConfig(activation="lean"), cpu, wide, engine="native")
    assert chosen.swiglu is module.swiglu and "activation  " in chosen.describe()
    (row,) = (row for row in chosen.table if row.op == "activation")
    assert (row.provider, row.why) == ("lean", "asked for; keeps its input alone")
    assert choose_providers(BackendConfig(), cpu, wide, engine="native").swiglu is torch_swiglu
    x = torch.randn(3, 10, dtype=wide, requires_grad=True)
    assert torch.autograd.gradcheck(module.swiglu, (x,))
    torch.testing.assert_close(module.swiglu(x), torch_swiglu(x), rtol=0, atol=0)


@pytest.mark.parametrize(("given", "error", "says"), [
    (Candidate("mine", "it needs a GPU of 2031", lambda: None), EnvironmentFault, "it needs a GPU of 2031"),
    (7, ConfigError, "provider 'mine' of norm gave a int; it must give a Candidate"),
])
def test_a_provider_that_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, given: object, error: type[Exception], says: str
) -> None:
    monkeypatch.setattr(PROVIDERS["norm"], "_added", {"mine": lambda device, dtype: given})
    with pytest.raises(error, match=says):
        choose_providers(BackendConfig(norm="mine"), choose_device("cpu"), torch.float32, engine="native")


def test_fields_that_came_later_leave_old_hashes_alone() -> None:
    """At their defaults they are not in the hash, so that a run is still the run that its checkpoints are of."""
    assert config_hash(RunConfig()) == "5fe9985213466e18"  # of the commit before there were losses and sources

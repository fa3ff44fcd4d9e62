"""Parts of the native engine that one process shows: memory that ends, products that are deferred, steps that count."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_port.core.config.schema import (
    ActivationsConfig,
    BackendConfig,
    BatchConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.dataset import SyntheticDataset
from megatron_port.core.data.loader import RankView, ReplicaShare, StepLoader
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.engine.api import EvalResult
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.errors import DataError
from megatron_port.core.layers.linear import WgradAccumulator, linear
from megatron_port.core.layers.providers import torch_providers
from megatron_port.run.build import build_engine


def make_engine(
    schedule: str = "1f1b", chunks: int = 1, *, recompute: Any = "none", **layout: Any
) -> NativeEngine:
    config = RunConfig(
        engine="native",
        model=ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=31, seq_length=8),
        layout=LayoutConfig(
            vocab_padding_multiple=1, pipeline_schedule=schedule, virtual_pipeline_size=chunks, **layout
        ),
        activations=ActivationsConfig(policy=recompute),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=3), precision=PrecisionConfig(dtype="fp64"),
        optimizer=OptimizerConfig(lr=1e-2), backend=BackendConfig(device="cpu", attention="math", own_kernels="off"),
    )
    ctx = ParallelContext.single()
    if chunks > 1:
        ctx = replace(ctx, topology=replace(ctx.topology, vp=chunks, folded=schedule == "zb-v"))
    engine = build_engine(config, ctx, torch_providers())
    assert isinstance(engine, NativeEngine)
    return engine


def batches(count: int = 3) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 31, (count, 1, 9), generator=generator)
    return [MicroBatch((i,), tokens=t[:, :-1], labels=t[:, 1:]) for i, t in enumerate(tokens)]


def test_an_engine_ends_with_its_last_reference() -> None:
    """A reference cycle through autograd's hooks would keep process groups and polling threads until a collection."""
    make_engine()  # torch's first optimizer imports things that keep frames
    gc.collect()
    gc.disable()
    try:
        engine = make_engine()
        engine.train_step(batches(), step=0, lr=1e-2)
        ends = [weakref.ref(x) for x in (engine, engine.sharded, engine.stage, next(engine.stage.parameters()))]
        del engine
        assert [end() for end in ends] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("id_", [-1, 31, 50_300])
def test_ids_outside_the_vocabulary_are_refused(id_: int) -> None:
    """Whether a loader has looked at them or not; labels that do not count may be anything."""
    engine, (first, *rest) = make_engine(), batches()
    assert first.tokens is not None and first.labels is not None
    tokens, labels = (x.index_fill(1, torch.tensor([3]), id_) for x in (first.tokens, first.labels))
    for name, wrong in (("token", replace(first, tokens=tokens)), ("label", replace(first, labels=labels))):
        text = f"{name} id {id_} is outside the vocabulary of 31; mask labels .*, set model.vocab_size, or"
        with pytest.raises(DataError, match=text):
            engine.train_step([*rest, wrong], step=0, lr=1e-2)
        with pytest.raises(DataError, match=text):
            engine.eval_step([*rest, wrong])
    replace(first, labels=labels, loss_mask=torch.ones(1, 8)).check_ids(31)


def masked(made: list[MicroBatch], counted: float = 0.0) -> list[MicroBatch]:
    return [replace(b, loss_mask=torch.full(b.labels.shape, counted)) for b in made]  # type: ignore[union-attr]


def test_a_step_whose_labels_are_all_masked_has_no_gradient() -> None:
    """Its update is AdamW's at a zero gradient, written out here: weights decay, and moments where there are any."""
    engine = make_engine()
    before = {r.name: p.detach().clone() for r, p in engine.named_parameters()}
    result = engine.train_step(masked(batches()), step=0, lr=1e-2)
    assert (result.loss, result.tokens, result.grad_norm, result.skipped) == (0.0, 0, 0.0, False)
    for record, p in engine.named_parameters():
        decayed = before[record.name] * (1 - 1e-2 * 0.1 * record.decay)
        torch.testing.assert_close(p.detach(), decayed, rtol=0, atol=1e-15)
    found = engine.eval_step(masked(batches()))
    assert (found.loss_sum, found.tokens) == (0.0, 0) and math.isnan(found.loss)
    assert engine.eval_step(masked(batches(), 1.0)).loss == pytest.approx(engine.eval_step(batches()).loss, rel=1e-14)


def test_a_step_reads_nothing_of_the_last_ones_gradients() -> None:
    """Matrices' sums are not cleared: the first gradient of a step is written over them, whatever they hold."""
    runs = []
    for poisoned in (False, True):
        engine, found = make_engine(), []
        for step in range(3):
            for bucket in engine.sharded.trained:
                assert bucket.gradients is not None
                if poisoned:
                    bucket.gradients.fill_(math.nan)
            found.append(engine.train_step(batches(), step=step, lr=1e-2))
        runs.append([(r.loss, r.grad_norm) for r in found])
    assert runs[0] == runs[1]
    cleared = sum(view.numel() for bucket in engine.sharded.trained for view in bucket.forget())
    assert cleared < 0.2 * sum(bucket.plan.numel for bucket in engine.sharded.trained)


def test_a_matrix_without_a_gradient_has_one_of_zeros() -> None:
    """What another step left in the sums of a matrix that this one does not use is not its gradient."""
    engine = make_engine()
    engine.train_step(batches(), step=0, lr=1e-2)
    record, unused = max(engine.parameters, key=lambda pair: pair[1].numel())
    (piece,) = (piece for piece in engine.sharded.pieces if piece.record is record)
    assert piece.gradient.any()
    unused.requires_grad_(False)
    engine.train_step(batches(), step=1, lr=1e-2)
    assert not piece.gradient.any()


def test_labels_that_do_not_count_have_no_gradient() -> None:
    """A prompt's labels may be anything: loss and every gradient are the same to the bit."""
    found = []
    for other in (0, 7):
        engine, drawn = make_engine(), torch.Generator().manual_seed(0)
        made = []
        for batch in batches():
            assert batch.labels is not None
            mask = (torch.rand(batch.labels.shape, generator=drawn) < 0.4).float()
            labels = torch.where(mask == 1, batch.labels, (batch.labels + other) % 31)
            made.append(replace(batch, labels=labels, loss_mask=mask))
        result = engine.train_step(made, step=0, lr=1e-2)
        found.append((result.loss, result.tokens, {r.name: p.detach().clone() for r, p in engine.named_parameters()}))
    (loss, tokens, weights), (same, counted, others) = found
    assert (loss, tokens) == (same, counted) and all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_masked_micro_batch_is_as_if_it_were_not_there() -> None:
    with_it, without = make_engine(), make_engine()
    extra = masked([replace(batches(4)[3], sample_ids=(3,))])
    a = with_it.train_step([*masked(batches(), 1.0)[:2], *extra], step=0, lr=1e-2)
    b = without.train_step(batches()[:2], step=0, lr=1e-2)
    assert a.tokens == b.tokens == 16 and a.loss == pytest.approx(b.loss, rel=1e-14)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-13)


def test_the_validation_loss_is_that_of_every_sample_once() -> None:
    """Whatever the batch, the micro-batch and the replicas: against each sample by itself, through torch's loss."""
    engine, size = make_engine(), 7
    data = SyntheticDataset(seq_length=8, vocab_size=31, seed=3, samples=size)
    total = 0.0
    engine.stage.eval()
    with torch.no_grad():
        for k in range(size):
            row = torch.from_numpy(data.sample(k).tokens)[None]
            logits = engine.stage(row[:, :-1])[:, 0]
            total += float(F.cross_entropy(logits, row[0, 1:], reduction="sum"))
    for micro, dp, whole in ((1, 1, 4), (2, 1, 4), (2, 2, 4), (1, 3, 3), (4, 3, 12)):
        found = EvalResult(0.0, 0)
        for rank in range(dp):
            loader = StepLoader(data, ReplicaShare(micro, rank, dp), seq_length=8, seed=0, view=RankView(True, True))
            for step in loader.eval_batches(100, whole):
                one = engine.eval_step(step)
                found = EvalResult(found.loss_sum + one.loss_sum, found.tokens + one.tokens)
        assert found.tokens == size * 8 and found.loss == pytest.approx(total / found.tokens, rel=1e-12)


@pytest.mark.parametrize("schedule,chunks", [("1f1b", 2), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_schedule_changes_nothing_on_one_stage(schedule: str, chunks: int, recompute: str) -> None:
    """Loss, norm and weights are those of 1F1B within fp64's rounding."""
    plain, other = make_engine(), make_engine(schedule, chunks, recompute=recompute)
    for step in range(3):
        a, b = (e.train_step(batches(), step=step, lr=1e-2) for e in (plain, other))
        assert a.loss == pytest.approx(b.loss, rel=1e-12) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-12)
    ours = {r.name: p for r, p in other.named_parameters()}
    for record, p in plain.named_parameters():
        torch.testing.assert_close(ours[record.name], p, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_zero_bubble_computes_no_weight_gradient_in_the_input_pass(recompute: str) -> None:
    """4 layers of 4 linears, the head, and the rows of the table: once each a micro-batch, all in WEIGHT passes."""
    engine = make_engine("zb-h1", recompute=recompute)
    seen: list[tuple[str, int]] = []
    real = engine.forward_backward.runner.run

    def watching(schedule, worker, shape_of):  # type: ignore[no-untyped-def]
        inner = worker.run

        def run(action, received):  # type: ignore[no-untyped-def]
            before = engine.target.accumulator.computed
            result = inner(action, received)
            seen.append((action.kind.value, engine.target.accumulator.computed - before))
            return result

        worker.run = run
        real(schedule, worker, shape_of)

    engine.forward_backward.runner.run = watching  # type: ignore[method-assign]
    engine.train_step(batches(), step=0, lr=1e-2)
    assert {n for kind, n in seen if kind in "FI"} == {0}
    assert [n for kind, n in seen if kind == "W"] == [4 * 4 + 2] * 3


def test_products_wait_while_they_are_held() -> None:
    told: list[torch.Tensor] = []
    weight, main_grad = torch.nn.Parameter(torch.randn(3, 5)), torch.zeros(3, 5)
    gradients = WgradAccumulator(told.append, lambda w: main_grad)
    weight.wgrad_accumulator = gradients  # type: ignore[attr-defined]
    x = torch.randn(4, 5, requires_grad=True)
    held = gradients.deferred = []
    linear(x, weight).sum().backward()
    assert x.grad is not None and len(held) == 1 and not told
    assert not main_grad.any()
    gradients.deferred = None
    gradients.flush(held)
    torch.testing.assert_close(main_grad, torch.ones(4, 3).t() @ x.detach())
    assert told == [weight] and not held and gradients.computed == 1

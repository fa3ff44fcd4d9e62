"""A model that learns from a teacher, on every kind of layout: in fp64 the run of one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from distilled import DistilledDraw, distilled, draw
from fuzz import failures, run_draws
from pool import RankPool

from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.ext.objectives.distillation import Objective, vocab_parallel_distillation
from megatron_port.ext.objectives.distilled import vocab_parallel_top


def adapted(draw: DistilledDraw) -> DistilledDraw:
    """The run with adapters beside frozen weights, and a teacher beside both."""
    tuning = FineTuningConfig(method="lora", rank=3, alpha=8.0)
    return dataclasses.replace(draw, config=dataclasses.replace(draw.config, fine_tuning=tuning))


def draws(ranks: int) -> list[DistilledDraw]:
    """Pairs of what may interact; the whole matrix is a record (benchmarks/evidence/compression.md)."""
    if ranks == 2:
        return [
            distilled(0, "gpt from llama", Topology(tp=2), sequence_parallel=True, vocab_padding_multiple=8,
                      recompute="full", data={"attention_documents": "within"}),
            distilled(1, "llama from tied gpt", Topology(dp=2), zero_stage=3, objective=(0.0, 3.0, "reverse")),
            distilled(2, "llama from experts", Topology(pp=2), pipeline_schedule="zb-v", virtual_pipeline_size=2),
        ]
    return [
        distilled(3, "experts from llama", Topology(tp=2, dp=2, ep=2), zero_stage=2, objective=(0.5, 0.7, "reverse")),
        distilled(4, "llama from tied gpt", Topology(tp=2, cp=2), zero_stage=3, reshard="step",
                  data={"attention_documents": "within"}),
        adapted(distilled(6, "llama from tied gpt", Topology(pp=2, dp=2), zero_stage=3, mask=True,
                          virtual_pipeline_size=2)),
    ]


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_layout_changes_nothing(ranks: RankPool, count: int) -> None:
    assert not failures(run_draws(ranks, draws(count)))


@pytest.mark.slow
def test_random_combinations(ranks: RankPool) -> None:
    assert not failures(run_draws(ranks, [draw(seed) for seed in range(24)]))


def halves() -> dict[str, torch.Tensor]:
    """Kept tokens, losses and gradients from this rank's half of the logits, some of which are equal."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    g = torch.Generator().manual_seed(1)
    s, t = (torch.randint(-5, 5, (7, 3, 22), generator=g).double() for _ in range(2))
    labels = torch.randint(0, 21, (7, 3), generator=g)
    columns, extent = slice(11 * rank, 11 * rank + 11), 11 - rank  # the last column is padding
    objective, out = Objective(0.2, 2.0, reverse=True), dict[str, torch.Tensor]()
    for k in (4, 15):
        top = vocab_parallel_top(t[..., columns], k, 2.0, offset=11 * rank, extent=extent, group=group)
        x = s[..., columns].clone().requires_grad_()
        loss, *_ = vocab_parallel_distillation(
            x * 1.0, labels, top, objective, offset=11 * rank, extent=extent, group=group)
        loss.sum().backward()
        assert x.grad is not None
        out |= {f"ids {k}": top.ids, f"p {k}": top.log_probabilities, f"tail {k}": top.log_tail,
                f"loss {k}": loss.detach()}
        whole = vocab_parallel_top(t, k, 2.0, offset=0, extent=21, group=None)
        y = s.clone().requires_grad_()
        wanted, *_ = vocab_parallel_distillation(y * 1.0, labels, whole, objective, offset=0, extent=21, group=None)
        wanted.sum().backward()
        assert y.grad is not None and torch.equal(top.ids, whole.ids)
        for a, b in ((top.log_probabilities, whole.log_probabilities), (top.log_tail, whole.log_tail), (loss, wanted),
                     (x.grad, y.grad[..., columns])):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    return out


def test_kept_tokens_do_not_depend_on_how_the_vocabulary_is_split(ranks: RankPool) -> None:
    first, second = ranks.run(2, halves)
    assert all(torch.equal(first[name], second[name]) for name in first)

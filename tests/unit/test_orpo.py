"""The odds-ratio loss of pairs: its formula over whole distributions, and its gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_policy_loss import stage_of

from megatron_port.core.config.checks import problems
from megatron_port.core.config.loader import load
from megatron_port.core.layers.step import AuxiliarySums
from megatron_port.ext.objectives.orpo import OddsRatioObjective

VOCAB, SEQ = 11, 12


@pytest.mark.parametrize("weight", [0.1, 0.7])
def test_loss_and_gradient_are_the_papers(weight: float) -> None:
    config = load(None, ['training.loss="orpo"', f"orpo.weight={weight}", "data.train=[\"c\"]",
                         'data.attention_documents="within"', "data.position_reset=true"]).config
    assert not problems(config)
    draw = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(4, SEQ, VOCAB, dtype=torch.float64, generator=draw)
    labels = torch.randint(0, VOCAB, (4, SEQ), generator=draw)
    starts, mask = torch.zeros(4, SEQ, dtype=torch.int32), (torch.rand(4, SEQ, generator=draw) < 0.7).float()
    for row, edge in enumerate((4, 6, 7, 5)):
        starts[row, edge:] = edge
    mask[3] = 0  # fills up a batch
    theirs = logits.clone().requires_grad_()
    terms, ratios = [], []
    for row, edge in enumerate((4, 6, 7)):
        means = []
        for places in (range(edge), range(edge, SEQ)):
            tokens = [theirs[row, t].log_softmax(0)[labels[row, t]] for t in places if mask[row, t]]
            means.append(torch.stack(tokens).mean())
        odds = [p.exp() / (1 - p.exp()) for p in means]
        ratios.append((odds[0] / odds[1]).log())
        terms.append(-means[0] - weight * torch.sigmoid(ratios[-1]).log())
    expected = torch.stack(terms).mean()
    expected.backward()
    objective = OddsRatioObjective(config)
    sums = AuxiliarySums(objective.sums, torch.device("cpu"))
    context = SimpleNamespace(document_starts=starts, add_auxiliary=sums.add)
    ours = logits.clone().transpose(0, 1).contiguous().requires_grad_()
    found = objective.loss(stage_of(), ours.clone(), labels, mask, context) / 3  # type: ignore[arg-type]
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad.transpose(0, 1), theirs.grad, rtol=1e-11, atol=1e-13)
    told = objective.metrics(dict(zip(sums.names, sums.values.tolist(), strict=True)), 3)
    assert told["log_odds_ratio"] == pytest.approx(torch.stack(ratios).mean().item())


def test_settings_without_their_loss_are_refused() -> None:
    found = problems(load(None, ["orpo.weight=0.5", "data.synthetic=true"]).config)
    assert any("[orpo] with training.loss" in text for text in found)
    found = problems(load(None, ['training.loss="orpo"', "data.synthetic=true"]).config)
    assert any('training.loss "orpo" with data.synthetic' in text for text in found)

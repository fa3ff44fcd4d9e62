"""What the package does with a registered loss, schedule, data source or kernel: in this process, without files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_port import build_engine, build_loaders, load_config, open_session
from megatron_port.config.dump import config_hash
from megatron_port.config.schema import RunConfig
from megatron_port.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.registry import LOSSES

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

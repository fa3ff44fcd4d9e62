"""z-loss in the loss over a divided vocabulary: against autograd over all logits, and what it is not part of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_port.core.config.schema import BatchConfig, ModelConfig, PrecisionConfig, RunConfig, TrainingConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.layers.cross_entropy import (
    CrossEntropyOps,
    torch_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megatron_port.core.layers.providers import torch_providers
from megatron_port.ext.kernels.kernels import load as load_kernels
from megatron_port.ext.kernels.ops.softmax import own_cross_entropy
from megatron_port.run.build import build_engine

Z = 0.03
MODEL = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=19, seq_length=8, init_std=0.3)


def wanted(logits: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [rows] and the gradient of their weighted sum, in fp64."""
    x = logits.double().requires_grad_()
    losses = F.cross_entropy(x, labels, reduction="none") + Z * torch.logsumexp(x, -1) ** 2
    (gradient,) = torch.autograd.grad((losses * weight).sum(), x)
    return losses.detach(), gradient


@pytest.mark.parametrize(
    ("provider", "dtype", "bound"),
    [("torch", torch.float64, 1e-12), ("torch", torch.float32, 2e-6), ("own", torch.float32, 2e-6),
     ("own", torch.bfloat16, 4e-3)],
)
@pytest.mark.parametrize("shift", [0.0, -40.0, 25.0])
def test_value_and_gradient_are_autograds(provider: str, dtype: torch.dtype, bound: float, shift: float) -> None:
    """``shift``: log Z is negative and its factor with it, or large."""
    ops: CrossEntropyOps = torch_cross_entropy
    if provider == "own":
        load_kernels("cpu")
        ops = own_cross_entropy
    torch.manual_seed(3)
    logits = (torch.randn(6, 4, 37, dtype=torch.float64) * 2 + shift).to(dtype)
    labels, weight = torch.randint(0, 33, (6, 4)), torch.rand(6, 4, dtype=torch.float64)
    losses, gradient = wanted(logits[..., :33].reshape(-1, 33), labels.reshape(-1), weight.reshape(-1))
    x = logits.clone().requires_grad_()
    found = vocab_parallel_cross_entropy(x, labels, offset=0, extent=33, group=None, ops=ops, z_loss=Z)
    (found * weight.to(found.dtype)).sum().backward()
    assert x.grad is not None
    assert (found.reshape(-1).double() - losses).abs().max() <= bound * losses.abs().max()
    own = x.grad[..., :33].reshape(-1, 33).double()
    assert (own - gradient).abs().max() <= bound * gradient.abs().max()
    assert not x.grad[..., 33:].any()


def test_evaluations_report_the_cross_entropy() -> None:
    config = RunConfig(
        engine="native", model=MODEL, batch=BatchConfig(global_batch_size=2), precision=PrecisionConfig(dtype="fp64"),
        training=TrainingConfig(z_loss=Z),
    )
    both = torch.from_numpy((np.arange(18).reshape(2, 9) * 5) % 19)
    batch = MicroBatch((0, 1), tokens=both[:, :-1], labels=both[:, 1:])
    found = {}
    for name, run in (("with", config), ("without", replace(config, training=TrainingConfig()))):
        engine = build_engine(run, ParallelContext.single(), torch_providers())
        found[name] = engine.eval_step([batch]).loss, engine.train_step([batch], step=0, lr=0.0).loss
    assert found["with"][0] == found["without"][0] == found["without"][1]
    assert found["with"][1] > found["without"][1] + Z  # log Z is near ln 19

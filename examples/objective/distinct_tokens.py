"""An objective from outside the package: samples that repeat themselves weigh less.

    loss = mean over samples of  weight * mean of the sample's token losses,
    weight = distinct labels of the sample / its labels

So a sample has one number beside its tokens, which the loader computes, and the step's mean divides by samples, not by
tokens. Both are stated here; loader, pipeline, engine and checkpoints hand them on.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

from megatron_port.core.config.conflicts import Conflict
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.objective import Objective, WholeSamples
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.registry import OBJECTIVES


class DistinctTokens(Objective):
    """Mean over samples of their weighted losses; see the module."""

    side_layout = MappingProxyType({"weight": "sample"})
    conflicts = (
        Conflict("layout.context_parallel_size", "which divides a sample", "use 1",
                 when=lambda c: c.layout.context_parallel_size > 1),
    )

    def side(self, samples: WholeSamples) -> dict[str, torch.Tensor]:
        """Return the weights, float64 [batch]."""
        shares = [len(labels.unique()) / len(labels) for labels in samples.labels]
        return {"weight": torch.tensor(shares, dtype=torch.float64)}

    def known_count(self, batch: MicroBatch, seq_length: int) -> float | None:
        """Return the number of samples, unless masks may leave some out."""
        return None if batch.masked else float(len(batch.sample_ids))

    def count(self, batch: MicroBatch, positions: float) -> torch.Tensor | float:
        """Return the number of samples with a label that counts."""
        return len(batch.sample_ids) if batch.loss_mask is None else batch.loss_mask.any(dim=1).sum().double()

    def loss(
        self, stage: GPTStage, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None,
        context: StepContext | None,
    ) -> torch.Tensor:
        """Return the sum of the samples' weighted losses."""
        assert stage.head is not None and context is not None
        losses = stage.head.token_losses(logits, labels).double()
        counted = torch.ones_like(losses) if mask is None else mask
        means = (losses * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
        return (context.side["weight"] * means).sum()


OBJECTIVES.add("distinct_tokens", DistinctTokens)

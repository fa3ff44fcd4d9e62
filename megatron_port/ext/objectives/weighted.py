"""Cross-entropy of weighted tokens: the sum of weight times loss over the sum of weights, both of the global batch.

A sum of weights below 1 counts as 1, as a step without any token does.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import torch

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.objective import Objective, WholeSamples
from megatron_port.core.errors import DataError
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.decoder import GPTStage

WEIGHTS = "weights"
"""Side tensor, float64 [batch, seq]: the weight of each label, 0 or more."""


class WeightedObjective(Objective):
    """The weighted mean; samples have ``side["weights"]``, float [tokens - 1], of which masks take nothing away."""

    side_layout = MappingProxyType({WEIGHTS: "position"})

    def side(self, samples: WholeSamples) -> dict[str, torch.Tensor]:
        """Return the weights, 0 where a label does not count.

        Raises:
            DataError: a sample that counts has none, or one that is below 0 or not finite.
        """
        rows = []
        for number, row in zip(samples.ids, samples.rows, strict=bool(samples.rows)):
            found = row.side.get(WEIGHTS)
            if found is None and (row.counted is None or row.counted.any()):
                raise DataError(f"sample {number} has no weights, by which this loss is a mean; set Sample.side")
            weights = np.zeros(samples.labels.shape[1]) if found is None else np.asarray(found, dtype=np.float64)
            if not (np.isfinite(weights) & (weights >= 0)).all():
                raise DataError(f"sample {number} has a weight of {weights.min()}; weights are finite, 0 or more")
            rows.append(weights if row.counted is None else np.where(row.counted, weights, 0.0))
        return {WEIGHTS: torch.from_numpy(np.stack(rows))} if rows else {}

    def known_count(self, batch: MicroBatch, seq_length: int) -> float | None:
        """Return None: only the last stage knows the weights."""
        return None

    def count(self, batch: MicroBatch, positions: float) -> torch.Tensor | float:
        """Return the sum of the weights."""
        return batch.side[WEIGHTS].sum()

    def loss(
        self, stage: GPTStage, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None,
        context: StepContext | None,
    ) -> torch.Tensor:
        """Return the weighted sum of the token losses.

        Raises:
            ValueError: the micro-batch has no weights.
        """
        assert stage.head is not None
        if context is None or WEIGHTS not in context.side:
            raise ValueError(f"a weighted mean needs micro-batches with the side tensor {WEIGHTS!r}")
        losses = stage.head.token_losses(logits, labels, z_loss=stage.head.z_loss)
        return (losses.double() * context.side[WEIGHTS]).sum()

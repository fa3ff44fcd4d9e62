"""Loss of a micro-batch on the last stage: what the model asks of a run's objective (``data.objective``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_port.core.layers.step import StepContext

if TYPE_CHECKING:
    from megatron_port.core.model.decoder import GPTStage


class StageLoss:
    """Sum of the token losses that the head computes. Subclasses make another sum of the logits."""

    sums: tuple[str, ...] = ()
    """Names of the sums that :meth:`loss` adds to (``StepContext.add_auxiliary``), the same on every stage."""

    def loss(
        self, stage: GPTStage, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None,
        context: StepContext | None,
    ) -> torch.Tensor:
        """Return the sum of a micro-batch's losses: a scalar, whose mean over the step's count is minimised.

        Args:
            stage: the last stage, which has the head.
            logits: [seq, batch, padded_vocab/tp]. The gradient may be written over them.
            labels: int64 [batch, seq].
            mask: float32 [batch, seq], 1 where a label counts; None: everywhere.
            context: of the micro-batch, with its side tensors; None: nobody has announced it.
        """
        assert stage.head is not None
        losses = stage.head.token_losses(logits, labels, z_loss=stage.head.z_loss)
        return losses.sum() if mask is None else (losses * mask).sum()



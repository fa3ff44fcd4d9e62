"""Direct preference optimization (Rafailov et al., arXiv 2305.18290): the loss of pairs of answers.

A sample holds the chosen conversation and, as its next document, the rejected one. The reward of an answer is beta
times its log-probability less that by the frozen reference; a pair's loss is -log sigmoid(reward of the chosen - reward
of the rejected). The sums over tokens are made in float64: what is left of them is a small difference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from megatron_port.parallel.step import StepContext

REWARDS = ("chosen_reward", "reward_margin", "reward_accuracy")
"""Names of the sums of a step over its pairs."""


def pair_loss_sum(
    losses: torch.Tensor, mask: torch.Tensor | None, context: StepContext | None, beta: float
) -> torch.Tensor:
    """Return the sum of the losses of a micro-batch's pairs, a float64 scalar, and add to the sums of :data:`REWARDS`.

    Args:
        losses: of each token [batch, seq], minus the log-probability of its label.
        mask: 1 where a label is of an answer; a sample without any is no pair.
        context: says where the rejected conversation starts, and what the reference gives.

    Raises:
        ValueError: the samples are no pairs.
    """
    starts, reference = (None, None) if context is None else (context.document_starts, context.reference)
    if mask is None or context is None or starts is None or reference is None:
        raise ValueError("a loss of pairs needs micro-batches with loss_mask, document_starts and reference")
    found = -losses.double() * mask
    chosen, rejected = ((found * part).sum(dim=1) for part in (starts == 0, starts > 0))
    chosen, rejected = beta * (chosen - reference[:, 0]), beta * (rejected - reference[:, 1])
    margin, pair = chosen - rejected, mask.any(dim=1).double()
    for name, value in zip(REWARDS, (chosen, margin, (margin > 0).double())):
        context.add_auxiliary(name, (value.detach() * pair).sum())
    return (F.softplus(-margin) * pair).sum()


def reward_means(auxiliary: Mapping[str, float], pairs: int) -> dict[str, float]:
    """Return the means over a step's pairs by their names in metrics.jsonl; nothing where the loss is of tokens."""
    return {name: auxiliary[name] / pairs for name in REWARDS if name in auxiliary and pairs}

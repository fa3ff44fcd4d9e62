"""Odds-ratio preference optimization (Hong et al., arXiv 2403.07691): a loss of pairs without a reference.

A pair's loss is the mean cross-entropy of the chosen answer's tokens, plus ``orpo.weight`` times -log sigmoid of the
log of the ratio of both answers' odds. An answer's odds are P / (1 - P), where log P is the mean over its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.ext.objectives.dpo import AnswerPairs
from megatron_port.ext.objectives.policy_settings import OrpoConfig

SUMS = ("log_odds_ratio", "reward_accuracy")
"""Names of the sums of a step over its pairs, and of their means in metrics.jsonl."""


class OddsRatioObjective(AnswerPairs):
    """The mean over pairs; see the module."""

    sums = SUMS

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.weight = getattr(config, "orpo", OrpoConfig()).weight

    def loss(
        self, stage: GPTStage, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None,
        context: StepContext | None,
    ) -> torch.Tensor:
        """Return the sum of the pairs' losses, in evaluations too.

        Raises:
            ValueError: the samples are no pairs.
        """
        assert stage.head is not None
        starts = None if context is None else context.document_starts
        if mask is None or context is None or starts is None:
            raise ValueError("a loss of pairs needs micro-batches with loss_mask and document_starts")
        found = -stage.head.token_losses(logits, labels).double() * mask
        chosen, rejected = (
            (found * part).sum(dim=1) / (mask * part).sum(dim=1).clamp(min=1) for part in (starts == 0, starts > 0)
        )
        pair = mask.any(dim=1)
        odds = _log_odds(chosen, pair) - _log_odds(rejected, pair)
        for name, value in zip(SUMS, (odds, (odds > 0).double()), strict=True):
            context.add_auxiliary(name, (value.detach() * pair).sum())
        return ((F.softplus(-odds) * self.weight - chosen) * pair).sum()

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float | None]:
        """Return the means over a step's pairs."""
        return {name: sums[name] / count for name in SUMS} if count else {}


def _log_odds(mean: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """Return log P - log (1 - P) for log P; of what is no pair something finite."""
    mean = torch.where(pair, mean, -1.0)
    return mean - (-torch.expm1(mean)).log()

"""Policy-gradient losses of sampled answers: PPO's clipped ratios, GRPO and what came after it.

With ratio r = exp(policy - old), both the log-probability of the token that was sampled, and its answer's advantage A:

    ppo, grpo, dr_grpo, dapo    -min(r A, clip(r) A)
    gspo                        the same with one ratio for an answer, exp(mean of its tokens' policy - old)
    cispo                       -clip(r) A policy, where clip(r) has no gradient

plus ``kl`` (exp(d) - d - 1), d = reference - policy, less ``entropy`` H. These are means: over an answer's tokens and
then over answers (grpo, gspo), over all tokens (ppo, dapo, cispo), or over answers of sums that are divided by one
constant (dr_grpo). All are over the global batch: each label brings its share of its answer, so no layout and no
micro-batch enters. Logarithms and sums are in float64, as differences of log-probabilities are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.objective import Objective, WholeSamples
from megatron_port.core.errors import DataError
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.ext.objectives.policy_settings import PolicyConfig, policy_of
from megatron_port.ext.objectives.rollout_source import ADVANTAGES, OLD, REFERENCE, REWARD, SAMPLED, SHARE
from megatron_port.ext.objectives.sequences import sample_sums, token_entropies

SUMS = ("policy_answers", "policy_tokens", "policy_reward", "policy_clipped", "policy_ratio", "policy_kl",
        "policy_reference_kl", "policy_entropy")
"""Sums of a step: answers, sampled tokens, rewards; the others over tokens."""


@dataclass(frozen=True)
class Method:
    """How a method makes a mean of tokens' losses."""

    mean: str
    """"answers" (of each answer's mean), "tokens", or "constant" (answers' sums over one length)"""
    whole_answers: bool = False
    """One ratio for an answer"""
    weighed: bool = False
    """The ratio weighs the log-probability, and has no gradient"""


METHODS = {
    "ppo": Method("tokens"), "grpo": Method("answers"), "dr_grpo": Method("constant"), "dapo": Method("tokens"),
    "gspo": Method("answers", whole_answers=True), "cispo": Method("tokens", weighed=True),
}


class PolicyObjective(Objective):
    """The mean of a policy's losses over sampled tokens; see the module.

    ``settings``: in place of those of the run.
    """

    sums = SUMS
    side_layout = MappingProxyType(
        dict.fromkeys((SHARE, ADVANTAGES, SAMPLED, OLD, REFERENCE, REWARD), "position"))

    def __init__(self, config: RunConfig, settings: PolicyConfig | None = None) -> None:
        super().__init__(config)
        self.settings = settings or policy_of(config)
        self.method = METHODS[self.settings.method]
        self.longest = self.settings.longest_answer or config.model.seq_length

    def side(self, samples: WholeSamples) -> dict[str, torch.Tensor]:
        """Return what the rollouts have beside their tokens, zeros for samples that fill up a batch.

        Raises:
            DataError: a sample that counts lacks what the loss reads.
        """
        needed = [SHARE, ADVANTAGES, SAMPLED, OLD, REWARD, *([REFERENCE] if self.settings.kl else [])]
        found = {}
        for name in needed if samples.rows else ():
            rows = []
            for number, row in zip(samples.ids, samples.rows, strict=True):
                if name not in row.side and (row.counted is None or row.counted.any()):
                    raise DataError(f"sample {number} has no {name}, which the loss of a policy reads; make samples by "
                                    "rollout_source.labels_of")
                rows.append(row.side.get(name, np.zeros(samples.labels.shape[1])))
            found[name] = torch.from_numpy(np.stack(rows))
        return found

    def known_count(self, batch: MicroBatch, seq_length: int) -> float | None:
        """Return None: only the last stage knows which tokens were sampled."""
        return None

    def count(self, batch: MicroBatch, positions: float) -> torch.Tensor | float:
        """Return the tokens that were sampled, or the answers: those of which all ranks' shares make up 1."""
        share = _wanted(batch.side, SHARE)
        return (share > 0).sum().double() if self.method.mean == "tokens" else share.double().sum()

    def loss(
        self, stage: GPTStage, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None,
        context: StepContext | None,
    ) -> torch.Tensor:
        """Return the sum of the losses of a micro-batch's tokens, by the weights of their method's mean."""
        assert stage.head is not None and context is not None
        head, side, settings = stage.head, context.side, self.settings
        entropy = torch.zeros((), dtype=torch.float64, device=labels.device)
        if settings.entropy:
            extent = head.weight.record.extent[0]  # type: ignore[attr-defined]
            entropy = token_entropies(logits, extent=extent, group=head.group).t().double()
        share, advantage = _wanted(side, SHARE).double(), _wanted(side, ADVANTAGES).double()
        on = share > 0
        # Elsewhere a label may be anything, whose exponential and gradient may not be finite.
        policy = -head.token_losses(logits, labels).double().masked_fill(~on, 0)
        sampled = _wanted(side, SAMPLED).double()
        old = policy.detach() if settings.old == "current" else _wanted(side, OLD).double()
        found = self._clipped(policy, old, advantage, share, on, stage, context)
        if settings.correction:
            found = found * (old - sampled).exp().clamp(max=settings.correction)
        if settings.kl:
            apart = _wanted(side, REFERENCE).double() - policy
            divergence = apart.exp() - apart - 1
            found = found + settings.kl * divergence
            context.add_auxiliary("policy_reference_kl", divergence.sum())
        if settings.entropy:
            found = found - settings.entropy * entropy
            context.add_auxiliary("policy_entropy", entropy.masked_fill(~on, 0).sum())
        for name, value in (("policy_answers", share), ("policy_tokens", on.double()),
                            ("policy_reward", _wanted(side, REWARD) * share),
                            ("policy_kl", (old - policy.detach()).exp() - (old - policy.detach()) - 1)):
            context.add_auxiliary(name, value.masked_fill(~on, 0).sum())
        weight = {"tokens": on.double(), "answers": share, "constant": on.double() / self.longest}[self.method.mean]
        return (found.masked_fill(~on, 0) * weight).sum()

    def _clipped(
        self, policy: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, share: torch.Tensor, on: torch.Tensor,
        stage: GPTStage, context: StepContext,
    ) -> torch.Tensor:
        """Return the losses of tokens [batch, seq] by their clipped ratios."""
        apart = policy - old
        if self.method.whole_answers:  # a sample has one
            mean = sample_sums(apart * share, stage.context_group)
            apart = mean.unsqueeze(1).expand_as(policy)
        ratio = apart.masked_fill(~on, 0).exp()  # an answer's ratio is at all of its positions
        low, high = 1 - self.settings.clip_low, 1 + self.settings.clip_high
        bounded = ratio.clamp(low, high)
        clipped = torch.where(advantage > 0, ratio > high, ratio < low) & (advantage != 0) & on
        context.add_auxiliary("policy_clipped", clipped.double().sum())
        context.add_auxiliary("policy_ratio", ratio.detach().masked_fill(~on, 0).sum())
        if self.method.weighed:
            return -ratio.detach().clamp(low, high) * advantage * policy
        return -torch.minimum(ratio * advantage, bounded * advantage)

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float | None]:
        """Return the means over a step's answers and tokens."""
        answers, tokens = sums["policy_answers"], sums["policy_tokens"]
        if not tokens:
            return {}
        found: dict[str, float | None] = {"reward": sums["policy_reward"] / answers}
        names = ["policy_clipped", "policy_ratio", "policy_kl", *(["policy_reference_kl"] if self.settings.kl else []),
                 *(["policy_entropy"] if self.settings.entropy else [])]
        return {**found, "answer_tokens": tokens / answers, **{name: sums[name] / tokens for name in names}}


def _wanted(side: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a side tensor. Raises ValueError: the micro-batch has none."""
    if name not in side:
        raise ValueError(f"a policy's loss needs micro-batches with the side tensor {name!r}")
    return side[name]

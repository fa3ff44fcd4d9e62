"""Settings of learning from answers: policies (``[policy]``), their rollouts (``[rollouts]``), pairs (``[orpo]``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_port.core.config.conflicts import Conflict, Rule, Table, native_only
from megatron_port.core.config.ranges import CountOrZero, NonNegative, PathSetting, Positive
from megatron_port.core.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Policy-gradient losses of sampled answers (`training.loss = "policy"`; docs/post-training.md)."""

    method: Literal["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "grpo"
    """grpo (arXiv 2402.03300: clipped ratios, mean over an answer's tokens, then over answers) | dr_grpo (arXiv
    2503.20783: an answer's sum over policy.longest_answer, advantages not divided) | dapo (arXiv 2503.14476) and ppo
    (arXiv 1707.06347): mean over all tokens | gspo (arXiv 2507.18071: one ratio for an answer) | cispo (arXiv
    2506.13585: clipped ratios weigh the log-probability)"""
    clip_low: Positive = 0.2
    """A ratio below 1 - clip_low is clipped."""
    clip_high: Positive = 0.2
    """A ratio above 1 + clip_high is clipped."""
    old: Literal["rollouts", "current"] = "rollouts"
    """Log-probabilities of the ratios' denominators: rollouts (which they bring) | current (the pass' own, so that
    ratios are 1: for one step on each batch of rollouts)"""
    kl: NonNegative = 0.0
    """Factor of the KL divergence from the reference, exp(d) - d - 1 with d = reference - policy (arXiv 2402.03300,
    eq. 4). Rollouts must have the reference's log-probabilities where it is not 0."""
    entropy: NonNegative = 0.0
    """Factor of the entropy of the predictions, which is maximised."""
    correction: NonNegative = 0.0
    """Bound of the importance-sampling weight old / sampled, for an engine that samples with other numerics than
    training has (truncated importance sampling); old are the trainer's own. 0: no weight."""
    longest_answer: CountOrZero = 0
    """Tokens by which dr_grpo divides an answer's sum. 0: model.seq_length."""
    advantage_epsilon: NonNegative = 1e-4
    """Added to the deviation of a group's rewards, by which methods other than dr_grpo divide."""


@dataclass(frozen=True, kw_only=True)
class RolloutsConfig:
    """Sampled answers with their rewards (`data.source = "rollouts"`; docs/post-training.md)."""

    folder: PathSetting = ""
    """The folder, which may grow while training reads it."""
    wait_seconds: NonNegative = 0.0
    """Time that a step waits for rollouts that are not there yet."""
    max_staleness: CountOrZero = 0
    """Optimizer steps by which the policy that sampled may be older than the step that trains on the rollout. An older
    one ends the run. 0: any age."""


@dataclass(frozen=True, kw_only=True)
class OrpoConfig:
    """The loss of pairs without a reference (`training.loss = "orpo"`; docs/preferences.md)."""

    weight: Positive = 0.1
    """Factor of the odds ratio's part (lambda of arXiv 2403.07691)."""


def policy_of(config: RunConfig) -> PolicyConfig:
    """Return the policy loss's settings of a run, the defaults where it has no such table."""
    found: PolicyConfig = getattr(config, "policy", PolicyConfig())
    return found


def rollouts_of(config: RunConfig) -> RolloutsConfig:
    """Return where a run's rollouts are."""
    found: RolloutsConfig = getattr(config, "rollouts", RolloutsConfig())
    return found


WEIGHTED = (Table(asked='training.loss "weighted"', on=lambda c: c.training.loss == "weighted", rows=(
    native_only("whose loss is a mean over tokens"),
    Rule(lambda c: c.data.source == "corpus",
         "{asked} takes weights with each sample, which corpora lack; bring a data source (CONTRIBUTING.md), or use it "
         "with a Learner"),
    Conflict("model.mtp_layers", "only the model's own predictions have weights", "set 0"),
    Conflict("backend.graphs", "captured steps have no place for weights", 'use graphs = "off"', refused=("step",)),
)),)

POLICY = (Table(asked='training.loss "policy"', on=lambda c: c.training.loss == "policy", rows=(
    native_only("whose loss is a mean over tokens"),
    Rule(lambda c: c.data.source == "corpus",
         '{asked} learns from sampled answers; set data.source = "rollouts" and rollouts.folder'),
    Conflict("model.mtp_layers", "only the model's own predictions have a loss", "set 0"),
    Conflict("backend.graphs", "captured steps have no place for log-probabilities of rollouts", 'use graphs = "off"',
             refused=("step",)),
    Rule(lambda c: policy_of(c).longest_answer > 0 and policy_of(c).method != "dr_grpo",
         "policy.longest_answer is dr_grpo's; leave it out, or set policy.method = \"dr_grpo\""),
    Rule(lambda c: policy_of(c).advantage_epsilon != PolicyConfig().advantage_epsilon
         and policy_of(c).method == "dr_grpo",
         'policy.advantage_epsilon is added to what policy.method "dr_grpo" does not divide by; leave it out'),
    Rule(lambda c: policy_of(c).entropy > 0 and c.activations.head_chunk != 0,
         "policy.entropy needs whole logits; set activations.head_chunk = 0"),
)),)

ROLLOUTS = (Table(rows=(
    Rule(lambda c: policy_of(c) != PolicyConfig() and c.training.loss != "policy",
         '[policy] with training.loss {c.training.loss!r}, which has none of these settings; set training.loss = '
         '"policy", or leave the section out'),
    Rule(lambda c: getattr(c, "orpo", OrpoConfig()) != OrpoConfig() and c.training.loss != "orpo",
         '[orpo] with training.loss {c.training.loss!r}, which has none of its settings; set training.loss = "orpo", '
         "or leave the section out"),
    Rule(lambda c: rollouts_of(c) != RolloutsConfig() and c.data.source != "rollouts",
         '[rollouts] with data.source {c.data.source!r}, which reads none; set data.source = "rollouts", or leave the '
         "section out"),
)), Table(asked='data.source "rollouts"', on=lambda c: c.data.source == "rollouts", rows=(
    Rule(lambda c: not rollouts_of(c).folder, "{asked} without rollouts.folder; name the folder"),
    Rule(lambda c: c.training.loss != "policy",
         '{asked} with training.loss {c.training.loss!r}, which would learn bad answers as well; use "policy"'),
    Rule(lambda c: c.watch.enabled and rollouts_of(c).wait_seconds > max(c.watch.data_seconds, c.watch.hang_seconds),
         "rollouts.wait_seconds is longer than the watch lets a rank read data; set watch.data_seconds to as much"),
    Conflict("batch.rampup_start", "whose steps tell how old a rollout is", "leave the ramp-up out"),
    Rule(lambda c: c.training.eval_batches > 0,
         "{asked} has no samples to evaluate on; set training.eval_batches = 0"),
)),)

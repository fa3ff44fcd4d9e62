"""Losses of policies: each method's formula, written out here over whole answers, and its gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.loader import load
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.objective import WholeSamples
from megatron_port.core.layers.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.core.layers.step import AuxiliarySums
from megatron_port.ext.objectives.policy import METHODS, PolicyObjective
from megatron_port.ext.objectives.policy_settings import PolicyConfig
from megatron_port.ext.objectives.rollout_files import Rollout
from megatron_port.ext.objectives.rollout_source import group_advantages, labels_of

VOCAB, SEQ = 11, 12
RUN = load(None, ["data.synthetic=true"]).config


def drawn(number: int, seed: int, *, empty: bool = False) -> list[Rollout]:
    """Rollouts of uneven lengths in groups of about three, some with a tool's output in the middle."""
    draw, made = np.random.default_rng(seed), []
    for index in range(number):
        length, prompt = int(draw.integers(4, SEQ + 2)), int(draw.integers(1, 4))
        sampled = np.arange(length) >= prompt
        if length > 7 and draw.random() < 0.4:
            sampled[prompt + 1 : prompt + 3] = False
        if empty and index == 1:
            sampled[:] = False
        logprobs = -3 * draw.random(length)
        made.append(Rollout(
            tokens=draw.integers(0, VOCAB, length), sampled=sampled, logprobs=logprobs,
            reward=float(draw.integers(0, 3)), group=index // 3, version=0,
            further={"ref_logprobs": (logprobs + 0.3 * draw.standard_normal(length)).clip(max=0),
                     "old_logprobs": (logprobs + 0.2 * draw.standard_normal(length)).clip(max=0)}))
    return made


def advantages_of(rollouts: list[Rollout], how: PolicyConfig) -> np.ndarray:
    return group_advantages(np.array([r.reward for r in rollouts]), np.array([r.group for r in rollouts]), how)


def by_formula(logits: torch.Tensor, rollouts: list[Rollout], how: PolicyConfig) -> torch.Tensor:
    """The step's loss from the papers' formulas, answer by answer and token by token; logits [answers, seq, vocab]."""
    log_p = logits.log_softmax(dim=-1)
    answers: list[tuple[list[torch.Tensor], int]] = []
    for i, rollout in enumerate(rollouts):
        mates = [r.reward for r in rollouts if r.group == rollout.group]
        advantage = rollout.reward - sum(mates) / len(mates)
        if how.method != "dr_grpo":
            spread = torch.tensor(mates).double().std().item() if len(mates) > 1 else 0.0
            advantage = advantage / (spread + how.advantage_epsilon)
        places = [t for t in range(1, len(rollout.tokens)) if rollout.sampled[t]]
        new = [log_p[i, t - 1, int(rollout.tokens[t])] for t in places]
        as32 = {name: values.astype(np.float32)
                for name, values in (("sampled", rollout.logprobs), *rollout.further.items())}
        old = [float(as32["old_logprobs"][t]) for t in places]
        terms = []
        for k, t in enumerate(places):
            before = new[k].item() if how.old == "current" else old[k]
            ratio = (new[k] - before).exp()
            if how.method == "gspo":
                apart = [n - (n.item() if how.old == "current" else o) for n, o in zip(new, old, strict=True)]
                ratio = torch.stack(apart).mean().exp()
            low, high = 1 - how.clip_low, 1 + how.clip_high
            if how.method == "cispo":
                term = -min(max(ratio.item(), low), high) * advantage * new[k]
            else:
                term = -min(ratio * advantage, ratio.clamp(low, high) * advantage, key=lambda x: x.item())
            if how.correction:
                term = term * min(float(np.exp(before - float(as32["sampled"][t]))), how.correction)
            if how.kl:
                d = float(as32["ref_logprobs"][t]) - new[k]
                term = term + how.kl * (d.exp() - d - 1)
            if how.entropy:
                p = log_p[i, t - 1].exp()
                term = term + how.entropy * (p * log_p[i, t - 1]).sum()
            terms.append(term)
        if terms:
            answers.append((terms, len(terms)))
    if how.method in ("grpo", "gspo"):
        return sum(sum(terms) / n for terms, n in answers) / len(answers)  # type: ignore[return-value]
    if how.method == "dr_grpo":
        return sum(sum(terms) for terms, _ in answers) / (how.longest_answer or SEQ) / len(answers)  # type: ignore
    return sum(sum(terms) for terms, _ in answers) / sum(n for _, n in answers)  # type: ignore[return-value]


def stage_of(vocab: int = VOCAB) -> Any:
    """The last stage of one process, as far as a loss sees it."""
    def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(logits, labels.t().contiguous(), offset=0, extent=vocab, group=None).t()

    weight = SimpleNamespace(record=SimpleNamespace(extent=(vocab,)))
    return SimpleNamespace(head=SimpleNamespace(token_losses=token_losses, weight=weight, group=None),
                           context_group=None)


def batch_of(rollouts: list[Rollout], how: PolicyConfig, objective: PolicyObjective) -> tuple[MicroBatch, Any]:
    advantages = advantages_of(rollouts, how)
    rows = [labels_of(r, float(a), SEQ) for r, a in zip(rollouts, advantages, strict=True)]
    tokens = torch.from_numpy(np.stack([row.tokens for row in rows]))
    mask = torch.from_numpy(np.stack([row.counted for row in rows if row.counted is not None])).float()
    whole = WholeSamples(tuple(range(len(rows))), tokens[:, 1:], mask, None, rows=rows, training=True)
    batch = MicroBatch(whole.ids, labels=tokens[:, 1:], loss_mask=mask, side=objective.side(whole))
    sums = AuxiliarySums(objective.sums, torch.device("cpu"))
    return batch, SimpleNamespace(side=batch.side, add_auxiliary=sums.add, document_starts=None, sums=sums)


@settings(max_examples=60, deadline=None)
@given(
    method=st.sampled_from(sorted(METHODS)), seed=st.integers(0, 1000), number=st.integers(1, 7),
    old=st.sampled_from(["rollouts", "current"]), kl=st.sampled_from([0.0, 0.3]), entropy=st.sampled_from([0.0, 0.2]),
    correction=st.sampled_from([0.0, 1.1]), empty=st.booleans(), longest=st.sampled_from([0, 9]),
)
def test_each_method_is_its_formula(
    method: Any, seed: int, number: int, old: Any, kl: float, entropy: float, correction: float, empty: bool,
    longest: int,
) -> None:
    how = PolicyConfig(method=method, old=old, kl=kl, entropy=entropy, correction=correction, longest_answer=longest,
                       clip_low=0.15, clip_high=0.3)
    rollouts = drawn(number, seed, empty=empty and number > 2)
    objective = PolicyObjective(RUN, how)
    objective.longest = longest or SEQ
    logits = 2 * torch.randn(number, SEQ, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    theirs = logits.clone().requires_grad_()
    expected = by_formula(theirs, rollouts, how)
    expected.backward()
    batch, context = batch_of(rollouts, how, objective)
    ours = logits.clone().transpose(0, 1).contiguous().requires_grad_()
    count = float(objective.count(batch, SEQ))
    assert batch.labels is not None
    found = objective.loss(stage_of(), ours.clone(), batch.labels, batch.loss_mask, context) / count
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-11, abs=1e-12)
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad.transpose(0, 1), theirs.grad, rtol=1e-11, atol=1e-13)
    answered = [r for r in rollouts if r.sampled.any()]
    told = objective.metrics(dict(zip(context.sums.names, context.sums.values.tolist())), round(count))
    assert told["reward"] == pytest.approx(np.mean([r.reward for r in answered]))
    assert told["answer_tokens"] == pytest.approx(np.mean([r.sampled.sum() for r in answered]))


def test_advantages_are_of_whole_groups() -> None:
    rewards, groups = np.array([1.0, 0.0, 1.0, 5.0, 2.0]), np.array([7, 3, 7, 3, 9])
    plain = group_advantages(rewards, groups, PolicyConfig(method="dr_grpo"))
    np.testing.assert_allclose(plain, [0, -2.5, 0, 2.5, 0])
    scaled = group_advantages(rewards, groups, PolicyConfig(advantage_epsilon=0.0))
    np.testing.assert_allclose(scaled, [0, -np.sqrt(0.5), 0, np.sqrt(0.5), 0])

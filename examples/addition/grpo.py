"""A small model learns to add two numbers of two digits from right and wrong answers alone (GRPO, arXiv 2402.03300).

    torchrun --nproc-per-node 4 examples/addition/grpo.py layout.tensor_parallel_size=2 layout.data_parallel_size=2

First it reads some sums, after which few of its answers are right. From then on it is told no answer: it samples
eight for each of 64 questions, a function below rewards them, and the policy learns from its own samples. The rollouts
are kept in the run's folder; ``megatron-port report runs/addition`` draws the reward. Started again, it continues from
the last checkpoint, and steps that it repeats are what they were.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from megatron_port import Learner, load_config, open_session
from megatron_port.core.data.dataset import Sample
from megatron_port.core.train.folders import run_folder
from megatron_port.ext.objectives.policy import PolicyObjective
from megatron_port.ext.objectives.policy_settings import PolicyConfig
from megatron_port.ext.objectives.rollout_files import Rollout, append
from megatron_port.ext.objectives.rollout_source import group_advantages, labels_of
from megatron_port.tools.inference.generation import Sampling

PLUS, EQUALS = 10, 11
QUESTIONS, ANSWERS, READING = 64, 8, 0.15
"""Questions of a step, answers to each; share of the steps that reads sums before the first sample"""
HELD_OUT = 200


def digits(number: int, count: int) -> list[int]:
    """Return the digits of a number, the last one first, as sums are worked out."""
    return [number // 10**place % 10 for place in range(count)]


def question(pair: int) -> list[int]:
    """Return the tokens of one of the 10,000 questions."""
    return [*digits(pair // 100, 2), PLUS, *digits(pair % 100, 2), EQUALS]


def right(pair: int) -> list[int]:
    """Return the answer, three digits."""
    return digits(pair // 100 + pair % 100, 3)


def reward(pair: int, answer: list[int]) -> float:
    """Return 1 for the right answer, else a tenth for each right digit."""
    hits = sum(a == b for a, b in zip(answer, right(pair), strict=True))
    return 1.0 if hits == 3 else 0.1 * hits


def drawn(step: int, count: int) -> list[int]:
    """Return questions of a step, none of them held out; a function of the step, so that resuming needs no state."""
    return [int(p) for p in HELD_OUT + np.random.default_rng(step).choice(10_000 - HELD_OUT, count)]


def shuffled(pair: int) -> int:
    """Return a pair by its number in a fixed order, so that those held out are no row of the table."""
    return pair * 7919 % 10_000


def read(learner: Learner, step: int) -> None:
    """Take one step on sums with their answers."""
    pairs = [shuffled(p) for p in drawn(step, 256)]
    samples = [Sample(np.array(question(p) + right(p)), counted=np.arange(8) >= 5) for p in pairs]
    losses = learner.forward_backward(samples)
    learner.report(losses, learner.optim_step(lr=2e-3))


def explore(learner: Learner, step: int, policy: PolicyObjective, folder: Path) -> None:
    """Take one step on the model's own answers."""
    pairs = [shuffled(p) for p in drawn(step, QUESTIONS) for _ in range(ANSWERS)]
    answers = learner.generate([question(p) for p in pairs], Sampling(max_new_tokens=3, seed=step), batch_size=128)
    texts = [Sample(np.array(question(p) + one.tokens)) for p, one in zip(pairs, answers, strict=True)]
    rollouts = [
        Rollout(tokens=text.tokens, sampled=np.arange(9) >= 6, logprobs=np.concatenate([[0.0], logprobs]),
                reward=reward(p, one.tokens), group=number // ANSWERS, version=step)
        for number, (p, one, text, logprobs) in enumerate(
            zip(pairs, answers, texts, learner.logprobs(texts), strict=True))]
    if learner.session.is_rank_zero:
        append(folder / "rollouts", rollouts)
    advantages = group_advantages(
        np.array([r.reward for r in rollouts]), np.array([r.group for r in rollouts]), policy.settings)
    samples = [labels_of(r, float(a), 8) for r, a in zip(rollouts, advantages, strict=True)]
    losses = learner.forward_backward(samples, policy)
    learner.report(losses, learner.optim_step(lr=7e-4))


def share_right(learner: Learner) -> float:
    """Return the share of the held-out questions that the model answers rightly, by its likeliest digits."""
    pairs = [shuffled(p) for p in range(HELD_OUT)]
    likeliest = Sampling(max_new_tokens=3, temperature=0.0)
    answers = learner.generate([question(p) for p in pairs], likeliest, batch_size=200)
    return float(np.mean([one.tokens == right(p) for p, one in zip(pairs, answers, strict=True)]))


def main() -> None:
    """Train, and print how many answers are right."""
    config = load_config(str(Path(__file__).with_name("addition.toml")), *sys.argv[1:])
    with open_session(config, writes=True) as session:
        learner, say = Learner(session), session.logger.log
        resumed = learner.load()
        if resumed:
            say(f"continuing from {resumed.name}")
        policy = PolicyObjective(session.config, PolicyConfig(clip_high=0.28))
        reading = int(READING * config.training.steps)
        for step in range(learner.step, config.training.steps):
            if step >= reading:
                if (step - reading) % 40 == 0:
                    say(f"step {step}: {100 * share_right(learner):.1f} % of held-out sums are right")
                explore(learner, step, policy, run_folder(session.config))
            else:
                read(learner, step)
            if learner.step % config.checkpoint.save_interval == 0:
                learner.save()
        say(f"step {learner.step}: {100 * share_right(learner):.1f} % of held-out sums are right")
        learner.close()


if __name__ == "__main__":
    main()

"""Hundreds of steps in half precision with float32 masters, as definitions.md has them, in any order of sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from twin.model import Shape, Weights, initial, no_dropout, token_losses
from twin.update import Adam, clip


@cache
def _walk(sample: int, seq: int, vocab: int) -> list[int]:
    random = np.random.default_rng([11, sample])
    out = [int(random.integers(vocab))]
    for surprise, other in zip(random.random(seq) < 0.2, random.integers(vocab, size=seq)):
        out.append(int(other) if surprise else (3 * out[-1] + 1) % vocab)
    return out


def sample_rows(samples: Sequence[int], seq: int, vocab: int) -> np.ndarray:
    """int64 [samples, seq + 1]: walks through the vocabulary that are predictable four times of five."""
    return np.array([_walk(s, seq, vocab) for s in samples])


@dataclass(frozen=True)
class Order:
    """How the sum over a step's samples is taken; every order has the same exact result."""

    micro_batch: int
    reverse: bool = False

    def groups(self, samples: list[int]) -> list[list[int]]:
        """Micro-batches."""
        ordered = samples[::-1] if self.reverse else samples
        return [ordered[i : i + self.micro_batch] for i in range(0, len(ordered), self.micro_batch)]


@dataclass
class LossScale:
    """fp16's: halves at an overflow, doubles after ``window`` good steps in a row."""

    value: float
    window: int
    good: int = 0

    def account(self, overflow: bool) -> None:
        """One step."""
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value = max(1.0, self.value / 2)
        elif self.good % self.window == 0:
            self.value *= 2


@dataclass
class HalfRun:
    """What a run leaves."""

    losses: list[float]
    norms: list[float | None]
    scales: list[float]
    masters: Weights


def train(
    model: Shape, seed: int, dtype: torch.dtype, optimizer: dict[str, Any], *, steps: int, batch: int, order: Order,
    scale: LossScale | None = None,
) -> HalfRun:
    """Constant learning rate; the weights of a pass are the masters rounded to ``dtype``, and nothing else is."""
    masters, adam = initial(model, seed), Adam(optimizer)
    scale = scale or LossScale(1.0, 1 << 40)
    out = HalfRun([], [], [], masters)
    for step in range(steps):
        samples = list(range(step * batch, (step + 1) * batch))
        sums = {name: torch.zeros_like(w) for name, w in masters.items()}
        weights = {name: w.to(dtype, copy=True).requires_grad_() for name, w in masters.items()}
        total = 0.0
        for group in order.groups(samples):
            both = torch.from_numpy(sample_rows(group, model.seq_length, model.vocab_size))
            loss = token_losses(both[:, :-1], both[:, 1:], weights, model, no_dropout).sum()
            total += float(loss.detach())
            factor = scale.value / (batch * model.seq_length)
            for name, g in zip(weights, torch.autograd.grad(loss * factor, list(weights.values()))):
                sums[name] += g.float()
        for g in sums.values():
            g /= scale.value
        finite = all(bool(torch.isfinite(g).all()) for g in sums.values())
        norm = clip(sums, optimizer["clip_grad"]) if finite else math.inf
        out.losses.append(total / (batch * model.seq_length))
        out.norms.append(norm if finite else None)
        out.scales.append(scale.value)
        scale.account(not finite)
        if finite:
            adam.step(masters, sums, optimizer["lr"])
    return out

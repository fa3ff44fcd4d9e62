"""The update of definitions.md: clipping, AdamW with groups of parameters and muP's factors, averaged weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from twin.model import Weights, decays

CLASSES = ("embedding", "head", "matrix", "norm", "bias", "other")


def class_of(name: str) -> str:
    """The class by which a group may name a parameter."""
    for beginning in ("embedding", "head"):
        if name.startswith(f"{beginning}."):
            return beginning
    if name.endswith(".bias"):
        return "bias"
    return "matrix" if decays(name) else "norm"


def settings_of(name: str, optimizer: dict[str, Any], width: float) -> tuple[float, float]:
    """(factor of the learning rate, weight decay) of a parameter. ``width``: muP's m."""
    factor, decay = 1.0, optimizer["weight_decay"] if decays(name) else 0.0
    for group in optimizer.get("groups", []):
        match = group["match"]
        if class_of(name) == match if match in CLASSES else fnmatchcase(name, match):
            factor = group.get("lr_factor", 1.0)
            own = group.get("weight_decay", -1.0)
            decay = decay if own == -1.0 else own
            break
    if class_of(name) == "matrix":
        return factor / width, decay * width
    return factor, decay


@dataclass
class Adam:
    """AdamW with decoupled decay; moments of every weight."""

    settings: dict[str, Any]
    width: float = 1.0
    first: Weights = field(default_factory=dict)
    second: Weights = field(default_factory=dict)
    updates: int = 0

    def step(self, weights: Weights, gradients: Weights, lr: float) -> None:
        """Change ``weights`` in place."""
        s = self.settings
        self.updates += 1
        for name, g in gradients.items():
            m = self.first.setdefault(name, torch.zeros_like(g))
            v = self.second.setdefault(name, torch.zeros_like(g))
            m.mul_(s["beta1"]).add_((1 - s["beta1"]) * g)
            v.mul_(s["beta2"]).add_((1 - s["beta2"]) * g * g)
            unbiased = m / (1 - s["beta1"] ** self.updates)
            size = torch.sqrt(v / (1 - s["beta2"] ** self.updates)) + s["eps"]
            factor, decay = settings_of(name, s, self.width)
            w = weights[name]
            w.mul_(1 - lr * factor * decay)
            w.sub_(lr * factor * unbiased / size)


def norm_of(gradients: Weights) -> float:
    """The global norm."""
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))


def clip(gradients: Weights, limit: float) -> float:
    """The global norm before clipping; gradients are scaled down in place where it is above ``limit``."""
    norm = norm_of(gradients)
    if 0 < limit < norm:
        for g in gradients.values():
            g.mul_(limit / (norm + 1e-6))
    return norm


@dataclass
class Clipping:
    """All of it, in its order: by norm, adaptively by norm (ZClip), by value."""

    settings: dict[str, Any]
    norms: list[float] = field(default_factory=list)
    """Of the updates so far, as they were clipped adaptively, until mean and variance are taken from them."""
    mean: float = 0.0
    variance: float = 0.0
    adapted: int = 0
    """Steps in which the norm was clipped adaptively, and further than ``clip_grad`` does."""
    cut: int = 0
    """Elements that were above ``clip_value``."""

    def __call__(self, gradients: Weights) -> float:
        """Clip in place and return the norm before."""
        s, norm = self.settings, norm_of(gradients)
        fixed = s["clip_grad"] or math.inf
        target = self._adaptive(norm) if s.get("clip_zscore") else norm
        self.adapted += target < min(norm, fixed)
        clip(gradients, min(target, fixed) if min(target, fixed) < norm else 0.0)
        largest = s.get("clip_value", 0.0)
        for g in gradients.values() if largest else ():
            self.cut += int((g.abs() > largest).sum())
            g.copy_(torch.maximum(torch.minimum(g, torch.full_like(g, largest)), torch.full_like(g, -largest)))
        return norm

    def _adaptive(self, norm: float) -> float:
        """What ZClip clips a norm to; the norm counts for the next steps."""
        s = self.settings
        if len(self.norms) < s["clip_warmup"]:
            self.norms.append(norm)
            self.mean = sum(self.norms) / len(self.norms)
            self.variance = sum((x - self.mean) ** 2 for x in self.norms) / len(self.norms)
            return norm
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / deviation
        if z > s["clip_zscore"]:
            norm = self.mean + s["clip_zscore"] ** 2 / z * deviation
        self.mean = s["clip_decay"] * self.mean + (1 - s["clip_decay"]) * norm
        self.variance = s["clip_decay"] * self.variance + (1 - s["clip_decay"]) * (norm - self.mean) ** 2
        return norm


class Average:
    """decay · average + (1 - decay) · weight after each update; of the first, the weights."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.weights: Weights = {}

    def update(self, weights: Weights) -> None:
        """Take in the weights after an update."""
        for name, w in weights.items():
            if name in self.weights:
                self.weights[name] = self.decay * self.weights[name] + (1 - self.decay) * w
            else:
                self.weights[name] = w.clone()

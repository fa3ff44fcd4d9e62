"""Load of experts, step by step: its numbers for metrics.jsonl, and which experts starve.

docs/metrics.md defines each number. Counts are exact, of all ranks, and count a token once for each of its experts,
before any is dropped. Layers without experts have rows of zeros, and none here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_port.core.config.model import ModelConfig
from megatron_port.core.config.moe import RoutesConfig

LOW = 0.1
"""Share of the mean load below which ``experts_low`` counts an expert."""
MEANS = {"margin": "router_margin", "balance_loss": "balance_loss", "z_loss": "z_loss"}
"""Tally → field of metrics.jsonl: its mean over tokens."""
ADVICE = (
    ". An expert without tokens learns nothing: set model.moe.balance_bias = true or a model.moe.balance_loss, raise "
    "model.moe.balance_weight or model.moe.bias_rate, or lower optimizer.lr (docs/moe.md)"
)
"""End of the first warning."""
Counts = NDArray[np.int64]
Sums = NDArray[np.float64]


@dataclass
class LayerCounts:
    """Sums over some steps, of the layers that have experts."""

    layers: tuple[int, ...]
    """Numbers of the layers."""
    tokens: Counts
    """[layers, experts]: choices of each expert."""
    sums: Mapping[str, Sums]
    """[layers] each: ``dropped`` choices, and what has a mean, summed over tokens, as far as the model has it."""
    top_k: int

    @classmethod
    def of(cls, tallies: Mapping[str, Any], model: ModelConfig) -> LayerCounts | None:
        """Return a step's counts from :attr:`StepResult.tallies` (``model.router``); None: no layer has experts."""
        if "expert_tokens" not in tallies:
            return None
        every, moe = np.asarray(tallies["expert_tokens"], dtype=np.int64), model.moe
        layers = np.flatnonzero(every.sum(axis=1))
        known = {"dropped": moe.drops, "margin": True, "balance_loss": moe.balance_loss != "none",
                 "z_loss": moe.z_weight > 0}
        sums = {name: np.asarray(tallies[name], dtype=np.float64)[layers] for name, there in known.items() if there}
        if "balance_loss" in sums:
            sums["balance_loss"] *= model.seq_length  # it is a sum over samples
        return cls(tuple(layers.tolist()), every[layers], sums, moe.top_k) if len(layers) else None

    def plus(self, other: LayerCounts) -> LayerCounts:
        """Return the sums over both. ValueError: they are of different layers."""
        if self.layers != other.layers:
            raise ValueError(f"counts of layers {self.layers} and {other.layers} cannot be added")
        sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        return LayerCounts(self.layers, self.tokens + other.tokens, sums, self.top_k)

    @property
    def load(self) -> Sums:
        """[layers, experts]: tokens of each expert over the mean of its layer."""
        load: Sums = self.tokens / self.tokens.mean(axis=1, keepdims=True)
        return load

    @property
    def routed(self) -> Counts:
        """[layers]: tokens."""
        routed: Counts = self.tokens.sum(axis=1) // self.top_k
        return routed

    def mean(self, name: str) -> Sums:
        """[layers]: the mean over tokens of a sum."""
        mean: Sums = self.sums[name] / self.routed
        return mean

    def summary(self) -> dict[str, float | int]:
        """Return the fields of metrics.jsonl."""
        load = self.load
        out: dict[str, float | int] = {
            "expert_load_max": float(load.max()), "expert_load_min": float(load.min()),
            "experts_low": int((load < LOW).sum()),
        }
        if "dropped" in self.sums:
            out["dropped_share"] = float(self.sums["dropped"].sum() / self.tokens.sum())
        return out | {field: float(self.mean(name).mean()) for name, field in MEANS.items() if name in self.sums}


class StarvingExperts:
    """Finds experts whose load stays below ``moe.starved_share`` of their layer's mean for ``moe.starved_steps``."""

    def __init__(self, config: RoutesConfig) -> None:
        self._share, self._steps = config.starved_share, config.starved_steps
        self._row: Counts | None = None
        self._advised = False

    def step(self, step: int, counts: LayerCounts) -> str:
        """Return a warning that names the experts that have been starving for so long by now; empty: no new ones."""
        if not self._steps:
            return ""
        load = counts.load
        row = np.zeros_like(counts.tokens) if self._row is None else self._row
        self._row = np.where(load < self._share, row + 1, 0)
        if not (self._row == self._steps).any():
            return ""
        advice, self._advised = "" if self._advised else ADVICE, True
        return starving_line(step, counts, self._row == self._steps, self._share, self._steps) + advice


def starving_line(step: int, counts: LayerCounts, found: NDArray[np.bool_], share: float, steps: int) -> str:
    """Return the warning about the experts marked in ``found`` [layers, experts]: of eight layers, four each."""
    parts = []
    for i in np.flatnonzero(found.any(axis=1))[:8]:
        experts = np.flatnonzero(found[i])
        some = ", ".join(f"{e} ({100 * counts.load[i, e]:.3g} %)" for e in experts[:4])
        more = f" and {len(experts) - 4} more" if len(experts) > 4 else ""
        parts.append(f"layer {counts.layers[i]}: expert{'s' if len(experts) > 1 else ''} {some}{more}")
    left = int(found.any(axis=1).sum()) - len(parts)
    return (
        f"step {step}: {int(found.sum())} of {found.size} experts starve: below {100 * share:g} % of their layer's "
        f"mean load for {steps} steps in a row (moe.starved_share, moe.starved_steps). {'; '.join(parts)}"
        f"{f'; {left} layers more' if left else ''}"
    )

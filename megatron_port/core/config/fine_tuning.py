"""Section ``[fine_tuning]``: low-rank adapters that are trained beside frozen weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_port.core.config.ranges import Count, Fraction, PathSetting, Positive


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig:
    """Low-rank adapters: the weights of checkpoint.initial_weights are frozen, and what is trained and saved are two
    thin matrices beside each of the layers' matrices (engine native; docs/fine-tuning.md)."""

    method: Literal["none", "lora", "dora"] = "none"
    """none (all weights are trained) | lora (W + s B A; Hu et al., arXiv 2106.09685) | dora (its rows scaled to trained
    lengths; Liu et al., arXiv 2402.09353)"""
    rank: Count = 8
    """Rows of A and columns of B, r."""
    alpha: Positive = 16.0
    """The factor s is alpha / r."""
    rslora: bool = False
    """The factor s is alpha / sqrt(r) (Kalajdzievski, arXiv 2312.03732)."""
    dropout: Fraction = 0.0
    """Probability, on what A reads (lora)."""
    targets: tuple[str, ...] = ()
    """Matrices with an adapter: query, key, value, output, gate, up, down; for latent attention query_down, query_up,
    kv_down, kv_up instead of the first three. Empty: all that the model has."""
    adapters: PathSetting = ""
    """PEFT folder that the adapters start from; empty: A is drawn and B is zero, as in PEFT."""

    @property
    def enabled(self) -> bool:
        """Whether weights are frozen."""
        return self.method != "none"

    @property
    def scale(self) -> float:
        """Factor of the product of B and A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


NO_ADAPTERS = FineTuningConfig()

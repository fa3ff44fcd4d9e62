"""Adaptive clipping of the gradient norm (ZClip, Kumar et al., arXiv 2504.02507).

The norm that is clipped to follows from the norms of earlier updates, which are one number of the whole model, alike on
every rank and, but for rounding, in every layout. (Clipping by the norms of single units of a parameter, as AGC does,
would bound a tensor-parallel rank's rows and columns by norms that are sums over ranks.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.optim.gradients import OFF, NormStatistics, limited


class AdaptiveClipping(NormStatistics):
    """Mean and variance of the norms of the updates so far: of the first ``clip_warmup`` as they are, from then on
    decaying, and of norms as they were clipped."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.threshold, self.decay, self.warmup = config.clip_zscore, config.clip_decay, config.clip_warmup
        self.count, self.mean, self.variance = 0, 0.0, 0.0

    @property
    def now(self) -> tuple[float, float]:
        """Mean and standard deviation by which the next norm is clipped."""
        if self.count < self.warmup:
            return OFF
        return self.mean, math.sqrt(self.variance)

    def account(self, norm: float) -> None:
        """Take in the norm of an update that was applied, before clipping."""
        norm = limited(norm, *self.now, self.threshold)
        self.count += 1
        if self.count <= self.warmup:  # Welford's form of mean and variance of all
            ahead = norm - self.mean
            self.mean += ahead / self.count
            self.variance += (ahead * (norm - self.mean) - self.variance) / self.count
        else:
            self.mean = self.decay * self.mean + (1.0 - self.decay) * norm
            self.variance = self.decay * self.variance + (1.0 - self.decay) * (norm - self.mean) ** 2

    def state(self) -> dict[str, float | int]:
        """Return what a checkpoint holds."""
        return {"clip_updates": self.count, "clip_mean": self.mean, "clip_variance": self.variance}

    def load(self, scalars: Mapping[str, float | int]) -> None:
        """Continue from a checkpoint; from one without statistics, begin."""
        self.count = int(scalars.get("clip_updates", 0))
        self.mean, self.variance = (float(scalars.get(f"clip_{name}", 0.0)) for name in ("mean", "variance"))

"""Adaptive clipping of the gradient norm (ZClip, Kumar et al., arXiv 2504.02507).

The norm that is clipped to follows from the norms of earlier updates, which are one number of the whole model, alike on
every rank and, but for rounding, in every layout. (Clipping by the norms of single units of a parameter, as AGC does,
would bound a tensor-parallel rank's rows and columns by norms that are sums over ranks.)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping

import torch

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.optim.step_values import StepValues
from megatron_port.ext.kernels.ops.optimizer import clip_factor

OFF = (0.0, sys.float_info.max)
"""Mean and deviation with which no finite norm is clipped."""


class NormStatistics:
    """Mean and variance of the norms of the updates so far: of the first ``clip_warmup`` as they are, from then on
    decaying, and of norms as they were clipped."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.threshold, self.decay, self.warmup = config.clip_zscore, config.clip_decay, config.clip_warmup
        self.count, self.mean, self.variance = 0, 0.0, 0.0

    @property
    def now(self) -> tuple[float, float]:
        """Mean and standard deviation by which the next norm is clipped."""
        if not self.threshold or self.count < self.warmup:
            return OFF
        return self.mean, math.sqrt(self.variance)

    def account(self, norm: float) -> None:
        """Take in the norm of an update that was applied, before clipping."""
        if not self.threshold:
            return
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
        """Return what a checkpoint holds; nothing where norms are not clipped so."""
        if not self.threshold:
            return {}
        return {"clip_updates": self.count, "clip_mean": self.mean, "clip_variance": self.variance}

    def load(self, scalars: Mapping[str, float | int]) -> None:
        """Continue from a checkpoint; from one without statistics, begin."""
        self.count = int(scalars.get("clip_updates", 0))
        self.mean, self.variance = (float(scalars.get(f"clip_{name}", 0.0)) for name in ("mean", "variance"))


def limited(norm: float, mean: float, deviation: float, threshold: float) -> float:
    """Return what a norm is clipped to: itself up to ``threshold`` deviations above the mean; z > threshold of them
    above, the mean and threshold² / z deviations."""
    above = norm - mean
    if above <= threshold * deviation:
        return norm
    return mean + (threshold * deviation) ** 2 / above


def norm_target(config: OptimizerConfig, values: StepValues) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return :func:`limited` as a function of a scalar on the device; None: norms are not clipped so."""
    if not config.clip_zscore:
        return None

    def target(norm: torch.Tensor) -> torch.Tensor:
        above, width = norm - values.norm_mean, config.clip_zscore * values.norm_deviation
        return torch.where(above <= width, norm, values.norm_mean + width**2 / above)

    return target


def step_factor(
    config: OptimizerConfig, square: torch.Tensor, values: StepValues, veto: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return :func:`clip_factor`'s (grad_scale, skip, norm) under the configuration's limits, from the ``square`` of
    the norm over all ranks."""
    return clip_factor(
        square, max_norm=config.clip_grad, inv_scale=values.inv_scale, limit=values.largest_norm, veto=veto,
        target=norm_target(config, values),
    )


def clamp_(sums: Iterable[torch.Tensor], largest: float, scale: torch.Tensor | None = None) -> None:
    """Limit every element of flat gradients, in place, so that times ``scale`` (scalar on the device; None: 1) it is at
    most ``largest`` in absolute value."""
    bound = largest if scale is None else largest / scale
    for flat in sums:
        if isinstance(bound, torch.Tensor):
            limit = bound.to(flat.dtype)
            torch.clamp(flat, min=-limit, max=limit, out=flat)
        else:
            flat.clamp_(-bound, bound)

"""Gradients between the last backward pass and the update: norm, clipping, loss scale."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_port.core.config.schema import OptimizerConfig, PrecisionConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import MeshDims
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.errors import NumericsError
from megatron_port.core.optim.rules import StepValues

RecordedGradient = tuple[ParameterRecord, torch.Tensor]


def all_reduce_flat(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce a list of small tensors in place, with one collective per dtype."""
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        same = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in same])
        dist.all_reduce(flat, group=group)
        at = 0
        for t in same:
            t.copy_(flat[at : at + t.numel()].view_as(t))
            at += t.numel()


def owned_gradients(
    grads: Iterable[RecordedGradient], ctx: ParallelContext, *, zero_dims: MeshDims = frozenset()
) -> list[torch.Tensor]:
    """Return the gradients of parameters that this rank owns (``ParameterRecord.is_owned``).

    Over all ranks they hold each logical element once; gradients of padding are zero.

    ``zero_dims``: mesh dimensions along which each rank gives its shard of the gradients (ZeRO).
    """
    return [g.detach() for record, g in grads if record.is_owned(ctx.mesh, ctx.rank, zero_dims=zero_dims)]


def global_square_norm(
    owned: Sequence[torch.Tensor], ctx: ParallelContext, square_norm: Callable[[list[torch.Tensor]],
    torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the sum of squares of all final gradients of the model, a float64 scalar on the device. Collective.

    Args:
        owned: this rank's ``owned_gradients``.
        square_norm: squared norm of a list of tensors; None: in torch's ops.
    """
    if square_norm is not None and owned:
        total = square_norm(list(owned))
    else:
        dtype = torch.float64 if owned and owned[0].dtype == torch.float64 else torch.float32
        squares = [g.to(dtype).square().sum() for g in owned]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=dtype, device=ctx.device)
    total = total.double()  # one dtype on all ranks, also where a rank has nothing to add
    # Owners may lie anywhere on the mesh, so one sum over all ranks is right whatever axes a parameter lies along.
    if ctx.world_group is not None:
        dist.all_reduce(total, group=ctx.world_group)
    return total


OFF = (0.0, sys.float_info.max)
"""Mean and deviation with which no finite norm is clipped."""


class NormStatistics:
    """Statistics of gradient norms for adaptive clipping; the base class keeps none (``rules.adaptive_clipping``)."""

    @property
    def now(self) -> tuple[float, float]:
        """Mean and standard deviation of earlier norms, by which the next is clipped."""
        return OFF

    def account(self, norm: float) -> None:
        """Account for the norm of an applied update, before clipping."""

    def state(self) -> dict[str, float | int]:
        """Return what a checkpoint holds."""
        return {}

    def load(self, scalars: Mapping[str, float | int]) -> None:
        """Continue from a checkpoint."""


def limited(norm: float, mean: float, deviation: float, threshold: float) -> float:
    """Return what a norm is clipped to: itself up to ``threshold`` deviations above the mean; at z > threshold of them,
    the mean plus threshold² / z deviations."""
    above = norm - mean
    if above <= threshold * deviation:
        return norm
    return mean + (threshold * deviation) ** 2 / above


def norm_target(config: OptimizerConfig, values: StepValues) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return :func:`limited` as a function of a scalar on the device; None without ``clip_zscore``."""
    if not config.clip_zscore:
        return None

    def target(norm: torch.Tensor) -> torch.Tensor:
        above, width = norm - values.norm_mean, config.clip_zscore * values.norm_deviation
        return torch.where(above <= width, norm, values.norm_mean + width**2 / above)

    return target


def clip_factor(
    square_norm: torch.Tensor, *, max_norm: float, inv_scale: float | torch.Tensor,
    limit: float | torch.Tensor = sys.float_info.max, skip: torch.Tensor | None = None,
    target: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (grad_scale, skip, norm) for an update (``ops.optimizer.adamw_``): scalars on the device, not read back.

    ``square_norm`` is that of gradients which ``inv_scale`` (1 / loss scale) unscales, summed over all ranks.
    norm (float64) = sqrt(square_norm) * inv_scale; grad_scale (float32) = inv_scale, times max_norm / (norm + 1e-6)
    where norm > max_norm > 0; skip (float32) = 1 where norm is not finite, above the finite ``limit``, or ``skip``
    (float32 scalar on the device) is not zero, else 0. ``inv_scale`` and ``limit``: numbers, or float64 scalars on the
    device. ``target``: of the norm, what it is clipped to before max_norm (:func:`norm_target`).
    """
    norm = square_norm.to(torch.float64).sqrt() * inv_scale
    factor = inv_scale if isinstance(inv_scale, torch.Tensor) else torch.full_like(norm, inv_scale)
    if target is not None:
        wanted = target(norm)
        wanted = wanted.clamp(max=max_norm) if max_norm > 0.0 else wanted
        factor = torch.where(norm > wanted, factor * (wanted / (norm + 1e-6)), factor)
    elif max_norm > 0.0:
        factor = torch.where(norm > max_norm, factor * (max_norm / (norm + 1e-6)), factor)
    above = (~(norm <= limit)).float()  # NaN too
    return factor.float(), above if skip is None else torch.maximum(above, skip), norm


def step_factor(
    config: OptimizerConfig, square: torch.Tensor, values: StepValues, skip: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return :func:`clip_factor`'s (grad_scale, skip, norm) under the configuration's limits, from the ``square`` of
    the norm over all ranks."""
    return clip_factor(
        square, max_norm=config.clip_grad, inv_scale=values.inv_scale, limit=values.largest_norm, skip=skip,
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


# Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740).

@dataclass
class LossScaler:
    """Loss scale of the next backward pass, and the counters that change it.

    After ``hysteresis`` overflows the scale halves; after ``window`` good steps
    in a row it doubles and the hysteresis is restored.
    """

    config: PrecisionConfig
    scale: float = 1.0
    good_steps: int = 0
    hysteresis_left: int = field(default=0)
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.hysteresis_left = self.config.loss_scale_hysteresis
        if self.config.dtype == "fp16":
            self.scale = self.config.initial_loss_scale

    def account(self, loss: float, grad_norm: float, *, applied: bool) -> None:
        """Account for a step by its outcome.

        Only gradients that overflow under a finite loss are due to the scale. The loss is computed without it, so a
        loss that is not finite, or a spike, leaves scale and counters as they are.
        """
        if applied:
            self.update(False)
        elif math.isfinite(loss) and not math.isfinite(grad_norm):
            self.update(True)

    def update(self, overflow: bool) -> None:
        """Account for one step. Raises NumericsError when too many steps in a row were skipped."""
        if self.config.dtype != "fp16":
            return
        if not overflow:
            self.skipped_in_a_row = 0
            self.good_steps += 1
            if self.good_steps % self.config.loss_scale_window == 0:
                self.hysteresis_left = self.config.loss_scale_hysteresis
                self.scale *= 2.0
            return
        self.good_steps = 0
        self.skipped_in_a_row += 1
        self.hysteresis_left -= 1
        if self.hysteresis_left <= 0:
            self.scale = max(self.scale / 2.0, self.config.min_loss_scale)
        if self.skipped_in_a_row >= self.config.max_skipped_steps:
            raise NumericsError(
                f"{self.skipped_in_a_row} steps in a row overflowed in fp16 and were skipped (loss scale now "
                f"{self.scale:g}); lower optimizer.lr, use precision.dtype = \"bf16\", or look for bad data"
            )

    def state(self) -> dict[str, float | int]:
        """Return the state for checkpoints."""
        return {
            "loss_scale": self.scale, "loss_scale_good_steps": self.good_steps,
            "loss_scale_hysteresis_left": self.hysteresis_left, "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load(self, state: dict[str, float | int]) -> None:
        """Load a result of :meth:`state`; absent entries get their defaults."""
        self.scale = float(state.get("loss_scale", self.scale))
        self.good_steps = int(state.get("loss_scale_good_steps", 0))
        self.hysteresis_left = int(state.get("loss_scale_hysteresis_left", self.config.loss_scale_hysteresis))
        self.skipped_in_a_row = int(state.get("skipped_in_a_row", 0))

"""The native engine's optimizer step where masters and moments live in host memory or on a disk.

The norm, and with it clipping and skipping, comes from the gradients on the device, as without offload. One host
synchronisation brings the clip factor and whether the step is skipped; then the host updates one staged bucket after
another by the own AdamW kernel for CPUs while the next ones are on their way (``optim.offload``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_port.backend.ops.optimizer import adamw_, clip_factor
from megatron_port.config.schema import OptimizerConfig
from megatron_port.engine.host_update import SquareNorm
from megatron_port.optim.bucket_memory import Bucket
from megatron_port.optim.buckets import shard_ranges
from megatron_port.optim.clipping import norm_target
from megatron_port.optim.offload import Offload, StagedBucket
from megatron_port.optim.parameter_groups import GroupSettings, grouped
from megatron_port.optim.sharded import ShardedParameters
from megatron_port.optim.step_values import StepValues

if TYPE_CHECKING:
    from megatron_port.engine.native_update import OwnUpdate


class OffloadedUpdate:
    """AdamW on offloaded buckets, and by ``on_device`` on the others (``engine.native_update.Update``)."""

    def __init__(
        self, on_device: OwnUpdate, sharded: ShardedParameters, offload: Offload, config: OptimizerConfig
    ) -> None:
        self.on_device, self.sharded, self.offload, self.config = on_device, sharded, offload, config
        self.square_norm: SquareNorm = on_device.square_norm
        self._step = torch.zeros((), dtype=torch.int64)
        self._ranges = {id(bucket): self._by_settings(bucket) for bucket in offload.buckets.values()}
        self._padding = {id(bucket): self._gaps(bucket) for bucket in offload.buckets.values()}

    def _gaps(self, bucket: Bucket) -> list[slice]:
        """The ranges of this rank's share of a bucket that hold no parameter."""
        end, out = 0, []
        for taken in sorted((r for _, ranges in self._ranges[id(bucket)] for r in ranges), key=lambda r: r.start):
            out.append(slice(end, taken.start))
            end = taken.stop
        out.append(slice(end, bucket.own.stop - bucket.own.start))
        return [gap for gap in out if gap.start < gap.stop]

    def _by_settings(self, bucket: Bucket) -> list[tuple[GroupSettings, list[slice]]]:
        """The ranges of this rank's share of a bucket that hold parameters, by learning rate and weight decay."""
        owned = shard_ranges(bucket.plan, shard=bucket.index)
        starts = [f.at - bucket.own.start for f in owned]
        pairs = [
            (self.sharded.parameters[f.index][0], slice(start, start + f.numel)) for f, start in zip(owned, starts)
        ]
        return list(grouped(pairs, self.config.weight_decay).items())

    @property
    def steps(self) -> int:
        """Updates taken."""
        return int(self._step)

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates (:meth:`Update.restore`)."""
        self._step.fill_(steps)
        self.on_device.restore(steps)

    @torch.no_grad()
    def step(
        self, square: torch.Tensor, values: StepValues, *, veto: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factor, skip, norm = clip_factor(
            square, max_norm=self.config.clip_grad, inv_scale=values.inv_scale, limit=values.largest_norm, veto=veto,
            target=norm_target(self.config, values),
        )
        self.on_device.apply(factor, skip, lr=values.lr)
        host_factor, skipped = torch.stack([factor, skip]).cpu().unbind()
        if skipped:
            self.offload.discard()
            return norm, skip
        self._step += 1
        lr = torch.tensor(values.host.lr, dtype=torch.float64)
        for staged in self.offload.updates():
            self._update(staged, host_factor, lr)
        return norm, skip

    def _update(self, staged: StagedBucket, factor: torch.Tensor, lr: torch.Tensor) -> None:
        config, state = self.config, staged.state
        for gap in self._padding[id(staged.bucket)]:
            staged.weights[gap].zero_()  # else what the staging buffer held before would reach the device
        for settings, ranges in self._ranges[id(staged.bucket)]:
            weights, masters, gradients, first, second = (
                [flat[r] for r in ranges]
                for flat in (staged.weights, staged.masters, staged.gradient, state["exp_avg"], state["exp_avg_sq"])
            )
            adamw_(
                weights, masters, gradients, first, second, step=self._step, grad_scale=factor, skip=None,
                lr=lr * settings.lr_factor, beta1=config.beta1, beta2=config.beta2, eps=config.eps,
                weight_decay=settings.weight_decay,
            )

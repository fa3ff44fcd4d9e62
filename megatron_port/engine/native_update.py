"""The native engine's optimizer step: clip by the global norm, AdamW on the masters, round them into the weights.

Two providers: torch's AdamW, whose skipping and clipping the host decides, and the own multi-tensor kernel, which reads
loss scale, clip factor and overflow on the device, so that no step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megatron_port.config.schema import OptimizerConfig
from megatron_port.optim.gradients import RecordedGrad, global_grad_norm, global_square_norm
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.record import ParameterRecord


class Update(Protocol):
    """``state`` maps a master to {"step", "exp_avg", "exp_avg_sq"}; setting an entry loads it."""

    state: Any

    def step(
        self, grads: Sequence[RecordedGrad], ctx: ParallelContext, *, lr: float, scale: float, veto: torch.Tensor,
        limit: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply gradients that carry a factor ``scale``; nothing happens if their norm is not finite, above the
        finite ``limit``, or ``veto`` (float32 scalar on the device) is not zero.

        Returns the global L2 norm without the factor and before clipping, and whether nothing happened: scalars on
        the device.
        """

    def publish(self) -> None:
        """Round the masters into the weights that the forward pass uses."""


class TorchUpdate:
    """torch.optim.AdamW."""

    def __init__(
        self, parameters: Sequence[tuple[ParameterRecord, torch.nn.Parameter]], masters: Sequence[torch.Tensor],
        config: OptimizerConfig,
    ) -> None:
        self.config, self.masters = config, masters
        self.weights = [p for _, p in parameters]
        groups = [
            {"params": [m for (r, _), m in zip(parameters, masters) if r.decay is decay],
             "weight_decay": config.weight_decay if decay else 0.0}
            for decay in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps,
            foreach=True,
        )
        self.state: Any = self.optimizer.state

    def step(
        self, grads: Sequence[RecordedGrad], ctx: ParallelContext, *, lr: float, scale: float, veto: torch.Tensor,
        limit: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Update`."""
        if scale != 1.0:
            for _, grad in grads:
                grad.div_(scale)
        norm = global_grad_norm(grads, ctx)
        size, vetoed = torch.stack([norm.double(), veto.double()]).tolist()
        clip = self.config.clip_grad
        if vetoed or not size <= limit:
            return norm, torch.ones_like(veto)
        if 0.0 < clip < size:
            for _, grad in grads:
                grad.mul_(clip / (size + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for master, (_, grad) in zip(self.masters, grads):
            master.grad = grad
        self.optimizer.step()
        for master in self.masters:
            master.grad = None
        self.publish()
        return norm, veto

    @torch.no_grad()
    def publish(self) -> None:
        """See :class:`Update`."""
        for weight, master in zip(self.weights, self.masters):
            if weight.dtype != master.dtype:
                weight.copy_(master)


class OwnUpdate:
    """The kernel of ``backend.ops.optimizer``."""

    def __init__(
        self, parameters: Sequence[tuple[ParameterRecord, torch.nn.Parameter]], masters: Sequence[torch.Tensor],
        config: OptimizerConfig,
    ) -> None:
        from megatron_port.optim.fused import FusedAdamW

        self.config, self.masters = config, masters
        self.weights = [p for _, p in parameters]
        self.order = [[i for i, (r, _) in enumerate(parameters) if r.decay is decay] for decay in (True, False)]
        separate = any(p.dtype != m.dtype for p, m in zip(self.weights, masters))
        self.optimizer = FusedAdamW(
            [([self.weights[i].detach() for i in members] if separate else [], [masters[i] for i in members],
              config.weight_decay if decay else 0.0) for decay, members in zip((True, False), self.order)],
            betas=(config.beta1, config.beta2), eps=config.eps,
        )
        self.state: Any = self.optimizer.state

    @torch.no_grad()
    def step(
        self, grads: Sequence[RecordedGrad], ctx: ParallelContext, *, lr: float, scale: float, veto: torch.Tensor,
        limit: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Update`."""
        from megatron_port.backend.ops.optimizer import square_norm

        return self.optimizer.clipped_step(
            [[grads[i][1] for i in members] for members in self.order], lr=lr,
            square_norm=global_square_norm(grads, ctx, square_norm), max_norm=self.config.clip_grad,
            inv_scale=1.0 / scale, limit=limit, veto=veto,
        )

    @torch.no_grad()
    def publish(self) -> None:
        """See :class:`Update`."""
        for weight, master in zip(self.weights, self.masters):
            if weight.dtype != master.dtype:
                weight.copy_(master)


def make_update(
    provider: str, parameters: Sequence[tuple[ParameterRecord, torch.nn.Parameter]], masters: Sequence[torch.Tensor],
    config: OptimizerConfig,
) -> Update:
    """The update of a provider, ``own`` or ``torch``."""
    kind: type[OwnUpdate] | type[TorchUpdate] = OwnUpdate if provider == "own" else TorchUpdate
    return kind(parameters, masters, config)

"""The native engine's optimizer step: clip by the global norm, AdamW on this rank's pieces of the masters, round them
into its pieces of the weights.

Two providers: torch's AdamW, whose skipping and clipping the host decides, and the own multi-tensor kernel, which reads
loss scale, clip factor and overflow on the device, so that no step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megatron_port.config.schema import OptimizerConfig
from megatron_port.optim.sharded import Shard, ShardedParameters

SquareNorm = Callable[[list[torch.Tensor]], torch.Tensor] | None


class Update(Protocol):
    """Update of the masters. ``state`` maps a master (``Shard.master``) to {"step", "exp_avg", "exp_avg_sq"};
    setting an entry loads it."""

    state: Any
    square_norm: SquareNorm
    """Sum of squares of a list of tensors; None: torch's ops."""
    steps: int
    """Updates taken."""

    def step(
        self, square: torch.Tensor, *, lr: float, scale: float, veto: torch.Tensor, limit: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the pieces' gradients, which carry a factor ``scale``; nothing happens if their norm is not finite,
        above the finite ``limit``, or ``veto`` (float32 scalar on the device) is not zero.

        ``square``: squared global L2 norm of the gradients as they are, a scalar on the device.

        Returns the norm without the factor and before clipping, and whether nothing happened: scalars on the device.
        """


def _by_decay(pieces: Sequence[Shard]) -> list[list[Shard]]:
    return [[p for p in pieces if p.record.decay is decay] for decay in (True, False)]


class TorchUpdate:
    """Update by torch.optim.AdamW."""

    square_norm: SquareNorm = None

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig) -> None:
        self.config, self.sharded = config, sharded
        groups = [
            {"params": [p.master for p in pieces], "weight_decay": decay}
            for pieces, decay in zip(_by_decay(sharded.pieces), (config.weight_decay, 0.0)) if pieces
        ]
        # A replica may own nothing but padding; the optimizer wants something.
        self.optimizer = torch.optim.AdamW(
            groups or [{"params": [torch.zeros(1)]}], lr=config.lr, betas=(config.beta1, config.beta2),
            eps=config.eps, foreach=True,
        )
        self.state: Any = self.optimizer.state
        for piece in sharded.pieces:
            self.state[piece.master] = {
                "step": torch.tensor(0.0), "exp_avg": piece.exp_avg, "exp_avg_sq": piece.exp_avg_sq
            }
        self.steps = 0

    def step(
        self, square: torch.Tensor, *, lr: float, scale: float, veto: torch.Tensor, limit: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm = square.sqrt() / scale
        size, vetoed = torch.stack([norm.double(), veto.double()]).tolist()
        if vetoed or not size <= limit:
            return norm, torch.ones_like(veto)
        clip = self.config.clip_grad
        factor = (clip / (size + 1e-6) if 0.0 < clip < size else 1.0) / scale
        for piece in self.sharded.pieces:
            if factor != 1.0:
                piece.gradient.mul_(factor)
            piece.master.grad = piece.gradient
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.steps += 1
        for piece in self.sharded.pieces:
            piece.master.grad = None
        self.sharded.publish()
        return norm, veto


class OwnUpdate:
    """Update by the kernel of ``backend.ops.optimizer``."""

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig) -> None:
        from megatron_port.backend.ops.optimizer import square_norm
        from megatron_port.optim.fused import FusedAdamW

        self.config = config
        self.square_norm: SquareNorm = square_norm
        self.groups = _by_decay(sharded.pieces)
        separate = any(p.weight.dtype != p.master.dtype for p in sharded.pieces)
        self.optimizer = FusedAdamW(
            [([p.weight for p in pieces] if separate else [], [p.master for p in pieces], decay)
             for pieces, decay in zip(self.groups, (config.weight_decay, 0.0))],
            betas=(config.beta1, config.beta2), eps=config.eps, device=sharded.ctx.device,
            moments=[(p.exp_avg, p.exp_avg_sq) for pieces in self.groups for p in pieces],
        )
        self.state: Any = self.optimizer.state

    @property
    def steps(self) -> int:
        """Updates taken; reading it waits for the device."""
        return int(self.optimizer.step_count)

    @steps.setter
    def steps(self, value: int) -> None:
        self.optimizer.step_count.fill_(value)

    @torch.no_grad()
    def step(
        self, square: torch.Tensor, *, lr: float, scale: float, veto: torch.Tensor, limit: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.optimizer.clipped_step(
            [[p.gradient for p in pieces] for pieces in self.groups], lr=lr, square_norm=square,
            max_norm=self.config.clip_grad, inv_scale=1.0 / scale, limit=limit, veto=veto,
        )


def make_update(provider: str, sharded: ShardedParameters, config: OptimizerConfig) -> Update:
    """Return the update of a provider, ``own`` or ``torch``."""
    kind: type[OwnUpdate] | type[TorchUpdate] = OwnUpdate if provider == "own" else TorchUpdate
    return kind(sharded, config)

"""What an optimizer step of the native engine is, and one whose skipping and clipping the host decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.optim.bucket_memory import StateShard
from megatron_port.core.optim.gradients import clamp_, limited
from megatron_port.core.optim.rules import StepValues
from megatron_port.core.optim.sharded import ShardedParameters

SquareNorm = Callable[[list[torch.Tensor]], torch.Tensor] | None


class Update(Protocol):
    """Updates the masters and the state of ``ShardedParameters.pieces`` in place."""

    square_norm: SquareNorm
    """Squared norm of a list of tensors; None: torch's ops."""

    @property
    def steps(self) -> int:
        """Updates taken; reading it may wait for the device."""

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates, when masters and state have been loaded."""

    def step(
        self, square: torch.Tensor, values: StepValues, *, veto: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the pieces' gradients, which carry the loss scale; nothing happens if their norm is not finite or above
        its limit, or ``veto`` (float32 scalar on the device) is not zero.

        ``square``: squared global L2 norm of the gradients as they are, a scalar on the device.

        Returns the norm without the factor and before clipping, and whether nothing happened: scalars on the device.
        """


class HostUpdate(ABC):
    """An update whose skipping and clipping the host decides."""

    square_norm: SquareNorm = None

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig) -> None:
        self.config, self.sharded, self._steps = config, sharded, 0
        self.pieces: Sequence[StateShard] = sharded.pieces
        """Those whose state is on the device."""

    @property
    def steps(self) -> int:
        """Updates taken."""
        return self._steps

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates (:meth:`Update.restore`)."""
        self._steps = steps

    def step(
        self, square: torch.Tensor, values: StepValues, *, veto: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm, factor = self._decide(square, values, veto)
        if factor is None:
            return norm, torch.ones_like(veto)
        self._clip(self.pieces, factor)
        self._apply(values.host.lr)
        self._steps += 1
        self.sharded.publish()
        return norm, veto

    def _decide(
        self, square: torch.Tensor, values: StepValues, veto: torch.Tensor
    ) -> tuple[torch.Tensor, float | None]:
        """Return the norm without loss scale, a scalar on the device, and the factor that takes the loss scale from
        gradients and clips them; None: nothing is to happen."""
        scale = values.host.scale
        norm = square.sqrt() / scale
        size, vetoed = torch.stack([norm.double(), veto.double()]).tolist()
        if vetoed or not size <= values.host.largest_norm:
            return norm, None
        return norm, self._clip_factor(size, values) / scale

    def _clip(self, pieces: Sequence[StateShard], factor: float) -> None:
        """Multiply gradients by ``factor``, then clip their elements."""
        if factor != 1.0:
            for piece in pieces:
                piece.gradient.mul_(factor)
        if self.config.clip_value:
            clamp_((piece.gradient for piece in pieces), self.config.clip_value)

    def _clip_factor(self, norm: float, values: StepValues) -> float:
        """Factor of gradients of this norm, by ``clip_grad`` and ``clip_zscore``."""
        target, clip = norm, self.config.clip_grad
        if self.config.clip_zscore:
            target = limited(norm, values.host.norm_mean, values.host.norm_deviation, self.config.clip_zscore)
        if clip > 0.0:
            target = min(target, clip)
        return target / (norm + 1e-6) if target < norm else 1.0

    @abstractmethod
    def _apply(self, lr: float) -> None:
        """Update masters and state from the pieces' gradients, which are unscaled and clipped."""

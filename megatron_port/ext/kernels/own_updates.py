"""The native engine's updates by own kernels: of AdamW here, of rules with narrow state in ``fused_rule_update``.

No step waits for the device: learning rate, loss scale, clip factor and overflow are read there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.engine.host_update import SquareNorm, Update
from megatron_port.core.engine.native_update import UpdateRequest
from megatron_port.core.optim.bucket_memory import StateShard
from megatron_port.core.optim.gradients import clamp_, norm_target
from megatron_port.core.optim.rules import AdamW, OptimizerRule, StepValues, grouped
from megatron_port.core.registry import STEP_PARTS
from megatron_port.ext.kernels.fused_adamw import FusedAdamW
from megatron_port.ext.kernels.ops.optimizer import square_norm


class OwnUpdate:
    """Update of ``pieces`` by the kernel of ``ops.optimizer``. ``sums``: the flat gradients."""

    def __init__(
        self, pieces: Sequence[StateShard], config: OptimizerConfig, device: torch.device,
        sums: Sequence[torch.Tensor] = (),
    ) -> None:
        self.config, self.sums = config, sums
        self.square_norm: SquareNorm = square_norm
        groups = grouped(((p.record, p) for p in pieces), config.weight_decay)
        self.groups = list(groups.values())
        separate = any(p.weight.dtype != p.master.dtype for p in pieces)
        self.optimizer = FusedAdamW(
            [([p.weight for p in pieces] if separate else [], [p.master for p in pieces], settings.weight_decay,
              settings.lr_factor) for settings, pieces in groups.items()],
            betas=(config.beta1, config.beta2), eps=config.eps, device=device,
            moments=[(p.state["exp_avg"], p.state["exp_avg_sq"]) for pieces in self.groups for p in pieces],
        )

    @property
    def steps(self) -> int:
        """Updates taken; reading it waits for the device."""
        return int(self.optimizer.step_count)

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates (:meth:`Update.restore`)."""
        self.optimizer.step_count.fill_(steps)

    @torch.no_grad()
    def step(
        self, square: torch.Tensor, values: StepValues, *, veto: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.optimizer.clipped_step(
            self._gradients(), lr=values.lr, square_norm=square, max_norm=self.config.clip_grad,
            inv_scale=values.inv_scale, limit=values.largest_norm, veto=veto, target=norm_target(self.config, values),
            before=self._clamp if self.config.clip_value else None,
        )

    def _clamp(self, scale: torch.Tensor) -> None:
        clamp_(self.sums, self.config.clip_value, scale)

    def apply(self, factor: torch.Tensor, skip: torch.Tensor, *, lr: torch.Tensor) -> None:
        """Apply the pieces' gradients times ``factor`` unless ``skip`` is not 0: scalars on the device."""
        self.optimizer.step(self._gradients(), lr=lr, grad_scale=factor, skip=skip)

    def _gradients(self) -> list[list[torch.Tensor]]:
        return [[p.gradient for p in pieces] for pieces in self.groups]


def own_update(
    rule: OptimizerRule, asked: UpdateRequest, pieces: Sequence[StateShard], sums: Sequence[torch.Tensor] = ()
) -> Update | None:
    """Return the update of ``pieces`` by own kernels; None: the rule has none. ``sums``: their flat gradients."""
    if isinstance(rule, AdamW):
        return OwnUpdate(pieces, asked.config, asked.sharded.ctx.device, sums)
    made: Update | None = STEP_PARTS.function("own update of a narrow rule")(rule, asked, pieces, sums)
    return made

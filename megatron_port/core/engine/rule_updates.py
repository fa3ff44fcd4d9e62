"""The native engine's updates by rules other than AdamW, torch's ops on the device; the host decides about skipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.host_update import HostUpdate
from megatron_port.core.optim.bucket_memory import StateShard
from megatron_port.core.optim.rules import BlockRule, ElementwiseRule, GroupSettings, UpdateSettings, settings_in
from megatron_port.core.optim.sharded import ShardedParameters


def settings_of(
    config: OptimizerConfig, *, step: int, lr: float, seed: int
) -> Callable[[ParameterRecord], UpdateSettings]:
    """Return the hyperparameters of each parameter in update ``step``."""

    @cache
    def made(settings: GroupSettings) -> UpdateSettings:
        return UpdateSettings(
            step=step, lr=lr * settings.lr_factor, weight_decay=settings.weight_decay, beta1=config.beta1,
            beta2=config.beta2, eps=config.eps, seed=seed,
        )

    return lambda record: made(settings_in(record, config.weight_decay))


class RuleUpdate(HostUpdate):
    """An element-wise rule, or one of blocks, piece by piece."""

    def __init__(
        self, sharded: ShardedParameters, config: OptimizerConfig, rule: ElementwiseRule | BlockRule, *, seed: int
    ) -> None:
        super().__init__(sharded, config)
        self.rule, self.seed = rule, seed

    def _apply(self, lr: float) -> None:
        self._update(self.pieces, lr)

    @torch.no_grad()
    def _update(self, pieces: Sequence[StateShard], lr: float) -> None:
        settings = settings_of(self.config, step=self.steps + 1, lr=lr, seed=self.seed)
        for p in pieces:
            self.rule.update_piece(p, settings(p.record))

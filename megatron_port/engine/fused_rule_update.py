"""The native engine's updates by AdamW with narrow moments and by Lion: own kernels, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_port.backend.ops.narrow_adamw import adamw_8bit_, adamw_bf16_, lion_
from megatron_port.backend.ops.optimizer import adamw_, clip_factor, square_norm
from megatron_port.config.schema import OptimizerConfig
from megatron_port.engine.host_update import SquareNorm
from megatron_port.optim.bucket_memory import StateShard
from megatron_port.optim.clipping import clamp_, norm_target
from megatron_port.optim.elementwise import Lion
from megatron_port.optim.narrow_adamw import FIRST, SECOND, AdamW8bit, AdamWBf16, code_values, logical_range
from megatron_port.optim.parameter_groups import GroupSettings, grouped
from megatron_port.optim.rules import OptimizerRule
from megatron_port.optim.sharded import ShardedParameters
from megatron_port.optim.step_values import StepValues

FUSED_RULES = (AdamWBf16, AdamW8bit, Lion)
"""Rules that own kernels update, beside AdamW."""
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Update of some tensors by (learning rate, factor of gradients, whether to write nothing)."""


class FusedRuleUpdate:
    """Update of ``sharded.pieces`` by the kernels of ``backend.ops.narrow_adamw``."""

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig, *, seed: int) -> None:
        self.sharded, self.config = sharded, config
        self.square_norm: SquareNorm = square_norm
        self._step = torch.zeros((), dtype=torch.int64, device=sharded.ctx.device)
        groups = grouped(((p.record, p) for p in sharded.pieces), config.weight_decay)
        self._calls = [
            call for settings, pieces in groups.items() for call in self._calls_of(sharded.rule, settings, pieces, seed)
        ]

    @property
    def steps(self) -> int:
        """Updates taken; reading it waits for the device."""
        return int(self._step)

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates (:meth:`Update.restore`)."""
        self._step.fill_(steps)

    @torch.no_grad()
    def step(
        self, square: torch.Tensor, values: StepValues, *, veto: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factor, skip, norm = clip_factor(
            square, max_norm=self.config.clip_grad, inv_scale=values.inv_scale, limit=values.largest_norm, veto=veto,
            target=norm_target(self.config, values),
        )
        if self.config.clip_value:
            clamp_((bucket.sums for bucket in self.sharded.trained), self.config.clip_value, factor)
        # An update has the number of steps taken, plus one; a skipped one writes nothing whatever its number.
        self._step.add_(skip == 0)
        for call in self._calls:
            call(values.lr, factor, skip)
        return norm, skip

    def _calls_of(
        self, rule: OptimizerRule, settings: GroupSettings, pieces: Sequence[StateShard], seed: int
    ) -> list[Call]:
        """Return the calls that update one group's pieces, which share weight decay and learning rate."""
        if isinstance(rule, Lion):
            return [self._lion(settings, pieces)]
        if isinstance(rule, AdamWBf16):
            return [self._bf16(settings, pieces, seed)]
        assert isinstance(rule, AdamW8bit)
        narrow = [p for p in pieces if rule.is_narrow(p.record)]
        wide = [p for p in pieces if not rule.is_narrow(p.record)]
        calls = [self._eight_bits(settings, narrow)] if narrow else []
        return [*calls, self._wide(settings, wide)] if wide else calls

    def _lion(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> Call:
        lists, c = _lists(pieces), self.config
        return lambda lr, factor, skip: lion_(
            *lists, _state(pieces, FIRST), grad_scale=factor, skip=skip, lr=lr * settings.lr_factor, beta1=c.beta1,
            beta2=c.beta2, weight_decay=settings.weight_decay,
        )

    def _bf16(self, settings: GroupSettings, pieces: Sequence[StateShard], seed: int) -> Call:
        lists, c = _lists(pieces), self.config
        places = [logical_range(p.record, p.start, seed) for p in pieces]
        return lambda lr, factor, skip: adamw_bf16_(
            *lists, _state(pieces, FIRST), _state(pieces, SECOND), places, step=self._step, grad_scale=factor,
            skip=skip, lr=lr * settings.lr_factor, beta1=c.beta1, beta2=c.beta2, eps=c.eps,
            weight_decay=settings.weight_decay,
        )

    def _eight_bits(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> Call:
        lists, c, device = _lists(pieces), self.config, self._step.device
        state = [_state(pieces, f"{kind}_{part}") for kind in (FIRST, SECOND) for part in ("codes", "scale")]
        return lambda lr, factor, skip: adamw_8bit_(
            *lists, *state, signed_values=code_values(True, device), unsigned_values=code_values(False, device),
            step=self._step, grad_scale=factor, skip=skip, lr=lr * settings.lr_factor, beta1=c.beta1, beta2=c.beta2,
            eps=c.eps, weight_decay=settings.weight_decay,
        )

    def _wide(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> Call:
        lists, c = _lists(pieces), self.config
        return lambda lr, factor, skip: adamw_(
            *lists, _state(pieces, FIRST), _state(pieces, SECOND), step=self._step, grad_scale=factor, skip=skip,
            lr=lr * settings.lr_factor, beta1=c.beta1, beta2=c.beta2, eps=c.eps, weight_decay=settings.weight_decay,
        )


def _lists(pieces: Sequence[StateShard]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Weights (none where the masters are the weights), masters and gradients."""
    separate = any(p.weight.dtype != p.master.dtype for p in pieces)
    return [p.weight for p in pieces] if separate else [], [p.master for p in pieces], [p.gradient for p in pieces]


def _state(pieces: Sequence[StateShard], kind: str) -> list[torch.Tensor]:
    return [p.state[kind] for p in pieces]

"""The native engine's updates by AdamW with narrow moments and by Lion: own kernels, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatchmethod
from typing import TYPE_CHECKING

import torch

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.engine.native_update import SquareNorm, Update, UpdateRequest
from megatron_port.core.optim.buckets import StateShard
from megatron_port.core.optim.gradients import clamp_, step_factor
from megatron_port.core.optim.rules import (
    AdamW,
    GroupSettings,
    OptimizerRule,
    StepValues,
    grouped,
)
from megatron_port.ext.kernels.kernels import load as load_kernels
from megatron_port.ext.kernels.lion import Lion
from megatron_port.ext.kernels.ops.optimizer import (
    adamw_,
    adamw_8bit_,
    adamw_bf16_,
    lion_,
    square_norm,
)

if TYPE_CHECKING:
    from megatron_port.core.optim.buckets import StateShard
from megatron_port.ext.kernels.narrow_adamw import FIRST, SECOND, AdamW8bit, AdamWBf16, code_values, logical_range

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]
"""Update of some tensors by (learning rate, factor of gradients, whether to write nothing)."""


class FusedCalls:
    """Makes the calls that update pieces by a rule that has kernels.

    Args:
        step: number of the update, int64 scalar on the pieces' device.
        seed: of the run.
        separate: weights are other memory than masters, as wide or not.
    """

    def __init__(
        self, rule: OptimizerRule, config: OptimizerConfig, step: torch.Tensor, *, seed: int, separate: bool
    ) -> None:
        self.rule, self.config, self._step, self.seed, self.separate = rule, config, step, seed, separate

    def of(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        """Return the calls for one group's pieces, which share weight decay and learning rate."""
        return self._of(self.rule, settings, pieces)

    @singledispatchmethod
    def _of(self, rule: OptimizerRule, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        raise TypeError(f"{type(rule).__name__} has no kernel")

    @_of.register
    def _(self, rule: Lion, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        return [self._lion(settings, pieces)]

    @_of.register
    def _(self, rule: AdamWBf16, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        return [self._bf16(settings, pieces)]

    @_of.register
    def _(self, rule: AdamW, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        return [self._wide(settings, pieces)]

    @_of.register
    def _(self, rule: AdamW8bit, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        narrow = [p for p in pieces if rule.is_narrow(p.record)]
        wide = [p for p in pieces if not rule.is_narrow(p.record)]
        calls = [self._eight_bits(settings, narrow)] if narrow else []
        return [*calls, self._wide(settings, wide)] if wide else calls

    def _lists(
        self, pieces: Sequence[StateShard]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Weights (none where the masters are the weights), masters and gradients."""
        weights = [p.weight for p in pieces] if self.separate else []
        return weights, [p.master for p in pieces], [p.gradient for p in pieces]

    def _lion(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> Call:
        lists, c = self._lists(pieces), self.config
        return lambda lr, factor, skip: lion_(
            *lists, _state(pieces, FIRST), grad_scale=factor, skip=skip, lr=lr * settings.lr_factor, beta1=c.beta1,
            beta2=c.beta2, weight_decay=settings.weight_decay,
        )

    def _bf16(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> Call:
        lists, c = self._lists(pieces), self.config
        places = [logical_range(p.record, p.start, self.seed) for p in pieces]
        return lambda lr, factor, skip: adamw_bf16_(
            *lists, _state(pieces, FIRST), _state(pieces, SECOND), places, step=self._step, grad_scale=factor,
            skip=skip, lr=lr * settings.lr_factor, beta1=c.beta1, beta2=c.beta2, eps=c.eps,
            weight_decay=settings.weight_decay,
        )

    def _eight_bits(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> Call:
        lists, c, device = self._lists(pieces), self.config, self._step.device
        state = [_state(pieces, f"{kind}_{part}") for kind in (FIRST, SECOND) for part in ("codes", "scale")]
        return lambda lr, factor, skip: adamw_8bit_(
            *lists, *state, signed_values=code_values(True, device), unsigned_values=code_values(False, device),
            step=self._step, grad_scale=factor, skip=skip, lr=lr * settings.lr_factor, beta1=c.beta1, beta2=c.beta2,
            eps=c.eps, weight_decay=settings.weight_decay,
        )

    def _wide(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> Call:
        lists, c = self._lists(pieces), self.config
        return lambda lr, factor, skip: adamw_(
            *lists, _state(pieces, FIRST), _state(pieces, SECOND), step=self._step, grad_scale=factor, skip=skip,
            lr=lr * settings.lr_factor, beta1=c.beta1, beta2=c.beta2, eps=c.eps, weight_decay=settings.weight_decay,
        )


def _state(pieces: Sequence[StateShard], kind: str) -> list[torch.Tensor]:
    return [p.state[kind] for p in pieces]


class FusedRuleUpdate:
    """Update of ``pieces`` by the kernels of ``kernels.ops.optimizer``. ``sums``: the flat gradients."""

    def __init__(
        self, pieces: Sequence[StateShard], rule: OptimizerRule, config: OptimizerConfig, device: torch.device, *,
        seed: int, sums: Sequence[torch.Tensor] = (),
    ) -> None:
        self.config, self.sums = config, sums
        self.square_norm: SquareNorm = square_norm
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        separate = any(p.weight.dtype != p.master.dtype for p in pieces)
        calls = FusedCalls(rule, config, self._step, seed=seed, separate=separate)
        groups = grouped(((p.record, p) for p in pieces), config.weight_decay)
        self._calls = [call for settings, pieces in groups.items() for call in calls.of(settings, pieces)]

    @property
    def steps(self) -> int:
        """Updates taken; reading it waits for the device."""
        return int(self._step)

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates (:meth:`Update.restore`)."""
        self._step.fill_(steps)

    @torch.no_grad()
    def step(
        self, square: torch.Tensor, values: StepValues, *, skip: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factor, skip, norm = step_factor(self.config, square, values, skip)
        if self.config.clip_value:
            clamp_(self.sums, self.config.clip_value, factor)
        self.apply(factor, skip, lr=values.lr)
        return norm, skip

    def apply(self, factor: torch.Tensor, skip: torch.Tensor, *, lr: torch.Tensor) -> None:
        """Apply the pieces' gradients times ``factor`` unless ``skip`` is not 0: scalars on the device."""
        # An update has the number of steps taken, plus one; a skipped one writes nothing whatever its number.
        self._step.add_(skip == 0)
        for call in self._calls:
            call(lr, factor, skip)


def narrow_update(
    rule: OptimizerRule, asked: UpdateRequest, pieces: Sequence[StateShard], sums: Sequence[torch.Tensor] = ()
) -> Update | None:
    """Return the update of ``pieces`` by the kernel of a rule that is not AdamW; None: it has none. ``sums``: their
    flat gradients."""
    if not isinstance(rule, (AdamWBf16, AdamW8bit, Lion)):
        return None
    return FusedRuleUpdate(pieces, rule, asked.config, asked.sharded.ctx.device, seed=asked.seed, sums=sums)


def host_calls(rule: OptimizerRule, asked: UpdateRequest, step: torch.Tensor) -> FusedCalls:
    """Return what updates pieces in host memory by own kernels for CPUs. ``step``: number of the update, int64.

    Raises:
        EnvironmentFault: the kernels are not built for this machine's CPU.
    """
    if asked.sharded.ctx.device.type != "cpu":  # else the provider has loaded them
        load_kernels("cpu")
    return FusedCalls(rule, asked.config, step, seed=asked.seed, separate=True)

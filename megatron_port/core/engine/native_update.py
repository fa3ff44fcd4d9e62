"""The native engine's optimizer update in torch's ops: AdamW, element-wise and block-wise rules.

Here the host decides about skipping and clipping; ``kernels.own_updates`` has updates that decide on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, singledispatch
from typing import NamedTuple, Protocol

import torch

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.errors import ConfigError
from megatron_port.core.optim.buckets import StateShard
from megatron_port.core.optim.gradients import clamp_, limited
from megatron_port.core.optim.rules import (
    AdamW,
    BlockRule,
    ElementwiseRule,
    GroupSettings,
    OptimizerRule,
    StepValues,
    UpdateSettings,
    grouped,
    settings_in,
)
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.core.registry import STEP_PARTS

SquareNorm = Callable[[list[torch.Tensor]], torch.Tensor] | None


class Update(Protocol):
    """Updates the masters and the state of ``ShardedParameters.pieces`` in place."""

    square_norm: SquareNorm
    """Squared norm of a list of tensors; None: torch's ops."""

    @property
    def steps(self) -> int:
        """Number of updates applied; reading it may wait for the device."""

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates, when masters and state have been loaded."""

    def step(
        self, square: torch.Tensor, values: StepValues, *, skip: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Update with the pieces' gradients, which carry the loss scale. The update is skipped if their norm is not
        finite or above its limit, or ``skip`` (float32 scalar on the device) is not zero.

        ``square``: squared global L2 norm of the gradients as they are, a scalar on the device.

        Returns the norm, unscaled and before clipping, and 1.0 if the update was skipped, else 0.0: scalars on the
        device.
        """


class HostUpdate(ABC):
    """An update whose skipping and clipping the host decides."""

    square_norm: SquareNorm = None

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig) -> None:
        self.config, self.sharded, self._steps = config, sharded, 0
        self.pieces: Sequence[StateShard] = sharded.pieces
        """Shards whose state is on the device."""

    @property
    def steps(self) -> int:
        """Number of updates applied."""
        return self._steps

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates (:meth:`Update.restore`)."""
        self._steps = steps

    def step(
        self, square: torch.Tensor, values: StepValues, *, skip: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm, factor = self._decide(square, values, skip)
        if factor is None:
            return norm, torch.ones_like(skip)
        self._clip(self.pieces, factor)
        self._apply(values.host.lr)
        self._steps += 1
        self.sharded.copy_masters_to_weights()
        return norm, skip

    def _decide(
        self, square: torch.Tensor, values: StepValues, skip: torch.Tensor
    ) -> tuple[torch.Tensor, float | None]:
        """Return the norm without loss scale, a scalar on the device, and the factor that unscales and clips gradients;
        None: the update is skipped."""
        scale = values.host.scale
        norm = square.sqrt() / scale
        size, skipped = torch.stack([norm.double(), skip.double()]).tolist()
        if skipped or not size <= values.host.largest_norm:
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
        """Return the clipping factor of gradients of this norm, by ``clip_grad`` and ``clip_zscore``."""
        target, clip = norm, self.config.clip_grad
        if self.config.clip_zscore:
            target = limited(norm, values.host.norm_mean, values.host.norm_deviation, self.config.clip_zscore)
        if clip > 0.0:
            target = min(target, clip)
        return target / (norm + 1e-6) if target < norm else 1.0

    @abstractmethod
    def _apply(self, lr: float) -> None:
        """Update masters and state from the pieces' gradients, which are unscaled and clipped."""


def settings_of(
    config: OptimizerConfig, *, step: int, lr: float, seed: int
) -> Callable[[ParameterRecord], UpdateSettings]:
    """Return a function from a parameter's record to its hyperparameters in update ``step``."""

    @cache
    def made(settings: GroupSettings) -> UpdateSettings:
        return UpdateSettings(
            step=step, lr=lr * settings.lr_factor, weight_decay=settings.weight_decay, beta1=config.beta1,
            beta2=config.beta2, eps=config.eps, seed=seed,
        )

    return lambda record: made(settings_in(record, config.weight_decay))


class RuleUpdate(HostUpdate):
    """Update by an element-wise or block-wise rule, piece by piece."""

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


# An update clips by the global norm, updates this rank's shards of masters and state by the rule, and copies the
# masters to its shards of the weights.
#
# AdamW has two providers: torch's, and this project's multi-tensor kernel (``kernels.own_updates``), which reads
# learning rate, loss scale, clip factor and overflow on the device, so that no step waits for it. A kind of rule that
# is not the core's registers its own update (``device_update.register``).

class TorchUpdate(HostUpdate):
    """Update by torch.optim.AdamW."""

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig) -> None:
        super().__init__(sharded, config)
        found = grouped(((p.record, p.master) for p in sharded.pieces), config.weight_decay)
        groups = [{"params": masters, **settings._asdict()} for settings, masters in found.items()]
        # A replica may own nothing but padding; torch refuses an empty list.
        nothing = [{"params": [torch.zeros(1)], "lr_factor": 1.0}]
        self.optimizer = torch.optim.AdamW(
            groups or nothing, lr=config.lr, betas=(config.beta1, config.beta2),
            eps=config.eps, foreach=True,
        )
        self.restore(0)

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates (:meth:`Update.restore`)."""
        super().restore(steps)
        for piece in self.sharded.pieces:
            self.optimizer.state[piece.master] = {
                "step": torch.tensor(float(steps)), **{kind: piece.state[kind] for kind in AdamW.KINDS}
            }

    def _apply(self, lr: float) -> None:
        for piece in self.sharded.pieces:
            piece.master.grad = piece.gradient
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self.optimizer.step()
        for piece in self.sharded.pieces:
            piece.master.grad = None


class UpdateRequest(NamedTuple):
    """Arguments of :func:`make_update`. ``provider``: own (this project's kernels) | torch; ``seed``: the run's."""

    provider: str
    sharded: ShardedParameters
    config: OptimizerConfig
    seed: int


def make_update(provider: str, sharded: ShardedParameters, config: OptimizerConfig, *, seed: int = 0) -> Update:
    """Return the update of ``sharded.rule`` by a provider: ``own`` (this project's kernels, where the rule has one) or
    ``torch``. ``seed``: the run's.

    Raises:
        ConfigError: the rule is of a kind that this engine has no update for.
        EnvironmentFault: the kernel that updates in host memory is not built for this machine's CPU.
    """
    asked, rule = UpdateRequest(provider, sharded, config, seed), sharded.rule.formula
    made: Update | None = None
    if sharded.updated_by:
        made = STEP_PARTS.function(sharded.updated_by)(rule, asked)
    elif provider == "own":
        sums = [bucket.sums for bucket in sharded.trained]
        made = STEP_PARTS.function("own update")(rule, asked, sharded.pieces, sums)
    return device_update(rule, asked) if made is None else made


@singledispatch
def device_update(rule: OptimizerRule, asked: UpdateRequest) -> Update:
    """Return the update of state on the device by a rule, in torch's ops.

    Raises:
        ConfigError: there is none for its kind.
    """
    raise ConfigError(
        f'optimizer.name "{asked.config.name}": {type(rule).__name__} is no rule that engine native has an update for; '
        "derive it from ElementwiseRule, BlockRule, SumsRule or MatrixRule (docs/optimizers.md)"
    )


@device_update.register
def _adamw(rule: AdamW, asked: UpdateRequest) -> Update:
    return TorchUpdate(asked.sharded, asked.config)


@device_update.register(ElementwiseRule)
@device_update.register(BlockRule)
def _by_piece(rule: ElementwiseRule | BlockRule, asked: UpdateRequest) -> Update:
    return RuleUpdate(asked.sharded, asked.config, rule, seed=asked.seed)

"""The native engine's optimizer step: clip by the global norm, update this rank's pieces of the masters and their state
by the optimizer rule, round the masters into its pieces of the weights.

AdamW has two providers: torch's, whose skipping and clipping the host decides, and the own multi-tensor kernel, which
reads learning rate, loss scale, clip factor and overflow on the device, so that no step waits for it. Other rules are
updated by ``engine.rule_updates``, the host deciding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import torch

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.engine.host_update import HostUpdate, SquareNorm, Update
from megatron_port.core.engine.rule_updates import MatrixUpdate, RuleUpdate, SumsUpdate
from megatron_port.core.errors import ConfigError
from megatron_port.core.optim.bucket_memory import StateShard
from megatron_port.core.optim.gradients import clamp_, norm_target
from megatron_port.core.optim.rules import AdamW, BlockRule, ElementwiseRule, Lion, OptimizerRule, StepValues, grouped
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.core.optim.sums import SumsRule
from megatron_port.ext.kernels.fused_rule_update import FusedRuleUpdate
from megatron_port.ext.kernels.kernels import load as load_kernels
from megatron_port.ext.kernels.ops.optimizer import square_norm
from megatron_port.ext.memory.offload import Offload
from megatron_port.ext.memory.offloaded_update import OffloadedRuleUpdate, OffloadedUpdate
from megatron_port.ext.rules.fused import FusedAdamW
from megatron_port.ext.rules.matrices import MatrixRule
from megatron_port.ext.rules.narrow_adamw import AdamW8bit, AdamWBf16


class TorchUpdate(HostUpdate):
    """torch.optim.AdamW."""

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig) -> None:
        super().__init__(sharded, config)
        found = grouped(((p.record, p.master) for p in sharded.pieces), config.weight_decay)
        groups = [{"params": masters, **settings._asdict()} for settings, masters in found.items()]
        # A replica may own nothing but padding; the optimizer wants something.
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


class OwnUpdate:
    """Update of ``pieces`` by the kernel of ``kernels.ops.optimizer``. ``sums``: the flat gradients."""

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


class UpdateRequest(NamedTuple):
    """What an update is made for. ``provider``: own | torch, where there are kernels; ``seed``: of the run."""

    provider: str
    sharded: ShardedParameters
    config: OptimizerConfig
    seed: int


def make_update(provider: str, sharded: ShardedParameters, config: OptimizerConfig, *, seed: int = 0) -> Update:
    """Return the update of ``sharded.rule``; where there are kernels, that of a provider, ``own`` or ``torch``.
    ``seed``: of the run.

    Raises:
        ConfigError: the rule is of a kind that this engine has no update for.
        EnvironmentFault: the kernel that updates in host memory is not built for this machine's CPU.
    """
    asked, rule = UpdateRequest(provider, sharded, config, seed), sharded.rule.formula
    return device_update(rule, asked) if sharded.offload is None else host_update(rule, asked, sharded.offload)


# -- on the device, by the kind of rule ------------------------------------------------------------------------------


@singledispatch
def device_update(rule: OptimizerRule, asked: UpdateRequest) -> Update:
    """Return the update of state on the device by a rule. Raises ConfigError: there is none for its kind."""
    raise ConfigError(
        f'optimizer.name "{asked.config.name}": {type(rule).__name__} is no rule that engine native has an update for; '
        "derive it from ElementwiseRule, BlockRule, SumsRule or MatrixRule (docs/optimizers.md)"
    )


@device_update.register
def _adamw(rule: AdamW, asked: UpdateRequest) -> Update:
    _, sharded, config, _ = asked
    if asked.provider != "own":
        return TorchUpdate(sharded, config)
    return OwnUpdate(sharded.pieces, config, sharded.ctx.device, _sums(sharded))


@device_update.register(AdamWBf16)
@device_update.register(AdamW8bit)
@device_update.register(Lion)
def _fused(rule: Any, asked: UpdateRequest) -> Update:
    provider, sharded, config, seed = asked
    if provider != "own":
        return _by_piece(rule, asked)
    return FusedRuleUpdate(sharded.pieces, rule, config, sharded.ctx.device, seed=seed, sums=_sums(sharded))


@device_update.register(ElementwiseRule)
@device_update.register(BlockRule)
def _by_piece(rule: ElementwiseRule | BlockRule, asked: UpdateRequest) -> Update:
    return RuleUpdate(asked.sharded, asked.config, rule, seed=asked.seed)


@device_update.register
def _by_sums(rule: SumsRule, asked: UpdateRequest) -> Update:
    return SumsUpdate(asked.sharded, asked.config, rule, seed=asked.seed)


@device_update.register
def _by_matrix(rule: MatrixRule, asked: UpdateRequest) -> Update:
    return MatrixUpdate(asked.sharded, asked.config, rule, seed=asked.seed)


def _sums(sharded: ShardedParameters) -> list[torch.Tensor]:
    return [bucket.sums for bucket in sharded.trained]


# -- in host memory --------------------------------------------------------------------------------------------------


@singledispatch
def host_update(rule: OptimizerRule, asked: UpdateRequest, offload: Offload) -> Update:
    """Return the update of offloaded state by a rule: by own kernels, or without one in torch's ops.

    Raises:
        ConfigError: the rule needs more than the elements of one bucket, or is AdamW and the own optimizer kernel is
            not what the device uses.
        EnvironmentFault: the kernel is not built for this machine's CPU.
    """
    raise ConfigError(
        f'offload.optimizer "{offload.config.optimizer}" with optimizer.name "{asked.config.name}": the host updates '
        f"one bucket after another, and {type(rule).__name__} needs whole matrices or sums over them; use "
        'optimizer.name = "adamw", "lion", "sgd" or "adagrad", or no offload'
    )


@host_update.register
def _adamw_on_host(rule: AdamW, asked: UpdateRequest, offload: Offload) -> Update:
    provider, sharded, config, _ = asked
    if provider != "own":
        raise ConfigError(
            f'offload.optimizer "{offload.config.optimizer}" updates by the own AdamW kernel, and backend.optimizer is '
            f'"{provider}" here; build the kernels (make kernels), and set backend.optimizer = "own"'
        )
    return _fused_on_host(OwnUpdate(_on_device(sharded), config, sharded.ctx.device), asked, offload)


@host_update.register(AdamWBf16)
@host_update.register(AdamW8bit)
@host_update.register(Lion)
def _kernel_on_host(rule: Any, asked: UpdateRequest, offload: Offload) -> Update:
    provider, sharded, config, seed = asked
    if provider != "own":
        return _by_piece_on_host(rule, asked, offload)
    update = FusedRuleUpdate(_on_device(sharded), rule, config, sharded.ctx.device, seed=seed)
    return _fused_on_host(update, asked, offload)


@host_update.register(ElementwiseRule)
@host_update.register(BlockRule)
def _by_piece_on_host(rule: ElementwiseRule | BlockRule, asked: UpdateRequest, offload: Offload) -> Update:
    _, sharded, config, seed = asked
    return OffloadedRuleUpdate(sharded, offload, config, _on_device(sharded), rule, seed=seed)


def _fused_on_host(on_device: OwnUpdate | FusedRuleUpdate, asked: UpdateRequest, offload: Offload) -> Update:
    if asked.sharded.ctx.device.type != "cpu":  # else the provider has loaded them
        load_kernels("cpu")
    return OffloadedUpdate(on_device, asked.sharded, offload, asked.config, seed=asked.seed)


def _on_device(sharded: ShardedParameters) -> list[StateShard]:
    return [p for b, p in zip(sharded.owners, sharded.pieces) if not b.offloaded]

"""The native engine's optimizer step: clip by the global norm, update this rank's pieces of the masters and their state
by the optimizer rule, round the masters into its pieces of the weights.

AdamW has two providers: torch's, whose skipping and clipping the host decides, and the own multi-tensor kernel, which
reads learning rate, loss scale, clip factor and overflow on the device, so that no step waits for it. Other rules are
updated by ``engine.rule_updates``, the host deciding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_port.backend.kernels import load as load_kernels
from megatron_port.backend.ops.optimizer import square_norm
from megatron_port.config.schema import OptimizerConfig
from megatron_port.engine.fused_rule_update import FUSED_RULES, FusedRuleUpdate
from megatron_port.engine.host_update import HostUpdate, SquareNorm, Update
from megatron_port.engine.rule_updates import MatrixUpdate, RuleUpdate, SumsUpdate
from megatron_port.errors import ConfigError
from megatron_port.optim.bucket_memory import StateShard
from megatron_port.optim.clipping import clamp_, norm_target
from megatron_port.optim.fused import FusedAdamW
from megatron_port.optim.matrices import MatrixRule
from megatron_port.optim.offload import Offload
from megatron_port.optim.parameter_groups import grouped
from megatron_port.optim.rules import AdamW, BlockRule, ElementwiseRule
from megatron_port.optim.sharded import ShardedParameters
from megatron_port.optim.step_values import StepValues
from megatron_port.optim.sums import SumsRule


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
    """Update of ``pieces`` by the kernel of ``backend.ops.optimizer``. ``sums``: the flat gradients."""

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


def offloaded_update(
    provider: str, sharded: ShardedParameters, offload: Offload, config: OptimizerConfig, *, seed: int
) -> Update:
    """Return the update of offloaded state: by own kernels, or by a rule without one in torch's ops.

    Raises:
        ConfigError: the rule needs more than the elements of one bucket, or is AdamW and the own optimizer kernel is
            not what the device uses.
        EnvironmentFault: the kernel is not built for this machine's CPU.
    """
    from megatron_port.engine.offloaded_update import OffloadedRuleUpdate, OffloadedUpdate

    rule, device = sharded.rule.formula, sharded.ctx.device
    if not isinstance(rule, (AdamW, ElementwiseRule, BlockRule)):
        raise ConfigError(
            f'offload.optimizer "{offload.config.optimizer}" with optimizer.name "{config.name}": the host updates '
            f"one bucket after another, and {type(rule).__name__} needs whole matrices or sums over them; use "
            'optimizer.name = "adamw", "lion", "sgd" or "adagrad", or no offload'
        )
    on_device = [p for b, p in zip(sharded.owners, sharded.pieces) if not b.offloaded]
    fused = provider == "own" and isinstance(rule, (AdamW, *FUSED_RULES))
    if not fused and isinstance(rule, (ElementwiseRule, BlockRule)):
        return OffloadedRuleUpdate(sharded, offload, config, on_device, rule, seed=seed)
    if not fused:
        raise ConfigError(
            f'offload.optimizer "{offload.config.optimizer}" updates by the own AdamW kernel, and backend.optimizer is '
            f'"{provider}" here; build the kernels (make kernels), and set backend.optimizer = "own"'
        )
    if device.type != "cpu":  # else the provider has loaded them
        load_kernels("cpu")
    if isinstance(rule, AdamW):
        update: OwnUpdate | FusedRuleUpdate = OwnUpdate(on_device, config, device)
    else:
        update = FusedRuleUpdate(on_device, rule, config, device, seed=seed)
    return OffloadedUpdate(update, sharded, offload, config, seed=seed)


def make_update(provider: str, sharded: ShardedParameters, config: OptimizerConfig, *, seed: int = 0) -> Update:
    """Return the update of ``sharded.rule``; where there are kernels, that of a provider, ``own`` or ``torch``.
    ``seed``: of the run.

    Raises:
        ConfigError: the rule is of a kind that this engine has no update for.
    """
    rule = sharded.rule.formula
    if sharded.offload is not None:
        return offloaded_update(provider, sharded, sharded.offload, config, seed=seed)
    sums, device = [bucket.sums for bucket in sharded.trained], sharded.ctx.device
    if isinstance(rule, AdamW):
        return OwnUpdate(sharded.pieces, config, device, sums) if provider == "own" else TorchUpdate(sharded, config)
    if provider == "own" and isinstance(rule, FUSED_RULES):
        return FusedRuleUpdate(sharded.pieces, rule, config, device, seed=seed, sums=sums)
    if isinstance(rule, (ElementwiseRule, BlockRule)):
        return RuleUpdate(sharded, config, rule, seed=seed)
    if isinstance(rule, SumsRule):
        return SumsUpdate(sharded, config, rule, seed=seed)
    if isinstance(rule, MatrixRule):
        return MatrixUpdate(sharded, config, rule, seed=seed)
    raise ConfigError(
        f'optimizer.name "{config.name}": {type(rule).__name__} is no rule that engine native has an update for; '
        "derive it from ElementwiseRule, BlockRule, SumsRule or MatrixRule (docs/optimizers.md)"
    )

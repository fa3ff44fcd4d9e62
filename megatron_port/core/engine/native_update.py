"""The native engine's optimizer step: clip by the global norm, update this rank's pieces of the masters and their state
by the optimizer rule, round the masters into its pieces of the weights.

AdamW has two providers: torch's, whose skipping and clipping the host decides, and the own multi-tensor kernel, which
reads learning rate, loss scale, clip factor and overflow on the device, so that no step waits for it
(``kernels.own_updates``). Rules of elements and blocks are updated by ``RuleUpdate``, the host deciding. A kind of rule
that is not the core's brings its own update (``device_update.register``).
"""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

import torch

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.engine.host_update import HostUpdate, Update
from megatron_port.core.engine.rule_updates import RuleUpdate
from megatron_port.core.errors import ConfigError
from megatron_port.core.optim.rules import AdamW, BlockRule, ElementwiseRule, OptimizerRule, grouped
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.core.registry import STEP_PARTS


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

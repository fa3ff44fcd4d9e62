"""Rules that need sums over rows, columns and matrices, and the native engine's update by them."""

from __future__ import annotations

from abc import abstractmethod

import torch

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.host_update import HostUpdate, Update
from megatron_port.core.engine.native_update import UpdateRequest, device_update
from megatron_port.core.engine.rule_updates import settings_of
from megatron_port.core.optim.rules import OptimizerRule, StateKind, UpdateSettings
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.core.optim.sums import LogicalTensor, Rounds, logical_tensors, run_rounds


class SumsRule(OptimizerRule):
    """A rule whose update needs sums or maxima over rows, columns or matrices of the logical tensor."""

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the names of :meth:`state`."""
        return tuple(kind.name for kind in self.state(record))

    @abstractmethod
    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return the state tensors of a parameter."""

    @abstractmethod
    def rounds(self, tensor: LogicalTensor, settings: UpdateSettings) -> Rounds:
        """Update the masters and the state of one parameter in place.

        Every rank that holds a part runs the same rounds, in which requests have the same sizes.
        """


class SumsUpdate(HostUpdate):
    """A rule that needs sums over rows, columns and matrices: all parameters in step, their sums reduced together."""

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig, rule: SumsRule, *, seed: int) -> None:
        super().__init__(sharded, config)
        self.rule, self.seed, self.tensors = rule, seed, logical_tensors(sharded)

    @torch.no_grad()
    def _apply(self, lr: float) -> None:
        settings = settings_of(self.config, step=self.steps + 1, lr=lr, seed=self.seed)
        run_rounds([self.rule.rounds(tensor, settings(tensor.record)) for tensor in self.tensors])


@device_update.register
def _by_sums(rule: SumsRule, asked: UpdateRequest) -> Update:
    return SumsUpdate(asked.sharded, asked.config, rule, seed=asked.seed)

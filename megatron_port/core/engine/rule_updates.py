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
from megatron_port.core.optim.sums import SumsRule, logical_tensors, rectangles, run_rounds
from megatron_port.ext.rules.matrices import MatrixExchange, MatrixRule, shapes_of


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


class SumsUpdate(HostUpdate):
    """A rule that needs sums over rows, columns and matrices: all parameters in step, their sums reduced together."""

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig, rule: SumsRule, *, seed: int) -> None:
        super().__init__(sharded, config)
        self.rule, self.seed, self.tensors = rule, seed, logical_tensors(sharded)

    @torch.no_grad()
    def _apply(self, lr: float) -> None:
        settings = settings_of(self.config, step=self.steps + 1, lr=lr, seed=self.seed)
        run_rounds([self.rule.rounds(tensor, settings(tensor.record)) for tensor in self.tensors])


class MatrixUpdate(HostUpdate):
    """A rule that needs whole matrices: they come together on their owners and go back."""

    def __init__(self, sharded: ShardedParameters, config: OptimizerConfig, rule: MatrixRule, *, seed: int) -> None:
        super().__init__(sharded, config)
        narrow = sharded.buckets[0].weights.dtype in (torch.bfloat16, torch.float16)
        self.rule, self.seed = rule, seed
        self.exchange = MatrixExchange(sharded, rule, torch.bfloat16 if narrow else sharded.wide)
        self._factors: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    @torch.no_grad()
    def _apply(self, lr: float) -> None:
        settings, rule = settings_of(self.config, step=self.steps + 1, lr=lr, seed=self.seed), self.rule
        matrices = [p for p in self.sharded.pieces if rule.takes(p.record)]
        for p in self.sharded.pieces:
            if not rule.takes(p.record):
                rule.update_(p.master, p.gradient, p.state, settings(p.record))
        for p in matrices:
            rule.prepare_(p.gradient, p.state, settings(p.record))
        self.exchange.run()
        for p in matrices:
            self._apply_piece(p, settings(p.record))

    def _apply_piece(self, p: StateShard, settings: UpdateSettings) -> None:
        factor = self.rule.factor(*p.record.shape[-2:])
        if p.record.row_runs:  # of several matrices in one, the factor of each row's
            rows, columns = p.record.local_shape[-2:]
            for r in rectangles(p.start, p.start + p.gradient.numel(), rows, columns):
                r.view(p.gradient).mul_(self._row_factors(p)[r.rows].unsqueeze(1))
            factor = 1.0
        self.rule.apply_(p.master, p.gradient, factor, settings)

    def _row_factors(self, p: StateShard) -> torch.Tensor:
        """Return the factor of each of this rank's rows of a matrix that stands for several; made once."""
        if p.record.place not in self._factors:
            record = p.record
            number = (torch.arange(record.local_shape[-2]) + record.offset[-2]) % sum(record.row_runs)
            of = torch.searchsorted(torch.tensor(record.row_runs).cumsum(0), number, right=True)
            factors = [self.rule.factor(*shape) for shape in shapes_of(record)]
            made = torch.tensor(factors, dtype=p.gradient.dtype)[of].to(p.gradient.device)
            self._factors[record.place] = made
        return self._factors[p.record.place]

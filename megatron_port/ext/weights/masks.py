"""Elements of weights that stay zero: their gradients are zero from the reduction on.

Which ones is in the masters themselves: what is exactly 0 when they are loaded stays 0. So a checkpoint holds the
masks, any layout reads them back, and an export has the zeros. An elementwise rule leaves an element alone
whose weight, gradient and moments are 0, and its gradient is no part of the norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_port.core.config.features import SparsityConfig
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.native_step import StepState
from megatron_port.core.optim.buckets import Bucket
from megatron_port.core.optim.rules import OptimizerRule, StateKind
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.ext.weights.settings import is_sparse


class GradientMasks:
    """Masks of the parts of sparse parameters that this rank updates, a byte per element, as a part of a step."""

    def __init__(self, sharded: ShardedParameters, sparsity: SparsityConfig) -> None:
        self.sharded, self.sparsity = sharded, sparsity
        self._masks: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._done: set[int] = set()

    def loaded(self) -> None:
        """Make the masks, after masters have been loaded; later loads write over them: a captured step reads them."""
        former = {id(gradient): mask for pairs in self._masks.values() for gradient, mask in pairs}
        self._masks = {}
        for bucket, piece in zip(self.sharded.shard_buckets, self.sharded.pieces):
            if is_sparse(self.sparsity, piece.record.name):
                mask = (piece.master != 0).to(piece.gradient.device)
                mask = former[id(piece.gradient)].copy_(mask) if former else mask
                self._masks.setdefault(id(bucket), []).append((piece.gradient, mask))

    def run(self, state: StepState) -> None:
        """Leave out the gradients of what stays zero, between their reduction and the norm."""
        if self._masks:
            self.sharded.watch.release(self.sharded.trained)
            self.apply()
            self.sharded.watch.hold(self.sharded.trained)

    def apply_to(self, bucket: Bucket) -> None:
        """Leave out the gradients of what stays zero in a bucket whose sums are final, before they go to the host."""
        self._apply(id(bucket))

    def apply(self) -> None:
        """Leave out those of all other buckets, after their reduction and before the norm."""
        for number in self._masks:
            self._apply(number)
        self._done.clear()

    @torch.no_grad()
    def _apply(self, number: int) -> None:
        if number in self._done:  # its way to the host may not have ended
            return
        self._done.add(number)
        for gradient, mask in self._masks.get(number, ()):
            gradient.mul_(mask)


# A running mean of the weights (exponential moving average; Polyak & Juditsky), held as the optimizer's state is.
#
# average = decay * average + (1 - decay) * master after each applied update; the first one begins it as a copy. It is a
# state tensor of every parameter beside those of the rule, so it is divided with the masters, saved, verified and
# resharded like them, and in their precision.

AVERAGE = StateKind("ema")
"""Averaged weights, a state tensor of every parameter beside those of the rule."""


@dataclass(frozen=True)
class Averaged(OptimizerRule):
    """A rule whose parameters also have an average, behind the state tensors of the rule itself."""

    rule: OptimizerRule

    @property
    def formula(self) -> OptimizerRule:
        """The rule that updates."""
        return self.rule.formula

    @property
    def alignment(self) -> int:
        """Elements, as the rule's own."""
        return self.rule.alignment

    def kinds(self, record: ParameterRecord) -> tuple[str, ...]:
        """Return the names of the rule's state tensors and of the average."""
        return (*self.rule.kinds(record), AVERAGE.name)

    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return the rule's state tensors and the average."""
        return (*self.rule.state(record), AVERAGE)


class WeightAverage:
    """The average of ``sharded``'s masters."""

    def __init__(self, sharded: ShardedParameters, decay: float) -> None:
        self.sharded, self.decay = sharded, decay
        self._updates = torch.zeros((), dtype=torch.float64, device=sharded.ctx.device)

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates, when the state has been loaded."""
        self._updates.fill_(steps)

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Take in the masters after a step, unless ``skipped`` (scalar on the device) is not 0; nothing is read
        back."""
        applied = (skipped == 0).double()
        later = torch.full_like(applied, 1.0 - self.decay)
        share = applied * torch.where(self._updates == 0, torch.ones_like(applied), later)
        self._updates += applied
        for bucket in self.sharded.trained:
            average = bucket.state[AVERAGE]
            average.lerp_(bucket.masters, share.to(average.dtype))

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """Let the model compute with the average; before the first update with the weights. Collective."""
        if float(self._updates) == 0:
            yield
            return
        self.sharded.wait()
        self._exchange()
        try:
            yield
        finally:
            self.sharded.wait()
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange masters and average, and make the weights of what the masters are now."""
        for bucket in self.sharded.trained:
            average, masters = bucket.state[AVERAGE], bucket.masters.clone()
            bucket.masters.copy_(average)
            average.copy_(masters)
        self.sharded.copy_masters_to_weights()
        self.sharded.start_gather()
        self.sharded.wait()

"""Accumulation of gradients by own kernels, small ones together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_port.core.engine.native_passes import GradientSink
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.ext.kernels.ops.optimizer import add_gradients_, add_rows_

_LARGEST_DEFERRED = 1 << 16
"""Elements of a gradient that may wait for others: of biases and norms; the memory of a table's is to be freed."""


class SumsTogether(GradientSink):
    """Sink whose small gradients wait until one arrives that is reduced with others, and for the end of the pass.

    The sums are those of each added by itself, to the bit.
    """

    def __init__(self, sharded: ShardedParameters) -> None:
        super().__init__(sharded, add_rows_)
        self._waiting: list[torch.Tensor] = []
        self._bucket: int | None = None

    def hook(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Return the hook that adds what arrives as ``grad`` to a parameter's sum, now or with the next
        :meth:`flush`, and frees it."""
        if parameter.numel() > _LARGEST_DEFERRED:
            return self._add
        # Of one bucket only: its reduction is not to wait for another's gradients, and to give memory to those of
        # another may take away that of the first.
        bucket = self._sharded().reduced_with(parameter)

        def wait(parameter: torch.Tensor) -> None:
            if parameter.grad is None:  # layers.linear adds it itself
                return
            if bucket != self._bucket:
                self.flush()
                self._bucket = bucket
            self._waiting.append(parameter)

        return wait

    @torch.no_grad()
    def flush(self) -> None:
        """Add the gradients that wait to their sums. To be called at the end of every backward pass."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        sharded = self._sharded()
        add_gradients_([sharded.gradient_of(p) for p in waiting], [p.grad for p in waiting if p.grad is not None])
        for parameter in waiting:
            parameter.grad = None
            sharded.added(parameter)

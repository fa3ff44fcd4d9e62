"""Accumulation of the gradients that autograd returns (all but the linears' weights) in the engine's wide sums."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from megatron_port.core.engine.native_passes import BackwardTarget
from megatron_port.core.layers.linear import WgradAccumulator
from megatron_port.core.layers.table_rows import torch_add_rows
from megatron_port.core.optim.sharded import ShardedParameters

AddRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Adds rows to the rows of a table (``layers.table_rows``)."""


class GradientSink:
    """Sink of gradients for autograd's hooks, which must not keep the parameters' holder alive: a reference cycle
    through them is collected late, and so are the process groups and their threads.
    """

    def __init__(self, sharded: ShardedParameters, add_rows: AddRows = torch_add_rows) -> None:
        self._alive, self._add_rows = weakref.ref(sharded), add_rows

    def _sharded(self) -> ShardedParameters:
        sharded = self._alive()
        assert sharded is not None, "a backward pass after its engine's end"
        return sharded

    def accumulator(self) -> WgradAccumulator:
        """Return what adds the gradients of matrices and tables, which autograd does not see, to their sums."""
        return WgradAccumulator(self.added, self.total, self.unwritten, self._add_rows)

    def total(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sum to add a gradient to; see ``ShardedParameters.gradient_of``."""
        return self._sharded().gradient_of(parameter)

    def unwritten(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the sum to write a first gradient over; see ``ShardedParameters.unwritten_gradient_of``."""
        return self._sharded().unwritten_gradient_of(parameter)

    def added(self, parameter: torch.Tensor) -> None:
        """Note that a gradient has been added to its sum."""
        sharded = self._alive()
        if sharded is not None:
            sharded.added(parameter)

    def hook(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Return the hook that adds to a parameter's wide sum what arrives as ``grad``, and frees it."""
        return self._add

    def _add(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # else layers.linear adds it itself
            first = self.unwritten(parameter)
            if first is None:
                self.total(parameter).add_(parameter.grad)
            else:
                first.copy_(parameter.grad)
            parameter.grad = None
            self.added(parameter)

    def flush(self) -> None:
        """Add what waits to the sums: nothing does. To be called at the end of every backward pass."""


class ShardTarget(BackwardTarget):
    """Passes' target that adds gradients to the engine's sums, which are reduced as they fill up."""

    def __init__(self, sink: GradientSink, sharded: ShardedParameters, loss_gradient: torch.Tensor) -> None:
        super().__init__(sink.accumulator(), loss_gradient)
        self.sink, self.sharded = sink, sharded

    def flush(self) -> None:
        """Add what waits in the sink to the sums."""
        self.sink.flush()

    def end_pass(self, chunk: int) -> None:
        """Note that a backward pass has ended: under ZeRO stage 2 the chunk's gradients are reduced."""
        self.sharded.end_pass(chunk)

    def sums(self) -> list[torch.Tensor]:
        """Return this rank's own sums."""
        return [gradient for _, gradient in self.sharded.local_gradients()]

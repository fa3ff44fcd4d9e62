"""A step of the native engine that is run once more while a probe looks on: parts in place of a plain step's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from megatron_port.core.engine.api import StepProbe
from megatron_port.core.engine.native_passes import BackwardTarget, PassWatch
from megatron_port.core.engine.native_step import RunPasses, StepPart, StepParts, StepState, SumLoss
from megatron_port.core.pipeline.runner import Payload
from megatron_port.core.pipeline.schedules import Action


class _ProbedPasses(PassWatch):
    """Shows each pass to a probe."""

    def __init__(self, probe: StepProbe) -> None:
        self.probe = probe

    def forward(self, action: Action, stage: int) -> AbstractContextManager[None]:
        """Return the context of a chunk's forward pass."""
        return self.probe.forward(action.micro_batch, stage)

    def loss(self, action: Action, loss_sum: torch.Tensor) -> None:
        """Show the sum of token losses of a micro-batch."""
        self.probe.loss(action.micro_batch, loss_sum)

    def backward(self, action: Action, stage: int, target: BackwardTarget, gradients: Payload) -> None:
        """Show the sums so far, and what goes to the stage before."""
        self.probe.after_backward(action.micro_batch, [*target.sums(), *gradients], stage)


class RunProbed:
    """Runs the passes of ``plain``, whose gradients are reduced after all of them: the probe sees a rank's own."""

    def __init__(self, plain: RunPasses, probe: StepProbe) -> None:
        self.plain, self.probe = plain, probe

    def run(self, state: StepState) -> None:
        """Run the part."""
        sharded = self.plain.sharded
        sharded.begin(len(state.micro_batches), early=False)
        self.plain.sums.reset()
        with self.probe.watch(self.plain.stage):
            passes = self.plain.runner.run(
                state.micro_batches, state.step, keys=state.keys, watch=_ProbedPasses(self.probe)
            )
        self.probe.local_gradients(sharded.local_gradients())
        state.losses, state.total = passes.losses, passes.total


class SkipUpdate:
    """Skips the update."""

    def run(self, state: StepState) -> None:
        """Run the part."""
        state.skip = torch.ones_like(state.skip)


def probed_step(parts: StepParts, probe: StepProbe) -> StepParts:
    """Return the parts of a replay of a step, whose update is not applied."""
    return replace(parts, gradients=list(_probed(parts, probe)))


def _probed(parts: StepParts, probe: StepProbe) -> Iterator[StepPart]:
    for part in parts.gradients:
        yield RunProbed(part, probe) if isinstance(part, RunPasses) else part
        if isinstance(part, SumLoss):
            yield SkipUpdate()

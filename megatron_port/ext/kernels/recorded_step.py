"""Parts of a step whose work is recorded once and replayed (``step_graphs``): each stands for parts of a plain one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megatron_port.core.engine.native_step import StepPart, StepState, run_parts
from megatron_port.core.engine.step_inputs import StepInputs
from megatron_port.core.layers.dropout import sample_keys
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.ext.health.gradient_check import GradientCheck
from megatron_port.ext.kernels.step_graphs import StepGraphs


class Gather:
    """Gathers the updated weights, at the beginning of a recorded step: a recording cannot end with work under way."""

    def __init__(self, sharded: ShardedParameters) -> None:
        self.sharded = sharded

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.sharded.start_gather()


class ReplayGradients:
    """Runs ``parts`` up to the gradient norm from inputs at fixed addresses, or their recording. ``seed``: the
    run's."""

    def __init__(
        self, graphs: StepGraphs[StepState], parts: Sequence[StepPart], sharded: ShardedParameters, seed: int
    ) -> None:
        self.graphs, self.parts, self.sharded, self.seed = graphs, tuple(parts), sharded, seed

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.sharded.gathers_itself()
        keys = [sample_keys(self.seed, state.step, batch.sample_ids) for batch in state.micro_batches]
        found = self.graphs.gradients(state.micro_batches, keys, self._passes)
        state.losses, state.sums, state.auxiliary = found.losses, found.sums, found.auxiliary
        state.veto, state.square = found.veto, found.square

    def _passes(self, inputs: StepInputs) -> StepState:
        found = StepState(inputs.batches, -1, keys=inputs.keys)
        run_parts(self.parts, found)
        return found


class CheckReplayed:
    """Looks at what a replay has found in the gradients."""

    def __init__(self, check: GradientCheck) -> None:
        self.check = check

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.check.verify_recorded()


class ReplayUpdate:
    """Runs the update, or its recording."""

    def __init__(self, graphs: StepGraphs[StepState], update: StepPart) -> None:
        self.graphs, self.update = graphs, update

    def run(self, state: StepState) -> None:
        """Run the part."""
        state.outcome = self.graphs.update(partial(_updated, self.update, state))


def _updated(update: StepPart, state: StepState) -> torch.Tensor:
    update.run(state)
    return state.outcome


class Release:
    """Drops the recordings before a step that is not replayed, which needs their memory."""

    def __init__(self, graphs: StepGraphs[StepState]) -> None:
        self.graphs = graphs

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.graphs.release()


class DeferGather:
    """Leaves the updated weights to be gathered by the next step, or by who waits for them."""

    def __init__(self, sharded: ShardedParameters) -> None:
        self.sharded = sharded

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.sharded.defer_gather()

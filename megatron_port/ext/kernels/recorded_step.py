"""Parts of a step whose work is recorded once and replayed (``step_graphs``): each stands for parts of a plain one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megatron_port.core.engine.native_step import StepPart, StepParts, StepState, run_parts
from megatron_port.core.engine.step_inputs import StepInputs
from megatron_port.core.layers.dropout import sample_keys
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.core.optim.state_watch import StateWatch
from megatron_port.ext.kernels.step_graphs import Recorder, StepGraphs


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

    def __init__(self, watch: StateWatch) -> None:
        self.watch = watch

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.watch.verify_replayed()


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


class RecordedSteps:
    """The parts of an engine's steps, recorded and replayed where they can be.

    Args:
        recorder: of the work.
        seed: of the run.
    """

    def __init__(self, recorder: Recorder, sharded: ShardedParameters, *, seed: int) -> None:
        self.graphs = StepGraphs[StepState](recorder, sharded.ctx.device)
        self.sharded, self.seed = sharded, seed

    def parts(self, plain: StepParts, *, replayed: bool) -> list[StepPart]:
        """Return the parts of a step, in order. ``plain``: of one that is not recorded; ``replayed``: work is recorded
        and replayed."""
        sharded, graphs = self.sharded, self.graphs
        ending: list[StepPart] = [DeferGather(sharded), plain.record]
        if not replayed:
            return [plain.count, Release(graphs), *plain.gradients, plain.check, plain.apply, *ending]
        gradients: list[StepPart] = [Gather(sharded), *plain.gradients]
        return [
            plain.count, ReplayGradients(graphs, gradients, sharded, self.seed), plain.check,
            CheckReplayed(sharded.watch), ReplayUpdate(graphs, plain.apply), *ending,
        ]

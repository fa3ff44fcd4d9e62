"""The pieces of a step's passes that are captured apart, so that graphs do not grow with the number of micro-batches.

The first micro-batch of a step writes gradients over what was there, and the others add theirs; all else that differs
between micro-batches is at the addresses of one slot (``step_inputs``). So a step is a graph of its first micro-batch,
one graph for the others, and one of what follows up to the gradient norm. Where gradients are reduced over replicas,
the last micro-batch has a graph with what follows, since buckets are reduced beside its backward pass.

A step stays one graph (``WHOLE``) where a micro-batch's work does not end before the next one's begins, because no
graph can end with work under way:

* between pipeline stages, where activations of several micro-batches are held and sent meanwhile, and in schedules that
  hold several (GPipe);
* under ZeRO stage 2, which reduces the gradients of a micro-batch beside the next one's forward pass;

and where micro-batches of a step differ in shape, or a term of the objective has a count of its own on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.engine.native_step import RunPasses, StepPart, StepState, run_parts
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.ext.kernels.step_inputs import shapes_of

WHOLE, FIRST, OTHERS, LAST, END = "whole", "first", "others", "last", "end"
"""Names of the pieces' graphs: ``LAST`` has what follows the passes, ``END`` nothing else, ``WHOLE`` all."""


class StepPieces:
    """A captured step up to the gradient norm. ``parts``: the passes (``RunPasses``), then what follows them."""

    def __init__(self, parts: Sequence[StepPart], sharded: ShardedParameters) -> None:
        passes, *self.rest = parts
        assert isinstance(passes, RunPasses)
        self.passes, self.sharded = passes, sharded
        self.reduces = sharded.replicas is not None
        """Whether gradients are reduced beside the last micro-batch's backward pass."""

    def apart(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Return whether these micro-batches are captured apart; all ranks agree."""
        runner, sharded = self.passes.runner, self.sharded
        if sharded.shard_gradients or runner.objective.terms or sharded.ctx.topology.virtual_stages > 1:
            return False
        turns = groupby(runner.schedule(len(micro_batches)).plans[0], key=lambda action: action.micro_batch)
        return len(list(turns)) == len(micro_batches) and len({shapes_of([batch]) for batch in micro_batches}) == 1

    def order(self, micro_batches: int, *, apart: bool) -> tuple[str, ...]:
        """Return the pieces of a step, in order."""
        if not apart:
            return (WHOLE,)
        if not self.reduces:
            return (FIRST, *[OTHERS] * (micro_batches - 1), END)
        return (FIRST, *[OTHERS] * (micro_batches - 2), LAST) if micro_batches > 1 else (WHOLE,)

    def run(
        self, micro_batches: Sequence[MicroBatch], keys: Sequence[torch.Tensor], *, apart: bool
    ) -> Iterator[StepState]:
        """Run a step on micro-batches in memory of its own, with their dropout keys; give way after each piece."""
        state = StepState(micro_batches, -1, keys=keys)
        self.sharded.start_gather()  # no graph can end with work under way, so none ends with this
        if apart:
            yield from self._each(state)
        else:
            self.passes.run(state)
        run_parts(self.rest, state)
        yield state

    def _each(self, state: StepState) -> Iterator[StepState]:
        """Run the passes of each micro-batch; give way after each but a last one that is captured with what follows."""
        passes, count = self.passes, len(state.micro_batches)
        self.sharded.begin(count, early=True)
        passes.sums.reset()
        schedule = passes.runner.schedule(count)
        worker = passes.runner.worker(state.micro_batches, state.step, schedule, keys=state.keys)
        state.losses, state.total = worker.losses, worker.total
        with passes.runner.copied_weights():
            for number, actions in groupby(schedule.plans[0], key=lambda action: action.micro_batch):
                for action in actions:
                    worker.run(action, None)
                self.sharded.wait()  # for gathered weights that no pass has used
                if not self.reduces or number < count - 1:
                    yield state

"""Steps captured once and replayed: CUDA or HIP graphs in place of thousands of launches by the host.

A step's graphs are those of its passes with all that follows them up to the gradient norm (``step_pieces``: one of
the first micro-batch, one of the others), and one of the update. What differs between steps and between micro-batches
is at fixed addresses and is filled in before a replay (``step_inputs``, ``optim.rules``); what a kernel takes by value
must be alike in every step. Before the update the engine may look at the state.

The first ``WARM_UP`` steps run without a graph: they allocate what is made at first use, count the gradients of
each bucket, and let libraries choose their kernels. Steps of another shape are captured anew; steps that have other
numbers of micro-batches, as long as these are captured apart, are not.

New graphs of the passes prove themselves: the step's passes run once more without them, and where the replay has
another loss or gradient norm, a warning names them and steps are no longer captured. The update has no such proof,
since it could not be undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.engine.native_step import StepPart, StepParts, StepState
from megatron_port.core.errors import ConfigError
from megatron_port.core.io.logging import Logger
from megatron_port.core.layers.dropout import sample_keys
from megatron_port.core.optim.sharded import ShardedParameters
from megatron_port.core.optim.state_watch import StateWatch
from megatron_port.ext.kernels.step_inputs import StepInputs, shapes_of
from megatron_port.ext.kernels.step_pieces import END, StepPieces

WARM_UP = 3
"""Steps before the first capture."""
LOSS_BOUND, NORM_BOUND = 1e-6, 1e-3
"""Largest relative differences between passes and their replay that rounding explains."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class CapturedGraph(Generic[Result]):
    """Captured kernels. ``result``: the tensors that each ``replay`` fills."""

    result: Result
    replay: Callable[[], Any]


class GraphCapturer(Protocol):
    """Captures the kernels that a function launches."""

    def run(self, function: Callable[[], Result]) -> Result:
        """Run a function as it will be captured: once to warm up."""

    def capture(self, function: Callable[[], Result]) -> CapturedGraph[Result]:
        """Call a function and capture its kernels; they need not run before the first replay."""


class CudaGraphCapturer:
    """Captures CUDA and HIP graphs of one memory pool, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, function: Callable[[], Result]) -> Result:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], Result]) -> CapturedGraph[Result]:
        graph = torch.cuda.CUDAGraph()
        try:
            # NCCL's watchdog and a save in the background may call CUDA meanwhile, from their own threads.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except dist.DistError:  # of a peer, which is lost whether or not steps are captured
            raise
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            raise ConfigError(f'this step cannot be captured ({said}); use backend.graphs = "off"') from error
        return CapturedGraph(result, graph.replay)


def cuda_graph_capturer(config: RunConfig, ctx: ParallelContext, optimizer: str) -> CudaGraphCapturer:
    """Return the graph capturer of a run.

    Raises:
        ConfigError: its device or the provider of its optimizer cannot be captured.
    """
    if ctx.device.type != "cuda":
        raise ConfigError(
            f'backend.graphs "step" and the run is on {ctx.device.type}, where nothing is launched; use graphs = "off"'
        )
    if optimizer != "own":
        raise ConfigError(
            f'backend.graphs "step" and the optimizer\'s provider is {optimizer}, on whose updates the host decides; '
            'build the own kernels (make kernels), or use graphs = "off"'
        )
    return CudaGraphCapturer(ctx.device)


class StepGraphs:
    """The graphs of one engine's steps.

    It keeps no function of the engine: a cycle of references would keep graphs and process groups alive, and NCCL
    does not end a communicator that a graph still uses.
    """

    def __init__(self, capturer: GraphCapturer, device: torch.device) -> None:
        self.capturer, self.device = capturer, device
        self.differing = ""
        """Numbers in which a replay differed from the passes; empty: none. Else steps are no longer captured."""
        self.release()

    def release(self) -> None:
        """Drop the graphs, their inputs and their memory. The next steps warm up and are captured again."""
        self.inputs: StepInputs | None = None
        self._order: tuple[str, ...] = ()
        self._warmed = 0
        self.release_memory()

    def release_memory(self) -> None:
        """Drop the graphs and their memory, which holds a step's activations. The next step is captured again."""
        self._pieces: dict[str, tuple[CapturedGraph[StepState], list[torch.Tensor]]] = {}
        self._update: CapturedGraph[torch.Tensor] | None = None

    @property
    def replays(self) -> bool:
        """Whether steps of the last shape are replayed by now."""
        return bool(self._pieces) and self._update is not None

    def gradients(
        self, micro_batches: Sequence[MicroBatch], keys: Sequence[torch.Tensor], pieces: StepPieces
    ) -> StepState:
        """Run a step's passes on inputs at fixed addresses, or replay their graphs.

        ``keys``: of the samples of each micro-batch, int64 on the host.
        """
        inputs = self.inputs
        if inputs is None or inputs.shapes != shapes_of(micro_batches):
            inputs = self._begin(micro_batches, pieces)
        inputs.load(micro_batches, keys)
        if self._warmed < WARM_UP:
            return self.capturer.run(lambda: self._called(inputs, pieces))
        if self._pieces:
            return self._replayed(inputs)
        result = self.capturer.run(lambda: self._called(inputs, pieces))
        called = proof_of(result)
        if not all(map(math.isfinite, called)):  # fp16 overflowed: this step would prove nothing
            return result
        self._capture(inputs, pieces)
        result = self._replayed(inputs)
        self.differing = differences(called, proof_of(result))
        if not self.differing:
            return result
        order = self._order
        self.release()
        self._order = order
        return self.capturer.run(lambda: self._called(inputs, pieces))

    def _begin(self, micro_batches: Sequence[MicroBatch], pieces: StepPieces) -> StepInputs:
        """Make memory for steps of another shape. Graphs of micro-batches are kept for another number of the same."""
        apart, former = pieces.apart(micro_batches), self.inputs
        slot = None if former is None or not apart else former.slot
        if slot is None or slot.shapes != shapes_of(micro_batches[:1]):
            slot = None
            self.release()
        self.inputs = StepInputs(micro_batches, self.device, apart=apart, slot=slot)
        self._order = pieces.order(len(micro_batches), apart=apart)
        if not self._pieces.keys() >= set(self._order):
            self.release_memory()
        return self.inputs

    def _called(self, inputs: StepInputs, pieces: StepPieces) -> StepState:
        """Run the passes call by call."""
        run = pieces.run(*inputs.given(len(inputs.batches)), apart=inputs.slot is not None)

        def next_piece(name: str) -> tuple[StepState, list[torch.Tensor]]:
            state = next(run)
            return state, state.losses[-1:]

        return self._through(inputs, next_piece)

    def _capture(self, inputs: StepInputs, pieces: StepPieces) -> None:
        """Capture each piece once, of a step that has no more micro-batches than it takes for that."""
        names = list(dict.fromkeys(self._order))
        run = pieces.run(*inputs.given(len(names) - (END in names)), apart=inputs.slot is not None)
        captured = {}
        for name in names:
            graph = self.capturer.capture(lambda: next(run))
            captured[name] = graph, graph.result.losses[-1:]
        self._pieces = captured

    def _replayed(self, inputs: StepInputs) -> StepState:
        """Replay the passes."""
        def replay(name: str) -> tuple[StepState, list[torch.Tensor]]:
            graph, loss = self._pieces[name]
            graph.replay()
            return graph.result, loss

        return self._through(inputs, replay)

    def _through(
        self, inputs: StepInputs, run: Callable[[str], tuple[StepState, list[torch.Tensor]]]
    ) -> StepState:
        """Run the pieces of a step in order, each of a micro-batch with that in the slot; keep its loss."""
        for number, name in enumerate(self._order):
            inputs.show(number)
            state, loss = run(name)
            inputs.keep(number, loss)
        return replace(state, losses=inputs.losses) if inputs.slot is not None else state

    def update(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a step's update, or its graph, after the passes of the same step."""
        if not self._pieces:  # an update reads results of the passes, whose addresses only their graphs fix
            self._warmed += 1
            return self.capturer.run(function)
        if self._update is None:
            self._update = self.capturer.capture(function)
        self._update.replay()
        return self._update.result


# Parts of a captured step, each in place of parts of a plain one.

def proof_of(state: StepState) -> tuple[float, float]:
    """Return the loss and the gradient norm of a step's passes, which are alike on all ranks. Waits for the device."""
    return float(state.sums[0] / state.sums[1]), float(state.square.sqrt())


def differences(called: tuple[float, float], replayed: tuple[float, float]) -> str:
    """Return the numbers of :func:`proof_of` in which a replay differs from the passes, in words; empty: in none.

    Attention's backward pass may add in another order each time; the forward pass and the loss do not.
    """
    out = []
    for name, bound, want, found in zip(("loss", "gradient norm"), (LOSS_BOUND, NORM_BOUND), called, replayed):
        alike = abs(want - found) <= bound * abs(want)
        out += [] if alike else [f"{name} {found:.9g} in place of {want:.9g}"]
    return ", ".join(out)


class ReplayGradients:
    """Runs the pieces of a step up to the gradient norm from inputs at fixed addresses, or their graphs. ``seed``: the
    run's."""

    def __init__(self, graphs: StepGraphs, pieces: StepPieces, seed: int) -> None:
        self.graphs, self.pieces, self.seed = graphs, pieces, seed

    def run(self, state: StepState) -> None:
        """Run the part."""
        sharded = self.pieces.sharded
        sharded.gathers_itself()
        keys = [
            torch.tensor(sample_keys(self.seed, state.step, batch.sample_ids), dtype=torch.int64)
            for batch in state.micro_batches
        ]
        found = self.graphs.gradients(state.micro_batches, keys, self.pieces)
        if self.graphs.differing:
            Logger(sharded.ctx.rank).log(
                f"warning: the replay of a captured step has {self.graphs.differing}; the step was computed without "
                'it, and no further one is captured (backend.graphs = "off" leaves this out; please report it)'
            )
        state.losses, state.sums, state.auxiliary = found.losses, found.sums, found.auxiliary
        state.skip, state.square = found.skip, found.square


class CheckReplayed:
    """Compares replicas' copies of gradients after a replay, in which no reduction can be checked."""

    def __init__(self, watch: StateWatch) -> None:
        self.watch = watch

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.watch.verify_replayed()


class ReplayUpdate:
    """Runs the update, or its graph."""

    def __init__(self, graphs: StepGraphs, update: StepPart) -> None:
        self.graphs, self.update = graphs, update

    def run(self, state: StepState) -> None:
        """Run the part."""
        state.outcome = self.graphs.update(partial(_updated, self.update, state))


def _updated(update: StepPart, state: StepState) -> torch.Tensor:
    update.run(state)
    return state.outcome


class Release:
    """Drops the graphs before a step that is not replayed, which needs their memory."""

    def __init__(self, graphs: StepGraphs) -> None:
        self.graphs = graphs

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.graphs.release()


class DeferGather:
    """Defers the gather of updated weights to the next step, or to the first reader that waits for them."""

    def __init__(self, sharded: ShardedParameters) -> None:
        self.sharded = sharded

    def run(self, state: StepState) -> None:
        """Run the part."""
        self.sharded.defer_gather()


class CapturedSteps:
    """The parts of an engine's steps, captured and replayed where they can be.

    Args:
        capturer: captures the kernels.
        seed: of the run.
    """

    def __init__(self, capturer: GraphCapturer, sharded: ShardedParameters, *, seed: int) -> None:
        self.graphs = StepGraphs(capturer, sharded.ctx.device)
        self.sharded, self.seed = sharded, seed

    def parts(self, plain: StepParts, *, replayed: bool) -> list[StepPart]:
        """Return the parts of a step, in order. ``plain``: of a step that is not captured; ``replayed``: this one may
        be captured and replayed."""
        sharded, graphs = self.sharded, self.graphs
        ending: list[StepPart] = [DeferGather(sharded), plain.hash_state]
        if not replayed or graphs.differing:
            return [plain.count, Release(graphs), *plain.gradients, plain.verify, plain.apply, *ending]
        pieces = StepPieces(plain.gradients, sharded)
        return [
            plain.count, ReplayGradients(graphs, pieces, self.seed), plain.verify,
            CheckReplayed(sharded.watch), ReplayUpdate(graphs, plain.apply), *ending,
        ]

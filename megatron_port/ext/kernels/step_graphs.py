"""A step's work recorded once and replayed: a CUDA or HIP graph in place of thousands of launches by the host.

A step is two recordings: the passes with all that follows them up to the gradient norm, and the update. What differs
between steps is at fixed addresses and is filled in before a replay (``step_inputs``, ``optim.rules``); what a
kernel takes by value must be alike in every step. Between the two the engine may look at the state.

The first ``WARM_UP`` steps run without a recording: they allocate what is made at first use, count the gradients of
each bucket, and let libraries choose their kernels. Steps of another shape are recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.engine.step_inputs import StepInputs, shapes_of
from megatron_port.core.errors import ConfigError

WARM_UP = 3
"""Steps before the first recording."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Recording(Generic[Result]):
    """Recorded work. ``result``: the tensors that each ``replay`` fills."""

    result: Result
    replay: Callable[[], Any]


class Recorder(Protocol):
    """Recorder of the kernels that a function launches."""

    def run(self, function: Callable[[], Result]) -> Result:
        """Run a function as it will be recorded: once to warm up."""

    def record(self, function: Callable[[], Result]) -> Recording[Result]:
        """Call a function and capture its kernels; they need not run before the first replay."""


class CudaRecorder:
    """Records CUDA and HIP graphs of one memory pool, on a stream of their own."""

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

    def record(self, function: Callable[[], Result]) -> Recording[Result]:
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog and a save in the background may call CUDA meanwhile, from their own threads.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return Recording(result, graph.replay)


def cuda_recorder(config: RunConfig, ctx: ParallelContext, optimizer: str) -> CudaRecorder:
    """Return the recorder of a run.

    Raises:
        ConfigError: its device or the provider of its optimizer cannot be recorded.
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
    return CudaRecorder(ctx.device)


class StepGraphs(Generic[Result]):
    """The recordings of one engine's steps, whose passes give a ``Result`` that lasts.

    It keeps no function of the engine: a cycle of references would keep recordings and process groups alive, and NCCL
    does not end a communicator that a graph still uses.
    """

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self.recorder, self.device = recorder, device
        self.release()

    def release(self) -> None:
        """Drop the recordings and their memory. The next steps warm up and record again."""
        self.inputs: StepInputs | None = None
        self._gradients: Recording[Result] | None = None
        self._update: Recording[torch.Tensor] | None = None
        self._warmed = 0

    @property
    def replays(self) -> bool:
        """Whether steps of the last shape are replayed by now."""
        return self._gradients is not None and self._update is not None

    def gradients(
        self, micro_batches: Sequence[MicroBatch], keys: Sequence[Sequence[int]],
        function: Callable[[StepInputs], Result],
    ) -> Result:
        """Run a step's passes: ``function`` of the inputs at fixed addresses, or its recording.

        ``keys``: of the samples of each micro-batch.
        """
        shapes = shapes_of(micro_batches)
        if self.inputs is None or self.inputs.shapes != shapes:
            self.release()
            self.inputs = StepInputs(micro_batches, self.device)
        inputs = self.inputs
        inputs.load(micro_batches, keys)
        if self._warmed < WARM_UP:
            return self.recorder.run(lambda: function(inputs))
        if self._gradients is None:
            self._gradients = self.recorder.record(lambda: function(inputs))
        self._gradients.replay()
        return self._gradients.result

    def update(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a step's update, or its recording, after the passes of the same step."""
        if self._warmed < WARM_UP:
            self._warmed += 1
            return self.recorder.run(function)
        if self._update is None:
            self._update = self.recorder.record(function)
        self._update.replay()
        return self._update.result

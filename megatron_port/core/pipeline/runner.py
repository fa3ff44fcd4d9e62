"""Execution of a schedule on one stage: receives, passes and sends, in the order given by ``messages``.

It knows neither the model nor the optimizer: a :class:`Worker` computes the passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from megatron_port.core.dist.progress import TRANSFER, ProgressTracker
from megatron_port.core.pipeline.actions import Action, Kind, Schedule
from megatron_port.core.pipeline.boundary import Boundary, Payload
from megatron_port.core.pipeline.messages import Message, turns
from megatron_port.core.pipeline.simulate import Span
from megatron_port.core.pipeline.transfer import Arrival, Departure, StageLink


class Worker(Protocol):
    """Computes the passes of one stage's chunks."""

    def run(self, action: Action, received: Payload | None) -> Payload | None:
        """Compute one pass.

        ``received``: the inputs of a FORWARD (None on the first chunk of the model), the gradients of the outputs for
        BACKWARD and INPUT (None on the last chunk); None for WEIGHT. Returns the outputs, or the gradients of the
        inputs. Gradients are those of floating-point tensors.
        """


class Runner:
    """The pipeline of one rank. ``record`` turned on, ``spans`` holds the times of each pass of the last run."""

    def __init__(self, link: StageLink, progress: ProgressTracker) -> None:
        self.link, self.progress = link, progress
        self.stage = link.ctx.coords.pp
        self.record = False
        self.spans: list[Span] = []

    def run(self, schedule: Schedule, worker: Worker, boundary_of: Callable[[int], Boundary]) -> None:
        """Run all passes of this stage; return when its sends have been received.

        Args:
            boundary_of: returns the boundary between stages for a micro-batch.

        Raises:
            ValueError: the tensors of a pass differ from what the boundary states.
        """
        arriving: dict[Message, Arrival] = {}
        leaving: dict[Message, Departure] = {}
        kept: dict[Action, Payload] = {}
        at, self.spans = self.progress.at, []
        for turn in turns(schedule, self.stage):
            for message in turn.post:
                arriving[message] = self.link.start_receive(
                    _expected(message, boundary_of), self.link.peer(message.source), downstream=message.downstream
                )
            received: Payload | None = None
            if turn.receive is not None:
                what = "activation of micro-batch" if turn.receive.downstream else "gradient of micro-batch"
                at(TRANSFER, what, turn.action.micro_batch)
                received = arriving.pop(turn.receive).take()
            elif turn.action.kind is not Kind.WEIGHT:
                received = kept.pop(turn.action, None)
            for message in turn.completed_sends:
                leaving.pop(message).finish()
            result = self._timed(worker, turn.action, received)
            if result is None and (turn.keep is not None or turn.send is not None):
                raise RuntimeError(f"{turn.action} gave nothing to hand on")
            if turn.keep is not None and result is not None:
                kept[turn.keep] = tuple(tensor.detach() for tensor in result)
            if turn.send is not None and result is not None:
                _expected(turn.send, boundary_of).check(result)
                leaving[turn.send] = self.link.send(
                    result, self.link.peer(turn.send.target), downstream=turn.send.downstream
                )
        at(TRANSFER, "last sends")
        self.link.drain()

    def _timed(self, worker: Worker, action: Action, received: Payload | None) -> Payload | None:
        """One pass, with its span where spans are recorded."""
        started = time.perf_counter() if self.record else 0.0
        result = worker.run(action, received)
        if self.record:
            self.spans.append(Span(action, started, time.perf_counter()))
        return result


def _expected(message: Message, boundary_of: Callable[[int], Boundary]) -> Boundary:
    """Return the boundary that a message carries: activations, or their gradients."""
    boundary = boundary_of(message.action.micro_batch)
    return boundary if message.downstream else boundary.gradients

"""Runs a schedule on one stage: receives, passes and sends, in the order that ``messages`` worked out.

It knows neither the model nor the optimizer: a :class:`Worker` computes the passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from megatron_port.pipeline.messages import Message, turns
from megatron_port.pipeline.schedules import Action, Kind, Schedule
from megatron_port.pipeline.simulate import Span
from megatron_port.pipeline.transfer import Arrival, Departure, StageLink
from megatron_port.runtime.progress import TRANSFER, ProgressTracker


class Worker(Protocol):
    """Computes the passes of one stage's chunks."""

    def run(self, action: Action, received: torch.Tensor | None) -> torch.Tensor | None:
        """One pass.

        ``received``: the input of a FORWARD (None on the first chunk of the model), the gradient of the output for
        BACKWARD and INPUT (None on the last chunk); None for WEIGHT. Returns the output, or the gradient of the input.
        """


class Runner:
    """The pipeline of one rank. ``record`` turned on, ``spans`` holds the times of each pass of the last run."""

    def __init__(self, link: StageLink, dtype: torch.dtype, progress: ProgressTracker) -> None:
        self.link, self.dtype, self.progress = link, dtype, progress
        self.stage = link.ctx.coords.pp
        self.record = False
        self.spans: list[Span] = []

    def run(self, schedule: Schedule, worker: Worker, shape_of: Callable[[int], tuple[int, ...]]) -> None:
        """All passes of this stage; returns when its sends have been taken.

        Args:
            shape_of: shape of what passes between stages for a micro-batch (activation and gradient alike).
        """
        arriving: dict[Message, Arrival] = {}
        leaving: dict[Message, Departure] = {}
        kept: dict[Action, torch.Tensor] = {}
        at, self.spans = self.progress.at, []
        for turn in turns(schedule, self.stage):
            for message in turn.post:
                arriving[message] = self.link.start_receive(
                    shape_of(message.action.micro_batch), self.dtype, self.link.peer(message.source),
                    downstream=message.downstream,
                )
            received: torch.Tensor | None = None
            if turn.receive is not None:
                what = "activation of micro-batch" if turn.receive.downstream else "gradient of micro-batch"
                at(TRANSFER, what, turn.action.micro_batch)
                received = arriving.pop(turn.receive).take()
            elif turn.action.kind is not Kind.WEIGHT:
                received = kept.pop(turn.action, None)
            for message in turn.settled:
                leaving.pop(message).finish()
            started = time.perf_counter() if self.record else 0.0
            result = worker.run(turn.action, received)
            if self.record:
                self.spans.append(Span(turn.action, started, time.perf_counter()))
            if turn.keep is not None or turn.send is not None:
                if result is None:
                    raise RuntimeError(f"{turn.action} gave nothing to hand on")
                if turn.keep is not None:
                    kept[turn.keep] = result.detach()
                if turn.send is not None:
                    leaving[turn.send] = self.link.send(
                        result, self.link.peer(turn.send.target), downstream=turn.send.downstream
                    )
        at(TRANSFER, "last sends")
        self.link.drain()

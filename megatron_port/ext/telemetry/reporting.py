"""The numbers of each step and evaluation, given to the run's telemetry."""

from __future__ import annotations

from collections import deque

import torch

from megatron_port.core.data.objective import objective_of
from megatron_port.core.registry import PARTS
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import Ending, LoopHook, LoopState, TakenStep
from megatron_port.ext.telemetry.flops import hardware_flops, model_flops
from megatron_port.ext.telemetry.peak_memory import peak_resident_bytes
from megatron_port.ext.telemetry.sinks import Telemetry


class Reporting(LoopHook):
    """Report each step, with what the other hooks measured of it.

    Attributes:
        rates: (hardware, model) TFLOP/s per device of the last 1,000 steps.
        document: mean length of a token's document, from which attention is counted (rank 0; ``telemetry.flops``).
    """

    def __init__(self, state: LoopState) -> None:
        super().__init__(state)
        self.rates: deque[tuple[float, float]] = deque(maxlen=1000)
        rank_zero = state.session.is_rank_zero
        self.document = 0.0
        if rank_zero and state.config.data.attention_documents == "within":
            self.document = PARTS.function("document length")(state.config, state.loaders.train.dataset)
        self.objective = objective_of(state.config)
        self._telemetry: Telemetry | None = None

    def begin(self, *, again: bool = False) -> None:
        """Open the sinks; lines of later steps are removed."""
        session = self.state.session
        self._telemetry = Telemetry(
            run_folder(self.state.config), self.state.config, is_rank_zero=session.is_rank_zero,
            resumed_step=self.state.progress.step, warn=session.logger.log, guard=session.fence.check,
        )

    def after_step(self, taken: TakenStep) -> None:
        """Report a step, whether it can be trusted or not."""
        r, c, p = taken.result, self.state.config, self.state.progress
        record = {
            "step": p.step, "loss": r.loss if r.tokens else None, **self.objective.metrics(r.auxiliary, r.tokens),
            "learning_rate": taken.lr, "loss_scale": r.loss_scale, "skipped": r.skipped, "grad_norm": r.grad_norm,
            "skipped_total": p.skipped, "anomalies_total": self.state.numerics.anomalies_total,
            "samples": p.samples, "tokens": p.samples * c.model.seq_length,
            "tokens_per_second": taken.size * c.model.seq_length / taken.seconds, "seconds": taken.seconds,
            "memory_bytes": self._peak_memory(), "fragmentation_bytes": self._fragmentation(), **self._speed(taken),
        }
        for hook in self.state.hooks:
            record |= hook.measure(taken)
        if self._telemetry is not None:
            self._telemetry.step(record, r.tallies)

    def evaluation(self, loss: float, seconds: float) -> None:
        """Report an evaluation after the steps so far."""
        if self._telemetry is not None:
            self._telemetry.evaluation(step=self.state.progress.step, validation_loss=loss, seconds=seconds)

    def before_rewind(self) -> None:
        """Close the sinks: they begin again where the run does."""
        self.close(None)

    def close(self, ending: Ending | None) -> None:
        """Finish all sinks."""
        if self._telemetry is not None:
            self._telemetry.close()

    def _speed(self, taken: TakenStep) -> dict[str, float]:
        """Return what the devices computed each second, and its shares of their peak."""
        c, size, seconds, devices = self.state.config, taken.size, taken.seconds, self.state.ctx.topology.world_size
        model = model_flops(c.model, c.fine_tuning, self.document) * size / seconds / devices / 1e12
        executed = hardware_flops(
            c.model, c.activations.recompute, self.state.ctx.topology.tp, self.state.choices, c.fine_tuning,
            self.document, chunked_head=c.activations.head_chunk > 0,
        )
        hardware = executed * size / seconds / devices / 1e12
        self.rates.append((hardware, model))
        out = {"model_tflops_per_device": model, "hardware_tflops_per_device": hardware}
        if c.cluster.peak_tflops:
            out |= {"mfu": model / c.cluster.peak_tflops, "hfu": hardware / c.cluster.peak_tflops}
        return out

    def _peak_memory(self) -> int:
        if self.state.session.device.is_gpu:
            return int(torch.cuda.max_memory_allocated())
        return peak_resident_bytes()

    def _fragmentation(self) -> int | None:
        """Bytes that the device's allocator has reserved beyond what it has given out; None on a CPU."""
        if not self.state.session.device.is_gpu:
            return None
        return int(torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated())

"""The native engine: schedules as data, AdamW on fp32 masters, every layout, every dtype.

It needs nothing but torch, runs in fp64 for proofs, and on one process it is
the reference that every layout of either engine is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_port.config.schema import RunConfig
from megatron_port.engine.api import (
    NO_LIMITS,
    EvalResult,
    MicroBatch,
    StatePiece,
    StateReader,
    StepLimits,
    StepResult,
)
from megatron_port.engine.module import logical_pieces, read_local, recorded_parameters, zero_moments
from megatron_port.engine.native_update import make_update
from megatron_port.engine.probe import Probe
from megatron_port.engine.totals import device_sums, global_tokens, refused_loss, shared_sums
from megatron_port.optim.gradients import (
    counts_in_norm,
    reduce_partial_gradients,
    reduce_tied_gradients,
)
from megatron_port.optim.loss_scale import LossScaler
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.record import ParameterRecord
from megatron_port.pipeline.schedules import SCHEDULES, Kind
from megatron_port.pipeline.transfer import StageLink
from megatron_port.runtime.pulse import BACKWARD, FORWARD, OPTIMIZER, REDUCE, TRANSFER, Pulse

GradientHook = Callable[[list[tuple[ParameterRecord, torch.Tensor]]], None]


class NativeEngine:
    """See ``engine.api.Engine``. ``on_gradients`` sees every final gradient (summed over dp, unclipped, unscaled)."""

    def __init__(
        self, stage: Any, config: RunConfig, ctx: ParallelContext, stream: DropoutStream, *, dtype: torch.dtype,
        optimizer_provider: str = "torch", pulse: Pulse | None = None,
    ) -> None:
        self.stage, self.config, self.ctx, self.stream, self.dtype = stage, config, ctx, stream, dtype
        self.pulse = pulse or Pulse()
        self.link = StageLink(ctx)
        self.parameters = recorded_parameters(stage)
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.separate_master = dtype != self.wide
        self.main_grads = [torch.zeros(p.shape, dtype=self.wide, device=p.device) for _, p in self.parameters]
        if self.separate_master:
            self.masters = [torch.zeros(p.shape, dtype=self.wide, device=p.device) for _, p in self.parameters]
        else:
            self.masters = [p.detach() for _, p in self.parameters]
        for grad, (_, p) in zip(self.main_grads, self.parameters):
            p.main_grad = grad  # type: ignore[attr-defined]  # where parallel.linear adds a weight's gradient itself
            p.register_post_accumulate_grad_hook(self._accumulate_into(grad))
        self.update = make_update(optimizer_provider, self.parameters, self.masters, config.optimizer)
        self.scaler = LossScaler(config.precision)
        self.on_gradients: GradientHook | None = None
        self._losses: list[torch.Tensor] = []
        self.first, self.last = self.link.previous is None, self.link.next is None

    @staticmethod
    def _accumulate_into(main_grad: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """A hook that adds to the wide sum what arrives as ``grad`` (all but the linears' weights), and frees it."""

        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:  # None: parallel.linear has added it already
                main_grad.add_(parameter.grad)
                parameter.grad = None

        return hook

    def _run_forward(self, batch: MicroBatch, step: int, number: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(stage input that needs a gradient, output) of micro-batch ``number``: receive, compute, send."""
        self.stream.set_micro_batch(step, batch.sample_ids)
        received = None
        at = self.pulse.at
        if self.link.previous is None:
            if batch.tokens is None:
                raise ValueError("the first stage got a micro-batch without tokens")
            at(FORWARD, "micro-batch", number)
            output = self.stage(batch.tokens.to(self.ctx.device))
        else:
            shape = self.stage.activation_shape(len(batch.sample_ids), self.config.model.seq_length)
            at(TRANSFER, "activation of micro-batch", number)
            received = self.link.receive(shape, self.dtype, self.link.previous)
            at(FORWARD, "micro-batch", number)
            received.requires_grad_(torch.is_grad_enabled())
            output = self.stage(received)
        if self.link.next is not None:
            self.link.send(output, self.link.next)
        return received, output

    def _loss_sum(self, logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        if batch.labels is None:
            raise ValueError("the last stage got a micro-batch without labels")
        mask = batch.loss_mask.to(self.ctx.device) if batch.loss_mask is not None else None
        return self.stage.loss_sum(logits, batch.labels.to(self.ctx.device), mask)

    def _forward_backward(
        self, micro_batches: Sequence[MicroBatch], step: int, tokens: float, probe: Probe | None
    ) -> torch.Tensor:
        """Run the schedule; the sum of this replica's token losses (0 except on the last stage)."""
        plan = SCHEDULES[self.config.layout.pipeline_schedule](
            self.ctx.coords.pp, self.ctx.topology.pp, len(micro_batches)
        )
        held: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        at = self.pulse.at
        self._losses = []
        total = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        for action in plan:
            m = action.micro_batch
            if action.kind is Kind.FORWARD:
                with nullcontext() if probe is None else probe.forward(m):
                    received, output = self._run_forward(micro_batches[m], step, m)
                if self.last:
                    output = self._loss_sum(output, micro_batches[m])
                    self._losses.append(output.detach())
                    total += self._losses[-1]
                    if probe is not None:
                        probe.loss(m, output)
                held[m] = (received, output)
                continue
            received, output = held.pop(m)
            if self.link.next is None:
                at(BACKWARD, "micro-batch", m)
                (output * (self.scaler.scale / tokens)).backward()
            else:
                at(TRANSFER, "gradient of micro-batch", m)
                grad = self.link.receive(tuple(output.shape), output.dtype, self.link.next)
                at(BACKWARD, "micro-batch", m)
                output.backward(grad)
            if self.link.previous is not None:
                self.link.send(received.grad, self.link.previous)  # type: ignore[union-attr, arg-type]
            if probe is not None:
                probe.after_backward(m, [*self.main_grads, None if received is None else received.grad])
        at(TRANSFER, "last sends")
        self.link.drain()
        return total

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, step: int, lr: float, limits: StepLimits = NO_LIMITS,
        probe: Probe | None = None,
    ) -> StepResult:
        """One optimizer step; see ``engine.api.Engine``."""
        self.stage.train()
        self.stream.enabled = True
        for grad in self.main_grads:
            grad.zero_()
        at = self.pulse.at
        at(REDUCE, "tokens of the step")
        tokens = global_tokens(micro_batches, self.ctx, seq_length=self.config.model.seq_length)
        with nullcontext() if probe is None else probe.watch(self.stage):
            loss_sum = self._forward_backward(micro_batches, step, tokens, probe)
        grads = [(record, grad) for (record, _), grad in zip(self.parameters, self.main_grads)]
        at(REDUCE, "gradients over tp")
        if probe is not None:
            probe.own_gradients(grads)
        reduce_partial_gradients(grads, self.ctx)
        at(REDUCE, "gradients over dp")
        if self.ctx.dp_group is not None:
            for grad in self.main_grads:
                dist.all_reduce(grad, group=self.ctx.dp_group)
        at(REDUCE, "tied gradients over the stages")
        reduce_tied_gradients(grads, self.ctx)
        used_scale = scale = self.scaler.scale
        if self.on_gradients is not None:
            for grad in self.main_grads:
                grad.div_(scale)
            scale = 1.0
            self.on_gradients(grads)
        at(REDUCE, "loss of the step")
        largest_loss, largest_norm = limits.largest
        sums = device_sums([loss_sum, tokens / self.ctx.topology.dp], self.ctx)
        veto = refused_loss(sums, largest_loss) if probe is None else torch.ones((), device=sums.device)
        at(OPTIMIZER, "gradient norm and update")
        norm, refused = self.update.step(grads, self.ctx, lr=lr, scale=scale, veto=veto, limit=largest_norm)
        # The step's one host synchronisation (one more for each mask's count and torch's AdamW).
        total, count, grad_norm, skipped = torch.stack([*sums, norm.double(), refused.double()]).tolist()
        loss, finite = total / max(count, 1.0), math.isfinite(grad_norm)
        if probe is None:
            self.scaler.account(loss, grad_norm, applied=not skipped)
        return StepResult(
            loss=loss, tokens=round(count), grad_norm=grad_norm if finite else None, skipped=bool(skipped),
            loss_scale=used_scale,
        )

    def micro_batch_losses(self) -> Sequence[torch.Tensor]:
        """Scalars, last stage only; see ``engine.api.Engine``."""
        return self._losses

    def bad_gradients(self) -> list[str]:
        """See ``engine.api.Engine``."""
        return [r.name for (r, _), g in zip(self.parameters, self.main_grads) if not bool(torch.isfinite(g).all())]

    @torch.no_grad()
    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Forward only; see ``engine.api.Engine``."""
        self.stage.eval()
        self.stream.enabled = False
        total = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        for number, batch in enumerate(micro_batches):
            _, output = self._run_forward(batch, 0, number)
            if self.last:
                total += self._loss_sum(output, batch)
        self.pulse.at(TRANSFER, "last sends")
        self.link.drain()
        self.pulse.at(REDUCE, "loss of the batch")
        tokens = global_tokens(micro_batches, self.ctx, seq_length=self.config.model.seq_length)
        self.stream.enabled = True
        loss_sum, count = shared_sums([total, tokens / self.ctx.topology.dp], self.ctx)
        return EvalResult(loss_sum=loss_sum, tokens=round(count))

    def named_parameters(self) -> Iterator[tuple[ParameterRecord, nn.Parameter]]:
        """This rank's parameters."""
        yield from self.parameters

    def state_pieces(self) -> Iterator[StatePiece]:
        """Masters and moments; replicas are equal, so dp rank 0 saves."""
        if self.ctx.coords.dp != 0:
            return
        for (record, _), master in zip(self.parameters, self.masters):
            if not counts_in_norm(record, self.ctx):
                continue
            state = self.update.state.get(master, {})
            yield from logical_pieces(record, "weight", master.detach().reshape(-1), 0)
            for kind in ("exp_avg", "exp_avg_sq"):
                value = state.get(kind)
                flat = torch.zeros(master.numel(), dtype=self.wide) if value is None else value.reshape(-1)
                yield from logical_pieces(record, kind, flat, 0)

    def scalar_state(self) -> dict[str, float | int]:
        """Optimizer steps taken, and the loss scale."""
        steps = [float(s["step"]) for s in self.update.state.values() if "step" in s]
        return {"optimizer_steps": int(steps[0]) if steps else 0, **self.scaler.state()}

    def load_state(self, read: StateReader, scalars: dict[str, float | int]) -> None:
        """Set masters, weights, moments and counters."""
        steps = int(scalars.get("optimizer_steps", 0))
        for (record, p), master in zip(self.parameters, self.masters):
            read_local(read, record, "weight", master)
            state = {
                "step": torch.tensor(float(steps)),
                "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master),
            }
            for kind in ("exp_avg", "exp_avg_sq"):
                read_local(read, record, kind, state[kind])
            self.update.state[master] = state
            if not self.separate_master and p.data_ptr() != master.data_ptr():
                raise RuntimeError(f"{record.name}: weight and master no longer share storage")
        self.update.publish()
        self.scaler.load(scalars)

    def load_weights(self, read: StateReader) -> None:
        """Set weights; moments and counters start afresh."""
        self.load_state(zero_moments(read), {})
